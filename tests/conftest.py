import collections
import gc
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from interpreter import repair_the_interpreter, speed_up_the_interpreter

# torch's deterministic mode requires this setting.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# `make test` runs the suite twice: on the CPU, where an op runs its reference or other PyTorch code, and in
# Triton's interpreter, which runs the kernels on CPU tensors. `make test-gpu` runs the kernels on a GPU. A test that
# would show nothing in a run is deselected there by one of the markers below. It is not skipped, because a skipped test
# is easily taken for one that passed. Tests are skipped only where a library of the extra `dev`, a program or a device
# is absent.
MARKERS = {
    "kernels": "the test shows something only where kernels run: in the interpreter or on a GPU. On a CPU many ops run "
    "their reference, and the test would compare a reference with itself; tests/ops/test_references.py has one test "
    "per op for that case",
    "interpreter": "the test runs kernels on CPU tensors, which only the interpreter does",
    "no_interpreter(reason)": "the run in the interpreter leaves the test out, because the test launches no kernel or "
    "because the interpreter cannot show what it checks (compiled code, bf16, memory, threads)",
    "gpu": "the test needs a GPU",
    "deepspeed": "the test needs DeepSpeed, which `make test-deepspeed` installs",
}

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
ON_GPU = torch.cuda.is_available() and not INTERPRETED

# `make test` leaves out these tests, or these cases of parametrised tests, because each takes many seconds.
# `make test-thorough` runs them.
THOROUGH: dict[str, tuple[str, ...] | None] = {
    "test_two_ranks": ("more ways", "sharded", "Trainer", "FSDP2 by accelerate"),
    "test_two_ranks_give_the_results_of_stock": ("more ways", "fp8", "adapters by ops"),
    "test_two_ranks_have_the_mean_loss_of_stock_on_the_text_of_both": None,
    "test_two_ranks_shard_the_model_and_have_the_losses_of_one_process": None,
    "test_two_revisions_are_measured_in_turn": None,
    "test_losses_outside_of_the_noise_fail_the_command": None,
    "test_unsloth_trains_the_weights_and_adapters_of_stock": None,
    "test_no_type_breaks_the_graph": ("qwen2", "qwen3", "gemma2", "phi3"),
    "test_a_compiled_function_distinguishes_stock_and_patched_models": ("stock",),
    "test_compiled": ("checkpoint-0.8", "lean+mlp-0.8"),
    "test_compiled_code_agrees": ("jsd",),
    "test_a_mixture_compiles_without_a_graph_break": None,
    "test_compiled_layers_run_attention_again_and_warn": None,
    "test_layers_without_attention_run_again_as_before": None,
    "test_a_compiled_model_reads_settings_too": None,
    "test_a_compiled_model_uses_another_loss_type": None,
    "test_a_compiled_model_with_checkpointing_and_a_soft_cap_works": None,
    "test_a_compiled_layer_that_was_hooked_after_the_patch_runs_once": None,
    "test_a_compiled_model_runs_in_fp8_without_a_graph_break": None,
    "test_a_compiled_model_with_norms_of_heads_saves_less": None,
    "test_an_optional_argument_is_no_gate": ("shift",),
    "test_the_kernels_train_as_stock_in_the_interpreter": ("qwen3", "phi3"),
}

# Of the cases of these parametrised tests, `make test` runs the first one and then one in so many, and
# `make test-thorough` runs the others. If a number and the count of values of a parameter have a common divisor, one of
# these values may never run in `make test`.
SAMPLED = {
    "examples/test_lora.py::test_the_losses_are_those_of_stock_and_the_adapter_can_be_loaded": 2,
    "hf/test_all_types.py::test_loss_and_gradients_are_stock_and_restore_is_exact": 2,
    "hf/test_all_types.py::test_replaced_parts_agree_with_the_record": 8,
    "hf/test_by_type.py::test_the_model_is_equal_to_one_that_is_patched_directly": 2,
    "hf/test_fp8.py::test_each_level_of_memory_gives_the_same_step": 2,
    "hf/test_fp8.py::test_loss_and_gradients_are_near_those_of_bf16": 3,
    "hf/test_head.py::test_scales_soft_caps_and_router_losses_work_as_in_stock": 2,
    "hf/test_lifecycle.py::test_a_copy_is_patched_and_uses_its_own_parameters": 3,
    "hf/test_lifecycle.py::test_gradient_checkpointing_gives_the_results_of_stock": 3,
    "hf/test_lora_experts.py::test_the_next_call_follows_a_change": 3,
    "hf/test_loss_changed_after.py::test_another_loss_is_used": 5,
    "hf/test_patch.py::test_each_part_alone_is_stock": 2,
    "hf/test_patch.py::test_recognition_needs_no_weights": 2,
    "hf/test_settings_changed_after.py::test_a_change_of_an_unwatched_value_raises": 3,
    "hf/test_settings_changed_after.py::test_a_setting_changed_after_the_patch_is_used": 3,
    "hf/test_settings_changed_after.py::test_rounding_is_not_taken_for_a_change": 3,
    "hf/test_vision.py::test_every_part_gives_the_results_of_stock": 5,
    "hf/test_ways_adapters.py::test_adapters_on_every_layer_give_the_results_of_stock": 3,
    "hf/test_ways_adapters.py::test_quantised_and_wrapped_weights_give_the_results_of_stock": 3,
    "hf/test_ways_empty_weights.py::test_empty_weights_give_the_results_of_stock": 3,
    "hf/test_ways_trainer.py::test_the_trainer_gives_the_results_of_stock": 2,
    "integrations/test_trl.py::test_every_trainer_trains_as_without_tigon": 5,
    "integrations/test_trl.py::test_options_of_trainers_have_their_meaning": 2,
    "integrations/test_trl.py::test_soft_caps_and_scales_are_those_of_the_model": 3,
    "integrations/test_trl.py::test_the_level_checkpoint_checkpoints_the_layers": 2,
    "integrations/test_trl.py::test_the_level_checkpoint_outlives_generation_and_the_reference": 2,
    "integrations/test_trl.py::test_trainers_that_were_built_before_use_tigon": 5,
    "losses/test_contracts.py::test_the_gradient_is_the_derivative": 4,
    "memory/test_attention.py::test_steps_have_the_bits_of_other_levels": 5,
    "memory/test_changed_before_backward.py::test_a_change_between_forward_and_backward_is_refused": 3,
    "memory/test_layer_inputs.py::test_steps_have_the_bits_of_checkpoint": 2,
    "memory/test_levels.py::test_every_level_saves_less_with_the_same_bits": 2,
    "memory/test_models.py::test_models_save_less": 5,
    "memory/test_repeating.py::test_a_projection_that_differs_in_every_call_is_called_once": 4,
    "recognition/test_conditions.py::test_a_condition_on_probed_properties_and_settings_is_no_decision": 2,
    "recognition/test_experts.py::test_compiles_without_a_graph_break": 5,
    "recognition/test_guard.py::test_a_setting_that_changes_after_the_patch_is_used": 2,
    "recognition/test_guard_compiled.py::test_a_compiled_module_is_compiled_again_after_a_change": 4,
    "recognition/test_probes.py::test_an_epsilon_that_the_module_modifies_has_its_stock_effect": 2,
    "recognition/test_side_effects.py::test_a_tensor_that_is_set_later_is_used": 2,
    "recognition/test_side_effects.py::test_ordinary_checks_options_and_settings_are_no_decisions": 2,
    "runtime/test_no_triton.py::test_tigon_works_without_triton": 3,
    "runtime/test_requirements.py::test_error_without_transformers_names_the_extra": 3,
    "runtime/test_requirements.py::test_import_refuses_old_packages_in_one_error": 2,
    "tools/bench/train/test_train_run.py::test_an_interrupted_command_keeps_its_measurements": 2,
    "tools/compile/test_targets.py::test_a_kernel_compiles_without_spilling": 3,
    "tools/inspect/test_inspect.py::test_the_page_is_up_to_date": 8,
    "tools/training/test_lora.py::test_each_provider_trains_the_same_adapters": 2,
}

# The same for the run in the interpreter, where a kernel takes a thousand times as long. Recognition of experts alone
# takes ten seconds there.
SAMPLED_IN_INTERPRETER = {
    "hf/test_lora.py::test_a_language_model_runs_its_adapters_by_ops_in_either_order": 2,
    "hf/test_lora.py::test_variants_of_lora_compute_what_stock_computes": 2,
    "hf/test_lora_experts.py::test_a_step_is_that_of_the_stock_model": 3,
    "hf/test_lora_experts.py::test_the_experts_are_as_accurate_as_with_peft": 5,
    "hf/test_lora_experts.py::test_the_next_call_follows_a_change": 11,
    "memory/test_lean.py::test_results_that_were_written_before_they_are_saved_stay_saved": 3,
    "ops/adapters/test_fp8_weight.py::test_several_adapters_and_dropout_do_each_pass_once": 3,
    "ops/adapters/test_lora.py::test_lora_linear_is_as_accurate_as_eager": 2,
    "ops/adapters/test_lora.py::test_the_product_that_reads_x_finds_its_maximum_or_writes_its_copy": 3,
    "ops/adapters/test_lora_experts.py::test_any_number_of_adapters": 3,
    "ops/adapters/test_lora_experts.py::test_lora_moe_mlp_is_as_accurate_as_peft": 3,
    "ops/adapters/test_lora_experts.py::test_only_the_gradients_that_are_needed": 2,
    "ops/fp8/test_fp8_glu_mlp.py::test_each_gradient_depends_on_its_own_requires_grad": 11,
    "ops/fp8/test_fp8_glu_mlp.py::test_it_is_as_accurate_as_eager_code": 5,
    "ops/fp8/test_fp8_linear.py::test_each_gradient_depends_on_its_own_requires_grad": 5,
    "ops/fp8/test_fp8_linear.py::test_strides_do_not_matter": 3,
    "ops/head/test_linear_loss.py::test_loss_and_gradients_are_as_accurate_as_eager_code": 2,
    "ops/rotary/test_qk_norm_rope.py::test_qk_norm_rope_accuracy": 3,
    "ops/rotary/test_rope.py::test_rope_accuracy": 2,
    "ops/test_contracts.py::test_only_the_inputs_that_need_a_gradient_get_one": 2,
    "ops/test_contracts.py::test_results_are_the_same_from_run_to_run": 3,
    "ops/test_contracts.py::test_strides_of_the_inputs_do_not_matter": 3,
    "ops/test_contracts.py::test_upstream_gradients_may_be_expanded_or_transposed": 3,
    "ops/test_contracts.py::test_without_gradients_the_outputs_are_the_same": 3,
}
# These tests are left out there.
THOROUGH_IN_INTERPRETER = (
    "hf/test_lora_experts.py::test_a_copy_of_a_patched_model_reads_its_own_adapters",
    "hf/test_lora_experts.py::test_a_hook_that_lets_the_stock_experts_run_loses_no_adapter",
    "hf/test_lora_experts.py::test_a_method_that_changes_after_the_patch_runs",
    "hf/test_lora_experts.py::test_another_layout_of_the_factors_is_left_alone",
    "hf/test_lora_experts.py::test_hooks_of_the_experts_run",
    "hf/test_lora_experts.py::test_levels_of_memory",
    "hf/test_lora_experts.py::test_other_parameters_are_left_alone",
    "hf/test_lora_experts.py::test_the_patch_may_come_first",
    "ops/head/test_linear_log_probs_parallel.py::test_a_sharded_head_has_the_results_of_the_whole_head",
    "ops/optim/test_muon.py::test_two_ranks_train_as_one",
)


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETED:
        repair_the_interpreter()
        speed_up_the_interpreter()
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def runs_here(item: pytest.Item) -> bool:
    """Return True if the markers of a test allow it in this run."""
    if INTERPRETED and item.get_closest_marker("no_interpreter"):
        return False
    if item.get_closest_marker("interpreter") and not INTERPRETED:
        return False
    if item.get_closest_marker("gpu") and not ON_GPU:
        return False
    if item.get_closest_marker("deepspeed") and not HAS_DEEPSPEED:
        return False
    return not item.get_closest_marker("kernels") or INTERPRETED or ON_GPU


def path_and_name(item: pytest.Item) -> str:
    """Return "hf/test_patch.py::test_a" for every case of this test."""
    return item.nodeid.partition("[")[0].removeprefix("tests/")


def is_thorough(item: pytest.Function) -> bool:
    """Return True if one of the tables has this test or this case of it."""
    if INTERPRETED and path_and_name(item) in THOROUGH_IN_INTERPRETER:
        return True
    if item.originalname not in THOROUGH:
        return False
    cases = THOROUGH[item.originalname]
    return cases is None or (hasattr(item, "callspec") and item.callspec.id in cases)


def add_thorough_marks_to_samples(items: list[pytest.Item]) -> None:
    """Mark the cases of sampled tests that are no part of the sample."""
    steps = SAMPLED | SAMPLED_IN_INTERPRETER if INTERPRETED else SAMPLED
    counts: collections.Counter[str] = collections.Counter()
    for item in items:
        name = path_and_name(item)
        if name in steps and not item.get_closest_marker("thorough"):
            if counts[name] % steps[name]:
                item.add_marker(pytest.mark.thorough)
            counts[name] += 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and is_thorough(item):
            item.add_marker(pytest.mark.thorough)
    add_thorough_marks_to_samples(items)
    deselected = [item for item in items if not runs_here(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if runs_here(item)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt everything that the collection has created from garbage collection.

    These objects stay until the process ends. With them, each `gc.collect()` of a test or of Tigon takes 0.5 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def poisoned():
    """Fill the memory that an op allocates with NaN, or with the largest integer, until the op writes it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


@pytest.fixture
def one_thread():
    """Use one thread. With small tensors, several threads wait for each other and take three times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a folder with two text files, one binary file and one hidden file."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_text("".join(f"def function_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(300)))
    (folder / "b.txt").write_text("the quick brown fox jumps over the lazy dog, again and again\n" * 60)
    (folder / "c.bin").write_bytes(bytes(range(256)))
    (folder / ".hidden").write_text("not this")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tigon"

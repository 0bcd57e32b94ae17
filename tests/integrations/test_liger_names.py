"""The alias for Liger: names of its modules, errors of absent names, dtypes of results, tables of rotary embeddings."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tigon
from tigon.integrations.liger import names

pytestmark = [
    pytest.mark.usefixtures("alias"),
    pytest.mark.no_interpreter("tests/ops has the tests of the ops that these functions call."),
]
HALF = [torch.bfloat16, torch.float16]


# --- names -----------------------------------------------------------------------------------------

STATEMENTS = """
liger_kernel.transformers.modulated_rms_norm: LigerModulatedRMSNorm
liger_kernel.transformers.mlp: LigerMLP LigerFalconH1MLP
liger_kernel.transformers.fused_add_rms_norm: LigerFusedAddRMSNorm
liger_kernel.transformers.multi_token_attention: LigerMultiTokenAttention
liger_kernel.transformers.jsd: LigerJSD LigerJSDFunction
liger_kernel.transformers.functional: CrossEntropyOutput liger_rope
liger_kernel.transformers.qwen2vl_mrope: liger_multimodal_rotary_pos_emb
liger_kernel.transformers.monkey_patch: MODEL_TYPE_TO_APPLY_LIGER_FN liger_rotary_pos_emb liger_rotary_pos_emb_vision
liger_kernel.transformers.trainer_integration: _apply_liger_kernel
liger_kernel.transformers.experimental.embedding: LigerEmbedding
liger_kernel.ops: LigerFusedMoEFunction LigerLlama4RopeFunction
liger_kernel.ops.fused_ce_tvd: LigerFusedCETVDFunction
liger_kernel.ops.fused_moe: LigerFusedMoEFunction
liger_kernel.ops.mhc: LigerMHCCoeffsFunction LigerMHCPreFunction LigerMHCPostResFunction
liger_kernel.transformers.mhc: LigerMHC
liger_kernel.transformers.functional: liger_mhc_coeffs liger_mhc_forward
liger_kernel.ops.swiglu: LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction
liger_kernel.chunked_loss.fused_linear_ppo: LigerFusedLinearPPOBase
liger_kernel.megatron.rms_norm: LigerMegatronRMSNorm
liger_kernel.utils: infer_device
"""


def import_from(module: str, name: str) -> object:
    """Execute the statement, because `getattr` takes another path through the import machinery."""
    scope: dict[str, object] = {}
    exec(f"from {module} import {name}", scope)
    return scope[name]


@pytest.mark.parametrize("line", STATEMENTS.strip().splitlines(), ids=lambda line: line.split(":")[0])
def test_names_of_modules_can_be_imported(line):
    module, _, served = line.partition(": ")
    for name in served.split():
        assert import_from(module, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("module", "name", "advice"),
    [
        ("liger_kernel.ops.grpo_loss", "GrpoLossFunction", "use triton_grpo_loss"),
        ("liger_kernel.ops.tiled_mlp", "apply_tiled_mlp", "use LigerTiledSwiGLUMLP"),
        ("liger_kernel.transformers.rope", "no_such_name", "use the op of tigon that computes it"),
        ("liger_kernel.utils", "no_such_name", "use the op of tigon that computes it"),
        ("liger_kernel.ops.cutile.ops.rope", "rope_forward", "use liger_kernel.functional"),
        ("liger_kernel.transformers.model.llama", "lce_forward", "use tigon.patch"),
        ("liger_kernel.transformers.trainer", "LigerORPOTrainer", "use trl's ORPOTrainer"),
        ("liger_kernel", "backends", "use liger_kernel.functional"),
        ("liger_kernel.megatron.monkey_patch", "apply_liger_kernel_to_megatron", "use LigerMegatronRMSNorm"),
    ],
)
def test_the_import_of_an_absent_name_says_what_to_use(module, name, advice):
    with pytest.raises(ImportError, match=f"is not served by Tigon.* {advice}"):
        import_from(module, name)


def test_an_absent_name_is_an_attribute_error_outside_of_an_import():
    import liger_kernel.transformers.rope as module

    assert not hasattr(module, "apply_tiled_mlp")
    assert getattr(module, "no_such_name", None) is None
    with pytest.raises(AttributeError, match="use LigerTiledSwiGLUMLP"):
        _ = module.apply_tiled_mlp
    assert importlib.util.find_spec("liger_kernel.no_such_module") is None
    # `dir` names what `inspect.getmembers` and completion look for, without importing it.
    assert "liger_rotary_pos_emb" in dir(module)
    assert "liger_rotary_pos_emb" not in vars(module)


def test_the_map_of_types_decides_which_function_patches(monkeypatch):
    import liger_kernel.transformers.monkey_patch as served

    functions = {getattr(served, name) for name in dir(served) if name.startswith("apply_liger_kernel_to_")}
    assert functions == set(served.MODEL_TYPE_TO_APPLY_LIGER_FN.values())
    calls = []
    monkeypatch.setitem(
        served.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", lambda rope=True, model=None: calls.append((rope, model))
    )
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="llama")
    served._apply_liger_kernel("llama", rope=False, unknown=1)
    served._apply_liger_kernel_to_instance(model)
    assert calls == [(False, None), (True, model)]


@pytest.mark.parametrize("from_disk", [False, True])
def test_the_automatic_class_calls_a_function_that_the_program_has_put_into_the_map(monkeypatch, tmp_path, from_disk):
    transformers = pytest.importorskip("transformers")
    from liger_kernel.transformers import AutoLigerKernelForCausalLM
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)

    def build(**options):
        if from_disk:
            return AutoLigerKernelForCausalLM.from_pretrained(str(tmp_path), **options)
        return AutoLigerKernelForCausalLM.from_config(config, **options)

    assert "already" in str(tigon.patch(build(rope=False, attn_implementation="eager")))
    calls = []
    monkeypatch.setitem(MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", lambda rope=True, model=None: calls.append(rope))
    model = build(rope=False, attn_implementation="eager")
    assert calls == [False]
    assert model.config._attn_implementation == "eager"
    assert "already" not in str(tigon.patch(model))


def test_a_type_that_nobody_knows_is_logged(caplog):
    from liger_kernel.transformers import _apply_liger_kernel

    pytest.importorskip("transformers")
    _apply_liger_kernel("no_such_type")
    assert "model_type must be a model type, got 'no_such_type'" in caplog.text


# --- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_cross_entropy_has_the_dtype_of_the_logits(dtype, reduction):
    from liger_kernel.functional import cross_entropy
    from liger_kernel.ops import LigerCrossEntropyFunction
    from liger_kernel.transformers import LigerCrossEntropyLoss
    from liger_kernel.transformers.functional import liger_cross_entropy

    logits, target = torch.randn(6, 9).to(dtype).requires_grad_(), torch.randint(9, (6,))
    expected = F.cross_entropy(logits, target, reduction=reduction)
    output = LigerCrossEntropyLoss(reduction=reduction, lse_square_scale=1e-3, return_z_loss=True)(logits, target)
    assert output.loss.dtype == output.z_loss.dtype == dtype
    losses = [
        LigerCrossEntropyLoss(reduction=reduction)(logits, target),
        liger_cross_entropy(logits, target, reduction=reduction),
        cross_entropy(logits, target, reduction=reduction)[0],
        LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, reduction)[0],
    ]
    for loss in losses:
        torch.testing.assert_close(loss, expected)
        assert torch.autograd.grad(loss.sum(), logits)[0].dtype == dtype
    # Tigon's own function is as exact as fp32 can be.
    assert tigon.cross_entropy(logits, target, reduction=reduction).dtype == torch.float32


def test_the_loss_of_a_head_stays_in_fp32():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight, target = torch.randn(6, 8).bfloat16(), torch.randn(9, 8).bfloat16(), torch.randint(9, (6,))
    output = LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-3, return_z_loss=True)(weight, hidden, target)
    assert (output.loss.dtype, output.z_loss.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("target", [9, -1])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_a_target_that_is_no_class_raises(target, ignore_index):
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss = LigerCrossEntropyLoss(ignore_index=ignore_index, reduction="none")
    assert loss(torch.randn(2, 9), torch.tensor([1, ignore_index]))[1] == 0
    message = f"target {target} is out of bounds; it must be {ignore_index} or in "
    with pytest.raises(AssertionError, match=message):
        loss(torch.randn(2, 9), torch.tensor([1, target]))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("with_shift", [False, True])
def test_the_modulated_norm_keeps_the_dtype_of_its_input(dtype, casting_mode, with_shift):
    from liger_kernel.transformers.functional import liger_modulated_rms_norm

    x, weight = torch.randn(2, 3, 16).to(dtype).requires_grad_(), torch.ones(16, dtype=dtype)
    scale = torch.randn(2, 16, requires_grad=True)
    shift = torch.randn(2, 16, requires_grad=True) if with_shift else None
    y = liger_modulated_rms_norm(x, weight, scale, shift, casting_mode=casting_mode)
    expected = F.rms_norm(x.detach().float(), (16,), eps=1e-6) * (1 + scale[:, None])
    expected = expected if shift is None else expected + shift[:, None]
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
    inputs = [value for value in (x, scale, shift) if value is not None]
    assert [g.dtype for g in torch.autograd.grad(y.sum(), inputs)] == [value.dtype for value in inputs]


# --- rotary embeddings -----------------------------------------------------------------------------


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, half: int) -> torch.Tensor:
    """Rotate pairs (i, i + half) of x [B, heads, L, D] by tables [B | 1, L, half]."""
    a, b, rest = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8), (2, 5, 8), (1, 1, 5, 8), (2, 1, 5, 8)], ids=str)
@pytest.mark.parametrize(
    "path", ["transformers.liger_rotary_pos_emb", "transformers.functional.liger_rope", "functional.rope"]
)
def test_tables_of_any_rank_rotate(path, shape):
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(f"liger_kernel.{module}"), name)
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(*shape[:-1], 4)
    angles = torch.cat((angles, angles), -1)
    rows = angles.reshape(-1, 5, 8)[..., :4]
    results = function(q, k, angles.cos(), angles.sin())
    for y, x in zip(results, (q, k), strict=True):
        torch.testing.assert_close(y, rotate(x, rows.cos(), rows.sin(), 4))


@pytest.mark.parametrize(
    ("size", "columns", "rotary_dim", "half"),
    [(7, 7, None, 3), (7, 8, None, 3), (9, 5, None, 2), (8, 4, 8, 4), (8, 3, 6, 3), (8, 16, None, 4)],
    ids=["odd", "odd, even table", "partial odd", "table once", "partial table once", "wide table"],
)
def test_odd_head_sizes_and_rotary_dims_rotate_as_in_liger(size, columns, rotary_dim, half):
    from liger_kernel.transformers import liger_rotary_pos_emb

    q, k, angles = torch.randn(2, 3, 5, size), torch.randn(2, 1, 5, size), torch.randn(1, 5, columns)
    q.requires_grad_()
    results = liger_rotary_pos_emb(q, k, angles.cos(), angles.sin(), rotary_dim=rotary_dim)
    expected = [rotate(x, angles.cos()[..., :half], angles.sin()[..., :half], half) for x in (q, k)]
    for y, z in zip(results, expected, strict=True):
        torch.testing.assert_close(y, z)
    dy = torch.randn_like(q)
    torch.testing.assert_close(*(torch.autograd.grad(y, q, dy)[0] for y in (results[0], expected[0])))


@pytest.mark.parametrize("rotary_dim", [3, 0, 10])
def test_a_rotary_dim_that_does_not_fit_is_refused(rotary_dim):
    from liger_kernel.transformers import liger_rotary_pos_emb

    x, table = torch.randn(1, 1, 5, 8), torch.randn(1, 5, 8)
    with pytest.raises(ValueError, match=f"rotary_dim must be even, positive and at most .* got {rotary_dim}"):
        liger_rotary_pos_emb(x, x, table, table, rotary_dim=rotary_dim)


@pytest.mark.parametrize("dtype", HALF)
def test_rotated_queries_keep_their_dtype_below_tables_in_fp32(dtype):
    from liger_kernel.transformers import liger_rotary_pos_emb
    from liger_kernel.transformers.rope import liger_rotary_pos_emb_vision

    x, angles = torch.randn(1, 2, 5, 8).to(dtype), torch.randn(5, 4)
    angles = torch.cat((angles, angles), -1)
    y, _ = liger_rotary_pos_emb(x, x, angles.cos(), angles.sin())
    expected = rotate(x, angles[None, :, :4].cos(), angles[None, :, :4].sin(), 4).to(dtype)
    torch.testing.assert_close(y, expected)
    vision, _ = liger_rotary_pos_emb_vision(*[x[0].transpose(0, 1)] * 2, angles.cos(), angles.sin())
    torch.testing.assert_close(vision, expected[0].transpose(0, 1))


# --- modules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_compute_the_weighted_sum(name):
    from liger_kernel.ops import LigerFusedMoEFunction
    from liger_kernel.transformers import LigerExperts

    sizes = {"hidden_size": 8, "moe_intermediate_size": 6, "intermediate_size": 99, name: 4}
    config = SimpleNamespace(hidden_act="silu", **sizes)
    experts = LigerExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x, index, weights = torch.randn(2, 5, 8), torch.randint(4, (2, 5, 2), dtype=torch.int32), torch.rand(2, 5, 2)
    expected = torch.zeros(2, 5, 8)
    for e in range(4):
        gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, -1)
        factor = (weights * (index == e)).sum(-1, keepdim=True)
        expected += factor * ((F.silu(gate) * up) @ experts.down_proj[e].T)
    torch.testing.assert_close(experts(x, index, weights), expected)
    rows = [value.flatten(0, 1) for value in (x, index, weights)]
    y = LigerFusedMoEFunction.apply(rows[0], experts.gate_up_proj, experts.down_proj, *rows[1:])
    torch.testing.assert_close(y, expected.flatten(0, 1))


def test_the_mlp_of_gemma_4_is_wide_where_layers_share_keys():
    from liger_kernel.transformers.geglu import LigerGEGLUMLPForGemma4

    config = SimpleNamespace(
        hidden_size=4, intermediate_size=6, num_hidden_layers=5, num_kv_shared_layers=2, use_double_wide_mlp=True
    )
    assert [LigerGEGLUMLPForGemma4(config, layer).gate_proj.out_features for layer in range(5)] == [6, 6, 6, 12, 12]


def test_every_module_of_the_alias_resolves_its_names():
    """A name in a table without an object behind it would fail only in the program that imports it."""
    for module, table in names.MODULES.items():
        served = importlib.import_module(module)
        assert all(getattr(served, name) is not None for name in table), module
    assert "liger_kernel.transformers.rope" in sys.modules

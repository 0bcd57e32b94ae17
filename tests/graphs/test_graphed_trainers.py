"""The trainers of transformers and TRL train with graphs as without, with accumulation and uneven lengths."""

import peft
import pytest
import torch
import transformers

import tigon
from graphs.emulation import emulate
from graphs.steps import batch, llama
from tigon.hf.graphs import find_graphed_forward

pytest.importorskip("trl", reason="TRL is not installed")

from integrations import trainers

pytestmark = [
    pytest.mark.no_interpreter("The emulation of graphs needs no kernel."),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*pin_memory"),
]

LORA = peft.LoraConfig(r=2, target_modules="all-linear", exclude_modules=["lm_head"], init_lora_weights=False)
STEPS = 4
ACCUMULATION = 2


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    import accelerate

    emulate(monkeypatch)
    monkeypatch.setattr(trainers, "STEPS", STEPS)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_the_trainer_of_transformers_has_the_bits_of_eager_steps(tmp_path):
    def run(graphs):
        model = llama(use_cache=False)
        report = tigon.patch(model, graphs=graphs)
        data = [{name: x[0] for name, x in batch(seed).items()} for seed in range(8)]
        options = transformers.TrainingArguments(
            output_dir=tmp_path, max_steps=STEPS, per_device_train_batch_size=1, logging_steps=1, use_cpu=True,
            gradient_accumulation_steps=ACCUMULATION, report_to="none", save_strategy="no", disable_tqdm=True, seed=0,
            max_grad_norm=0.1,
        )  # fmt: skip
        trainer = transformers.Trainer(model, options, train_dataset=data)
        trainer.train()
        logs = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history[:STEPS]]
        return logs, [*model.parameters()], report.graphs

    expected, parameters, _ = run(graphs=False)
    logs, graphed, record = run(graphs=True)
    assert logs == expected
    assert all(map(torch.equal, graphed, parameters))
    assert (record.replayed, len(record.captured)) == (STEPS * ACCUMULATION - 2, 1)


def test_adapters_train_with_graphs_by_the_default_arguments_of_trl(tmp_path):
    """By default TRL checkpoints layers, so the output of the embeddings needs a gradient."""
    path = trainers.save_model(tmp_path)
    tigon.integrations.trl.enable(memory="lean", graphs=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        options = {"gradient_checkpointing": True, "per_device_train_batch_size": 2}
        trainer = trainers.build("sft", model, tmp_path, LORA, **options)
        trainer.train()
    finally:
        tigon.integrations.trl.disable()
    assert find_graphed_forward(trainer.model.get_base_model().model).record.replayed == STEPS - 2

"""The Trainer of transformers takes tigon.AdamW with compact states, and continues from its checkpoints."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import tigon  # noqa: E402

pytestmark = pytest.mark.no_interpreter("The Trainer calls the optimizer in the same way.")


def make_trainer(folder, max_steps: int = 4):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = tigon.AdamW(model.parameters(), lr=1e-2, state="8bit", master="bf16+8", max_grad_norm=1.0)
    rows = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=max_steps, per_device_train_batch_size=4, save_steps=2, logging_steps=1,
        max_grad_norm=0.0, report_to=[], use_cpu=True, lr_scheduler_type="constant", disable_tqdm=True, seed=0,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))


def test_the_trainer_continues_from_a_checkpoint(tmp_path, one_thread):
    trainer = make_trainer(tmp_path)
    trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert isinstance(optimizer, tigon.AdamW)
    assert optimizer.grad_norm > 0
    embedding = trainer.model.get_input_embeddings().weight
    assert {"exp_avg_code", "correction"} <= optimizer.state[embedding].keys()
    again = make_trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4
    for p, q in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)

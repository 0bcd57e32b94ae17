"""The Trainer of transformers takes optimizers of Tigon, and continues from their checkpoints."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import tigon  # noqa: E402

pytestmark = pytest.mark.no_interpreter("The Trainer calls the optimizer in the same way.")


def make_adamw(model):
    return tigon.AdamW(model.parameters(), lr=1e-2, state="8bit", master="bf16+8", max_grad_norm=1.0)


def make_muon(model):
    return tigon.Muon(tigon.muon_groups(model), lr=1e-2, adjust_lr_fn="match_rms_adamw")


def make_trainer(folder, make_optimizer, max_steps: int = 4):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = make_optimizer(model)
    rows = torch.randint(128, (32, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=max_steps, per_device_train_batch_size=4, save_steps=2, logging_steps=1,
        max_grad_norm=0.0, report_to=[], use_cpu=True, lr_scheduler_type="constant", disable_tqdm=True, seed=0,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))


@pytest.mark.parametrize("make_optimizer", [make_adamw, make_muon], ids=["AdamW", "Muon"])
def test_the_trainer_continues_from_a_checkpoint(make_optimizer, tmp_path, one_thread):
    trainer = make_trainer(tmp_path, make_optimizer)
    trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    assert type(optimizer) is (tigon.AdamW if make_optimizer is make_adamw else tigon.Muon)
    embedding = trainer.model.get_input_embeddings().weight
    if make_optimizer is make_adamw:
        assert optimizer.grad_norm > 0
        assert {"exp_avg_code", "correction"} <= optimizer.state[embedding].keys()
    else:
        assert {"step", "exp_avg", "exp_avg_sq"} <= optimizer.state[embedding].keys()
        projection = trainer.model.model.layers[0].mlp.up_proj.weight
        assert optimizer.state[projection].keys() == {"momentum_buffer"}
    again = make_trainer(tmp_path, make_optimizer)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == 4
    for p, q in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)

"""Layers with adapters whose base runs in FP8, where kernels run."""

import pytest
import torch

import tigon
from hf.fp8_steps import assert_near, layers_in_fp8, with_lora
from tigon.hf import fp8
from tigon.ops.adapters.fp8_weight import Fp8Operand

pytest.importorskip("transformers")


@pytest.mark.kernels
def test_the_nodes_of_adapters_compute_the_products_in_fp8(make_model, step, batch, monkeypatch):
    """In the interpreter, products in fp16 are those of a GPU, and products in bf16 are wrong."""
    monkeypatch.setattr(fp8, "NARROWEST", 1)
    counts, products = [], Fp8Operand.products
    monkeypatch.setattr(Fp8Operand, "products", lambda self: counts.append(len(self.group.weights)) or products(self))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The interpreter is slow, so one sequence is enough.
    batch = {name: value[:1].to(device) for name, value in batch.items()}
    model, stock = (with_lora(make_model("qwen3", torch.float16, num_hidden_layers=1).to(device)) for _ in range(2))
    report = tigon.patch(model, fp8="rowwise", loss=False, rms_norm=False, rope=False)
    assert len(layers_in_fp8(report)) == 7
    assert_near(step(model, batch), step(stock, batch))
    # Query, key and value are one node, and so are the layers of the MLP, whose last one has an input of its own.
    assert counts == [3, 1, 2, 1]

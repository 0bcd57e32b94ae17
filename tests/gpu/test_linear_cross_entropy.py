"""Tests of the fused loss that need a GPU: products, waits, graphs, memory, and errors at real sizes."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
import tigon.runtime.cublaslt as cublaslt
import tigon.runtime.products as products
from benchmarks.workloads import WORKLOADS
from gpu.steps import capture, no_waits

BF16 = torch.bfloat16
MIB = 2**20


def _peaked(t: int, h: int, v: int, ignored: float = 0.0) -> list[Tensor]:
    """Return input, linear_weight and target, with logits like those of a trained model."""
    workload = WORKLOADS["linear_cross_entropy"]
    inputs = workload.make_inputs((t, h, v), BF16, torch.device("cuda"), form={"ignored": ignored})
    return list(inputs.tensors.values())


def _error(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


SIZES = [
    pytest.param((1024, 1024, 4096), id="plain"), pytest.param((512, 512, 512), id="the smallest"),
    pytest.param((513, 1001, 4099), id="odd"), pytest.param((640, 2304, 32000), id="a head"),
    pytest.param((7, 300, 1000), id="short"),
]  # fmt: skip
KINDS = {
    "logits": lambda m, k, n: (_matrix(m, k), _matrix(n, k).t()), "dx": lambda m, k, n: (_matrix(m, k), _matrix(k, n)),
    "dw": lambda m, k, n: (_matrix(k, m).t(), _matrix(k, n)),
    "some columns": lambda m, k, n: (_matrix(m, k + 72)[:, 8:-64], _matrix(k, n)),
    "off by one": lambda m, k, n: (_matrix(m, k, offset=1), _matrix(n, k, offset=3).t()),
    "gaps": lambda m, k, n: (_matrix(m, 2 * k)[:, ::2], _matrix(k, n)),
}  # fmt: skip


def _matrix(rows: int, columns: int, dtype: torch.dtype = BF16, offset: int = 0) -> Tensor:
    """Return a matrix that starts `offset` elements after an aligned address."""
    return torch.randn(rows * columns + offset, device="cuda", dtype=torch.float32).to(dtype)[offset:].view(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_product_is_as_accurate_as_torch(size, kind):
    m, k, n = size
    a, b = KINDS[kind](m, k, n)
    exact = a.double() @ b.double()
    torch_error = _error(torch.mm(a, b), exact)
    for dtype in (BF16, torch.float32):
        if dtype == torch.float32 and not products.accumulates_in_fp32(a):
            continue
        limit = 1.01 * torch_error if dtype == BF16 else 2e-5
        out = torch.full((m, n), torch.nan, device="cuda", dtype=dtype)
        products.product(a, b, out)
        assert _error(out, exact) <= limit
        before = (exact.norm() / exact.numel() ** 0.5) * torch.randn(m, n, device="cuda")
        out = before.to(dtype)
        expected, torch_out = exact + out.double(), out.clone()
        products.product(a, b, out, accumulate=True)
        # Every kernel of cuBLAS rounds the product before it adds.
        if dtype == BF16:
            limit = 1.01 * _error(torch_out.addmm_(a, b), expected)
        assert _error(out, expected) <= limit
    # The output may be a part of a larger matrix, whose other elements do not change.
    whole = torch.full((m, n + 64), 7.0, device="cuda", dtype=BF16)
    products.product(a, b, whole[:, :n])
    assert _error(whole[:, :n], exact) <= 1.01 * torch_error
    assert (whole[:, n:] == 7).all()


def _record_plans(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list of the plans that `product` gets from here on."""
    plans, plan = [], cublaslt.plan
    monkeypatch.setattr(cublaslt, "plan", lambda *key: plans.append(plan(*key)) or plans[-1])
    return plans


def test_cublaslt_offers_the_ping_pong_kernels(monkeypatch):
    """Without them the products would run in torch, slower and without a message."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Only Hopper has the ping-pong kernels.")
    if cublaslt._library() is None:
        pytest.skip(f"There is no cuBLASLt of CUDA {torch.version.cuda}.")
    x, w, target = _peaked(2048, 4096, 32000)
    plans = _record_plans(monkeypatch)
    torch.autograd.grad(tigon.linear_cross_entropy(x, w, target), (x, w))
    assert len(plans) == 2, "The logits and dW have plans, and torch computes dx."
    missing = [plan is None or plan.algorithm is None for plan in plans]
    assert not any(missing), f"There is no ping-pong kernel for {sum(missing)} of {len(plans)} products."


def _record_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the numbers of tokens in each product of logits from here on."""
    rows, product = [], products.product

    def spy(a, b, out, accumulate=False):
        if out.shape[0] == a.shape[0] and b.stride(0) == 1:
            rows.append(a.shape[0])
        product(a, b, out, accumulate)

    monkeypatch.setattr("tigon.ops.head.chunks.product", spy)
    return rows


def test_early_valid_rows_avoid_a_wait(monkeypatch):
    """The device is busy for half a second between the labels and the loss. The host must not wait for it."""
    x, w, target = _peaked(3000, 1024, 32768, ignored=0.6)
    count = int((target != -100).sum())
    labels = target.clone()

    def step(early: bool) -> float:
        """Return the time of the host in seconds."""
        target.copy_(labels)
        valid_rows = tigon.ValidRows(target) if early else None
        torch.cuda._sleep(1_000_000_000)
        start = time.perf_counter()
        loss = tigon.linear_cross_entropy(x, w, target, valid_rows=valid_rows)
        torch.autograd.grad(loss, (x, w))
        return time.perf_counter() - start

    # The first runs compile kernels and allocate memory.
    for early in (True, False):
        step(early)
    torch.cuda.synchronize()
    rows = _record_rows(monkeypatch)
    with no_waits():
        seconds = step(True)
    torch.cuda.synchronize()
    assert sum(rows) == count, "Ignored rows were computed."
    assert seconds < 0.1
    assert step(False) > 0.2, "The check cannot fail."


@pytest.mark.parametrize("shape", [(500, 256, 32000), (3000, 1024, 32768)], ids=str)
def test_the_loss_runs_in_a_cuda_graph(shape):
    """The graph computes all rows. A replay uses the labels that were written in place since."""
    x, w, target = _peaked(*shape, ignored=0.3)
    others = target.roll(7).masked_fill(torch.rand(shape[0], device="cuda") < 0.5, -100)
    early = tigon.ValidRows(target)

    def step(**options) -> list[Tensor]:
        loss = tigon.linear_cross_entropy(x, w, target, **options)
        return [loss.detach(), *torch.autograd.grad(loss, (x, w))]

    graph, replay_results = capture(lambda: step(valid_rows=early), warm_up=step)
    for labels in (target.clone(), others, torch.full_like(target, -100), target.clone()):
        target.copy_(labels)
        graph.replay()
        assert (replay_results[1][target == -100] == 0).all()
        for actual, expected in zip(replay_results, step(), strict=True):
            size = expected.float().abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=0.02, atol=2e-3 * size)


@pytest.mark.parametrize(("acc_dtype", "limit"), [(None, 640), (torch.float32, 1700)], ids=str)
def test_peak_memory_is_limited(acc_dtype, limit):
    """The limit does not include the inputs and their gradients."""
    x, w, target = _peaked(8192, 1024, 128256)
    # The first run compiles kernels and allocates the workspace of cuBLAS.
    for _ in range(2):
        x.grad = w.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        tigon.linear_cross_entropy(x, w, target, acc_dtype=acc_dtype).backward()
        peak = torch.cuda.max_memory_allocated() - before - x.nbytes - w.nbytes
    assert peak <= limit * MIB
    assert torch.cuda.memory_allocated() - before == x.nbytes + w.nbytes, "Other memory is still allocated."


def test_a_chunk_beyond_32_bits():
    """The chunk has 2.5e9 logits. The last tokens are as accurate as the first ones."""
    t, h, v = 19_600, 128, 128256
    assert t * v > 2**31
    x, w, target = _peaked(t, h, v)
    losses = tigon.linear_cross_entropy(x, w, target, reduction="none", max_logits_mib=8192)
    dx, dw = torch.autograd.grad(losses.sum(), (x, w))
    for part in (slice(0, 64), slice(t - 64, t)):
        rows = x.detach()[part].double().requires_grad_()
        exact = F.cross_entropy(rows @ w.detach().double().t(), target[part], reduction="none")
        torch.testing.assert_close(losses[part], exact.float(), rtol=0.02, atol=0.2)
        assert _error(dx[part], torch.autograd.grad(exact.sum(), rows)[0]) < 0.02
    chunked_loss = tigon.linear_cross_entropy(
        x, w, target, reduction="sum", acc_dtype=torch.float32, max_logits_mib=512
    )
    assert _error(dw, torch.autograd.grad(chunked_loss, w)[0].double()) < 0.01


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="The test needs two GPUs.")
def test_a_vocabulary_may_be_sharded_over_two_devices(tmp_path):
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path / "store")], env=environment)
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def _rank(rank: int, store: str) -> None:
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    v = 32001
    # The seed of the generator makes these equal on both ranks.
    x, w, target = _peaked(3000, 1024, v, ignored=0.3)
    shard = w.detach()[slice(0, 16001) if rank == 0 else slice(16001, v)].clone().requires_grad_()
    for options in ({}, {"softcap": 30.0, "z_loss": 1e-4}, {"reduction": "none", "label_smoothing": 0.1}):
        whole = tigon.linear_cross_entropy(x, w, target, max_logits_mib=64, **options)
        dx, dw = torch.autograd.grad(whole.sum(), (x, w))
        sharded_loss = tigon.linear_cross_entropy(
            x, shard, target, max_logits_mib=64, process_group=dist.group.WORLD, vocab_size=v, **options
        )
        gradients = torch.autograd.grad(sharded_loss.sum(), (x, shard))
        # Products of other shapes sum in another order, so a logit may be rounded to another bf16 value.
        torch.testing.assert_close(sharded_loss, whole, rtol=1e-2, atol=2e-2)
        assert _error(gradients[0], dx.double()) < 0.01
        assert _error(gradients[1], (dw[:16001] if rank == 0 else dw[16001:]).double()) < 0.01
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])

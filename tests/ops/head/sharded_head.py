"""Checks for `tests/ops/test_two_ranks.py`: losses of a vocabulary that is sharded equal those of a whole one."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from op_cases import INTERPRETED
from ops.head import accumulate_grad_parallel as parallel

ALL = {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01, "token_scaling": True}
ALL_NONE = {"label_smoothing": 0.2, "softcap": 5.0, "z_loss": 0.01, "token_scaling": True, "reduction": "none"}
OPTIONS = [
    {}, ALL_NONE, {"reduction": "sum"}, {"reduction": "none"}, {"num_items": 5}, {"label_smoothing": 0.2},
    {"softcap": 3.0}, {"logit_scale": 0.4}, {"z_loss": 0.1}, {"token_scaling": True}, ALL, {"acc_dtype": torch.float32},
]  # fmt: skip
LOGIT_OPTIONS = [{}, ALL, {"weighted": True, **ALL}, {"label_smoothing": 0.2, "z_loss": 0.01, "reduction": "none"}]
LOGIT_OPTIONS += [{"num_items": 5, "inplace": True}]
LOG_PROB_OPTIONS = [
    {},
    {
        "temperature": 0.7, "softcap": 3.0, "logit_scale": 1.5, "return_entropy": True, "return_top1": True,
        "return_mean_logits": True, "return_sum_sq_probs": True, "extra_targets": True,
    },
    {"fp32_products": True, "return_sum_sq_probs": True},
    {"extra_targets": True},
]  # fmt: skip
RESULT_FLAGS = {
    "return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True,
    "return_log_probs": True, "return_entropy": True,
}  # fmt: skip
T, H = 13 if INTERPRETED else 26, 8


def _tensors(v: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return x, weight and bias of the whole vocabulary, class weights and targets. They are the same on all ranks."""
    generator = torch.Generator().manual_seed(v)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    target = torch.randint(v, (T,), generator=generator)
    target[2::4] = -100
    x, w = normal(T, H).requires_grad_(), normal(v, H).requires_grad_()
    return [x, w, normal(v).requires_grad_(), torch.rand(v, generator=generator) + 0.1, target]


def _rows(v: int) -> slice:
    """Return the rows of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    length = -(-v // ranks)
    return slice(min(rank * length, v), min((rank + 1) * length, v))


def _close(name: str, actual: Tensor | None, expected: Tensor | None, rtol: float = 1e-5) -> None:
    if expected is None:
        assert actual is None, name
        return
    assert actual.shape == expected.shape, name
    size = max(1.0, expected.double().abs().nan_to_num().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=2e-6 * size, equal_nan=True, msg=lambda m: f"{name}: {m}"
    )


def _results(result) -> dict[str, Tensor | None]:
    return {"loss": result} if isinstance(result, Tensor) else result._asdict()


def _total(results: dict[str, Tensor | None], parts: tuple[str, ...]) -> Tensor:
    """Return the sum of the differentiable results, with weights that make no upstream gradient one."""
    names = parts or [name for name, y in results.items() if y is not None and y.requires_grad]
    weigh = lambda y: torch.linspace(0.5, 1.5, y.numel()).view(y.shape) * y if y.dim() else y
    return sum((1.7 - i) * weigh(results[name]).sum() for i, name in enumerate(names))


def _arguments(op: str, v: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors of a call with the whole vocabulary, and the names of those that are sharded."""
    x, w, b, _, target = (t.detach() for t in _tensors(v))
    if op == "cross_entropy":
        return {"input": x @ w.t() + b, "target": target}, ("input",)
    if op == "linear_log_probs":
        return {"hidden": x, "weight": w, "bias": b, "targets": target}, ("weight", "bias")
    return {"input": x, "linear_weight": w, "linear_bias": b, "target": target}, ("linear_weight", "linear_bias")


def compare(
    op: str, v: int, parts: tuple[str, ...] = (), change: Callable[..., object] = lambda **tensors: None,
    bias: bool = True, weighted: bool = False, **options: Any,
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:  # fmt: skip
    """Compare the results and gradients of the sharded vocabulary with those of the whole one, and return the latter.

    Only the results `parts` have an upstream gradient, or all differentiable ones. `change` may write to the tensors
    before the calls.
    """
    import tigon

    tensors, sharded_names = _arguments(op, v)
    change(**tensors)
    if not bias:
        tensors.pop("linear_bias")
    if weighted:
        options["weight"] = _tensors(v)[3]
    if "extra_targets" in options:
        options["extra_targets"] = torch.randint(v, (T, 3), generator=torch.Generator().manual_seed(v))
        options["extra_targets"][1::5, 1] = -100
    if options.get("valid_rows"):
        options["valid_rows"] = tigon.ValidRows(tensors["target"])
    rows, dimension = _rows(v), 1 if op == "cross_entropy" else 0
    part = lambda name, x: x.movedim(dimension, 0)[rows].movedim(0, dimension) if name in sharded_names else x
    group = {"process_group": dist.group.WORLD, "vocab_size": v}
    results, gradients = [], []
    for cut, more, passes in ((lambda name, x: x, {}, 1), (part, group, 2)):
        leaves = {name: cut(name, x).clone() for name, x in tensors.items()}
        # Valid rows belong to the very tensor of the targets.
        leaves |= {name: x for name, x in tensors.items() if not x.is_floating_point()}
        needed = {name: x.requires_grad_() for name, x in leaves.items() if x.is_floating_point()}
        results.append(_results(getattr(tigon, op)(**leaves, **more, **options)))
        total = _total(results[-1], parts)
        for i in range(passes):
            computed = torch.autograd.grad(total, list(needed.values()), retain_graph=i + 1 < passes)
            gradients.append(dict(zip(needed, computed, strict=True)))
    (whole, sharded), where = results, f"of {op} of {v} on rank {dist.get_rank()}"
    for name, value in whole.items():
        _close(f"{name} {where}", sharded[name], value)
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            _close(f"gradient of {name} {where}", other[name], part(name, gradient), rtol=2e-5)
    return whole, gradients[0]


def _sizes() -> tuple[int, ...]:
    """Return vocabularies with equal shards, with a shorter last one, and with an empty one (on two ranks: one row)."""
    ranks = dist.get_world_size()
    return 12 * ranks, 5 * ranks - 1, 2 * (ranks - 1)


def each_option() -> None:
    """Every option meets one of the sizes, and class weights or a bias."""
    sizes = _sizes()[: 1 if INTERPRETED else None]
    for i, options in enumerate(OPTIONS[: 2 if INTERPRETED else None]):
        size = sizes[i % len(sizes)]
        compare("linear_cross_entropy", size, weighted=i % 2 == 1, bias=i % 2 == 0, **options)


def logits() -> None:
    for v in _sizes()[: 1 if INTERPRETED else None]:
        for options in LOGIT_OPTIONS[2 if INTERPRETED else 0 :][: 1 if INTERPRETED else None]:
            compare("cross_entropy", v, **options)
        for reduction in ("mean", "none"):
            compare("cross_entropy", v, reduction=reduction, **RESULT_FLAGS)


def unusual_logits() -> None:
    """Compare rows with classes of minus infinity, equal logits, targets out of range, and NaN where it is ignored."""
    v = 12 * dist.get_world_size()

    def change(input: Tensor, target: Tensor) -> None:
        target[:6] = torch.tensor([1, 0, v, 0, -1, -100])
        # The logits of the last shards are minus infinity, and those of the first one far below zero.
        input[0] -= 500.0
        input[0, v // 2 :] = -torch.inf
        input[1], input[3] = 0.0, 0.0
        input[3, [v // 2 - 1, v - 1]] = 5.0
        input[target == -100] = torch.nan

    whole, gradients = compare("cross_entropy", v, change=change, reduction="none", z_loss=1e-6, **RESULT_FLAGS)
    assert whole["predicted_tokens"][[1, 3]].tolist() == [0, v // 2 - 1]
    assert whole["loss"].isnan().nonzero()[:, 0].tolist() == [2, 4]
    assert gradients["input"].isnan().any(-1).nonzero()[:, 0].tolist() == [2, 4]


def everything_returned() -> None:
    for i, v in enumerate(_sizes()):
        for options in ({}, {"reduction": "none", "label_smoothing": 0.1}, ALL_NONE):
            for parts in ((), (("loss",), ("entropy",), ("log_probs",))[i]):
                compare("linear_cross_entropy", v, parts, **RESULT_FLAGS, **options)


def several_chunks() -> None:
    """All ranks use the same chunks, although some have more rows. Otherwise they would wait for each other forever."""
    from tigon.ops.head.chunks import ChunkConfig
    from tigon.runtime.tuning import tuned

    # The budget is 48 logits, which take 12 bytes each: 4 bytes and two fp32 values. A chunk has at most 4 tokens if a
    # shard has 12 rows, and at most 9 if it has 5 rows.
    with tuned(ChunkConfig, budget_mib=48 * 12 / 2**20):
        for v in _sizes():
            for options in ({}, {"reduction": "none"}, {"acc_dtype": torch.float32}, RESULT_FLAGS):
                compare("linear_cross_entropy", v, **options)


def ignored_tokens() -> None:
    for v in _sizes():
        for ignored in (torch.ones(T, dtype=torch.bool), torch.arange(T) != 3, torch.zeros(T, dtype=torch.bool)):

            def change(target: Tensor, ignored: Tensor = ignored, v: int = v, **_: Tensor) -> None:
                target.copy_(target.abs().clamp(max=v - 1).masked_fill(ignored, -100))

            _, gradients = compare("linear_cross_entropy", v, change=change, valid_rows=True)
            assert (gradients["input"][ignored] == 0).all()


def log_probs() -> None:
    from tigon.ops.head.chunks import ChunkConfig
    from tigon.ops.head.log_prob_chunks import SlabConfig
    from tigon.runtime.tuning import tuned

    for v in _sizes()[1 if INTERPRETED else 0 :][: 1 if INTERPRETED else None]:
        for options in LOG_PROB_OPTIONS[: 2 if INTERPRETED else None]:
            with tuned(ChunkConfig, tokens=5), tuned(SlabConfig, columns=5, block_tokens=4):
                compare("linear_log_probs", v, **options)


def half_precision() -> None:
    """The errors are those of one rank in bf16, but each rank rounds its part of dx."""
    import tigon

    v = 200
    x, w, _, _, target = _tensors(v, torch.bfloat16)
    exact = [p.detach().double().requires_grad_() for p in (x, w)]
    run = lambda x, w, **sharded: tigon.linear_cross_entropy(x, w, target, **sharded)
    logits = exact[0] @ exact[1].t()
    dx, dw = torch.autograd.grad(nn.functional.cross_entropy(logits, target), exact)
    one = torch.autograd.grad(run(x, w), (x, w))
    shard = w.detach()[_rows(v)].requires_grad_()
    actual = torch.autograd.grad(run(x, shard, process_group=dist.group.WORLD, vocab_size=v), (x, shard))
    error = lambda a, e: ((a.double() - e).norm() / e.norm()).item()
    assert error(actual[0], dx) <= 1.5 * error(one[0], dx)
    assert error(actual[1], dw[_rows(v)]) <= 1.2 * error(one[1][_rows(v)], dw[_rows(v)])


def dtensor_heads() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    import tigon

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    group = mesh.get_group()
    for v in _sizes():
        x, w, b, _, target = _tensors(v)
        expected = tigon.linear_cross_entropy(x, w, target, linear_bias=b)
        dx, dw, db = torch.autograd.grad(expected, (x, w, b))

        # Plans of transformers and torchtitan create such a head. A DTensor knows its whole size, so vocab_size is not
        # needed.
        head = nn.Linear(H, v)
        with torch.no_grad():
            head.weight.copy_(w)
            head.bias.copy_(b)
        parallelize_module(head, mesh, ColwiseParallel())
        assert head.weight.placements == (Shard(0),)
        y = x.detach().clone().requires_grad_()
        run = lambda x, w, b, t: tigon.linear_cross_entropy(x, w, t, linear_bias=b, process_group=group)
        loss = run(y, head.weight, head.bias, target)
        loss.backward()
        _close("loss", loss, expected)
        _close("dx", y.grad, dx)
        _close("dw", head.weight.grad.full_tensor(), dw)
        _close("db", head.bias.grad.full_tensor(), db)

        # All arguments are DTensors.
        whole = lambda t: distribute_tensor(t.detach(), mesh, [Replicate()])
        z, weight = whole(x).requires_grad_(), distribute_tensor(w.detach(), mesh, [Shard(0)]).requires_grad_()
        loss = run(z, weight, None, whole(target))
        loss.backward()
        expected = tigon.linear_cross_entropy(x, w, target)
        dx, dw = torch.autograd.grad(expected, (x, w))
        _close("loss", loss, expected)
        assert z.grad.placements == (Replicate(),)
        _close("dx", z.grad.to_local(), dx)
        _close("dw", weight.grad.full_tensor(), dw)


@contextlib.contextmanager
def _refused(error: type, message: str):
    with pytest.raises(error, match=f"linear_cross_entropy: .*{message}"):
        yield


def refusals() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import tigon

    rank, ranks = dist.get_rank(), dist.get_world_size()
    v = 7 * ranks
    x, w, b, class_weight, target = _tensors(v)
    shard = w.detach()[_rows(v)]
    world = dist.group.WORLD
    run = lambda w, **options: tigon.linear_cross_entropy(x, w, target, **options)

    # A rank with the right number of rows would wait for the other ranks, so only ranks with a wrong number of rows
    # make this call.
    expected = min(8, max(0, v + 1 - 8 * rank))
    if expected != 7:
        message = rf"linear_weight must have {expected} rows on rank {rank} of {ranks} .* of {v + 1}, got 7"
        with _refused(ValueError, message):
            run(shard, process_group=world, vocab_size=v + 1)
    with _refused(ValueError, "vocab_size must be the number of rows on all ranks of process_group, got None"):
        run(shard, process_group=world)
    # If ranks pass different sizes that match their rows, only communication can show this.
    if ranks == 2:
        loss = run(w.detach()[7 * rank :][: 7 - rank], process_group=world, vocab_size=v - rank)
        assert loss.isnan()
    with _refused(ValueError, "vocab_size needs a process_group over which the vocabulary is sharded, got None"):
        run(shard, vocab_size=v)
    with _refused(ValueError, rf"weight must have shape \({v},\), got \(7,\)"):
        run(shard, process_group=world, vocab_size=v, weight=class_weight[:7])
    with _refused(ValueError, r"linear_bias must have shape \(7,\)"):
        run(shard, process_group=world, vocab_size=v, linear_bias=b.detach())
    first = dist.new_group([0])

    mesh = init_device_mesh("cpu", (ranks,))
    place = lambda t, placement: distribute_tensor(t.detach(), mesh, [placement])
    sharded = place(w, Shard(0))
    with _refused(ValueError, r"linear_weight must not be a DTensor without a process_group, got \(Shard\(dim=0\),\)"):
        run(sharded)
    with _refused(ValueError, "linear_weight must be sharded by rows over process_group, .* got"):
        run(place(w, Shard(1)), process_group=world)
    with _refused(ValueError, "input must be replicated, got"):
        tigon.linear_cross_entropy(place(x, Shard(1)), sharded, target, process_group=world)
    if rank == 0:
        with _refused(ValueError, "linear_weight must be sharded by rows over process_group, .* on DeviceMesh"):
            run(sharded, process_group=first)
    logits = torch.randn(T, v)
    part, size = logits[:, _rows(v)], {"vocab_size": v}
    for message, x, options in (
        (rf"input must have 8 columns on rank {rank} of {ranks} .*, got 7", part, {"vocab_size": 8 * ranks}),
        ("vocab_size must be the number of columns on all ranks of process_group", part, {}),
        (rf"weight must have shape \({v},\), got \(7,\)", part, size | {"weight": class_weight[:7]}),
        (r"input must not be a DTensor, got .*input.to_local\(\)", place(logits, Shard(1)), size),
    ):
        with pytest.raises(ValueError, match=f"^cross_entropy: {message}"):
            tigon.cross_entropy(x, target, process_group=world, **options)
    parameter = nn.Parameter(sharded)
    parameter.grad = torch.zeros_like(parameter)
    with _refused(ValueError, "accumulate_grad needs a linear_weight whose .grad is the whole gradient, got a DTensor"):
        run(parameter, process_group=world, accumulate_grad=True)
    assert (parameter.grad.full_tensor() == 0).all()


def accumulate_in_a_sharded_head() -> None:
    import tigon

    v = _sizes()[1]
    x, w, _, _, target = _tensors(v)
    whole, shard = nn.Parameter(w.detach()), nn.Parameter(w.detach()[_rows(v)].clone())
    for i in range(3):
        tigon.linear_cross_entropy(x, whole, target.roll(i)).backward()
        tigon.linear_cross_entropy(
            x, shard, target.roll(i), process_group=dist.group.WORLD, vocab_size=v, accumulate_grad=True
        ).backward()
    _close("dw", shard.grad, whole.grad[_rows(v)])


# In the interpreter, a check takes seconds. The checks of the first line run its kernels.
CHECKS: list[Callable[[], None]] = [each_option, log_probs, logits, unusual_logits]
if not INTERPRETED:
    CHECKS += [everything_returned, several_chunks, ignored_tokens, half_precision, dtensor_heads, refusals]
    CHECKS += [accumulate_in_a_sharded_head, parallel.under_ddp, parallel.under_fsdp2]


def check_heads(rank: int) -> None:
    # In this mode, memory that was not written holds NaN.
    torch.set_deterministic_debug_mode("warn")
    for check in CHECKS:
        check()
        print(check.__name__, flush=True)
    torch.set_deterministic_debug_mode("default")

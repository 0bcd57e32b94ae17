"""The accuracy and the speed of every op on the device.

The result of an op and its gradients are compared with an exact result. The error of eager code in the same dtype sets
the limit (`tigon.testing.assert_accurate`). Where kernels run, the times of the op and of eager code are compared at a
large size. An op that is wrong at this width is not timed.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tigon.cli.check.calls import CALLS, OpCall, Tensors
from tigon.cli.check.report import Check, OpSpeed
from tigon.testing import assert_accurate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _outputs(result: Any) -> list[Tensor]:
    return [y for y in (result if isinstance(result, tuple) else (result,)) if y is not None]


def _results(function: Callable[..., Any], tensors: Tensors, options: dict[str, Any]) -> list[Tensor]:
    """Return the outputs of a call, then the gradients of its tensors. The upstream gradients are always the same."""
    outputs = _outputs(function(**tensors, **options))
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    pairs = [(y, dy) for y, dy in zip(outputs, upstream, strict=True) if y.requires_grad]
    leaves = [x for x in tensors.values() if x.requires_grad]
    return [*outputs, *torch.autograd.grad([y for y, _ in pairs], leaves, [dy for _, dy in pairs])]


def compare(
    call: OpCall, options: dict[str, Any], sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Compare a call with eager code; raise AssertionError if an error exceeds the limit."""
    tensors = call.tensors(sizes, dtype, device)
    # The GPU of a Mac has no fp64.
    exact_device = torch.device("cpu") if device.type == "mps" else device
    widen = lambda x: x.detach().to(exact_device).double() if x.is_floating_point() else x.to(exact_device)
    wide_tensors = {name: widen(x).requires_grad_(x.requires_grad) for name, x in tensors.items()}
    actual, eager = (_results(function, tensors, options) for function in (call.function, call.reference))
    exact = _results(call.reference, wide_tensors, options)
    output_count = len(exact) - sum(x.requires_grad for x in tensors.values())
    for index, triple in enumerate(zip(actual, eager, exact, strict=True)):
        is_output = index < output_count
        smallest = 1.0 if call.is_loss and is_output else 0.0
        if call.term_size:
            smallest = 4.0 if is_output else call.term_size
        name = f"output {index}" if is_output else f"gradient {index - output_count}"
        assert_accurate(*(x.to(exact_device) for x in triple), smallest=smallest, msg=name)


def op_checks(ops: list[str] | None, device: torch.device, has_kernels: bool) -> list[Check]:
    """Return the checks of accuracy, the most telling ones first: a run short of time ends with the rare cases. Where
    kernels run, each op is also checked at the width of a model, which needs several programs."""
    ranked: list[tuple[int, Check]] = []

    def add(rank: int, call: OpCall, options: dict[str, Any], sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        words = ("x".join(map(str, sizes)), *(f"{k}={v}" for k, v in options.items()), str(dtype)[6:])
        check = functools.partial(compare, call, options, sizes, dtype, device)
        ranked.append((rank, ("ops", call.op, " ".join(words), check)))

    for call in CALLS:
        if ops is not None and call.op not in ops:
            continue
        for variant, options in enumerate(call.options):
            for rank, dtype in enumerate(DTYPES):
                add(rank + (variant > 0), call, options, call.small, dtype)
        if has_kernels:
            add(1, call, call.options[0], call.medium, torch.bfloat16)
    return [check for _, check in sorted(ranked, key=lambda pair: pair[0])]


def _milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of ten calls, each between two events of the device. Three calls come before them."""
    times = []
    for _ in range(3 + 10):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[3:])


def roofline(device: torch.device) -> dict[str, float]:
    """Measure a large copy and a large product in bf16, with which a reader compares the speed of the ops."""
    source = torch.randn(2**28, device=device, dtype=torch.bfloat16)
    target, a = torch.empty_like(source), source[: 2**26].view(2**13, 2**13)
    copy, product = _milliseconds(lambda: target.copy_(source)), _milliseconds(lambda: a @ a)
    return {"bytes_per_second": 2e3 * source.nbytes / copy, "flops_per_second": 2e3 * 2**39 / product}


def _measure(call: OpCall, device: torch.device) -> OpSpeed:
    options = call.options[0]
    compare(call, options, call.medium, torch.bfloat16, device)
    tensors = call.tensors(call.large, torch.bfloat16, device)
    leaves = [x for x in tensors.values() if x.requires_grad]
    upstream = [torch.randn_like(y) for y in _outputs(call.function(**tensors, **options))]

    def step(function: Callable[..., Any]) -> None:
        torch.autograd.grad(_outputs(function(**tensors, **options)), leaves, upstream)

    moved = sum(x.nbytes for x in (*tensors.values(), *leaves, *upstream, *upstream))
    ms, eager_ms = (_milliseconds(functools.partial(step, f)) for f in (call.function, call.reference))
    return OpSpeed(call.op, call.large, ms, eager_ms, moved)


def speed_checks(ops: list[str] | None, device: torch.device) -> list[Check]:
    """Return the measurement of each op."""
    return [
        ("speed", call.op, "x".join(map(str, call.large)), functools.partial(_measure, call, device))
        for call in CALLS
        if ops is None or call.op in ops
    ]

"""The self-check of direct launches: on this device, does a recorded launch of Triton repeat what Triton does?

`may_wait` says whether a self-check may run now.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from tigon.runtime.compat.operators import current_raw_stream, dispatch_modes
from tigon.runtime.compat.triton import direct_launch, recorded_launches, tl, triton

_log = logging.getLogger("tigon")


@triton.jit(do_not_specialize=["n"])
def _check_kernel(
    x_ptr, absent_ptr, out_ptr, stride, n, one, even, wide, factor,
    BLOCK: tl.constexpr, SHIFT: tl.constexpr, KIND: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """Write a sum in which every argument and the grid change the result."""
    program = tl.program_id(0)
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + offsets * stride, offsets < n, 0.0) * factor + SHIFT + 1000.0 * program
    y += one * 0.25 + even * 10000.0 + (wide - 8589934590) * 0.125
    if absent_ptr is not None:
        y += tl.load(absent_ptr)
    if KIND == "plain" and AXES is None:
        tl.store(out_ptr + offsets, y, offsets < n)


# Two lists of arguments for which Triton should choose one variant: no property in the key of `_variants` differs.
_CHECK_ARGUMENTS = (2, 300, 1, 16, 2**33, 0.5), (3, 290, 1, 96, 2**33 + 16, 1.0)


def _make_check_tensors(device: int) -> tuple[Tensor, Tensor]:
    """Return the input of the self-check and two outputs, which differ in elements that the kernel does not write."""
    x = torch.arange(1000, dtype=torch.float32, device=torch.device("cuda", device))
    return x, torch.stack([torch.full_like(x[:300], value) for value in (-1.0, -2.0)])


def direct_launches_agree(device: int) -> bool:
    """Launch a small kernel through Triton and then directly, and return whether both write the same values. Triton
    must also choose one variant for all arguments that have the same key. No launcher is called in a form in which
    Triton has not called it."""
    constexprs: dict[str, Any] = {"BLOCK": 128, "SHIFT": 3, "KIND": "plain", "AXES": None}
    options = {**constexprs, "num_warps": 1, "enable_fp_fusion": True}
    first, second = _CHECK_ARGUMENTS
    agrees = False
    with torch.no_grad():
        try:
            x, outputs = _make_check_tensors(device)
            out, direct_out = outputs.unbind()
            with recorded_launches() as records:
                compiled = _check_kernel[(3,)](x, None, out, *first, **options)
            values, stream = (x, None, out, *first, *constexprs.values()), current_raw_stream(device)
            if records and (repeated := direct_launch(records[-1], 3, stream, values)) is not None:
                call, middle, is_packed = repeated
                # This address is aligned to 16 bytes, but not to more.
                x = x[4:]
                other = _check_kernel[(3,)](x, None, out, *second, **options)
                values = (x.data_ptr(), None, direct_out.data_ptr(), *second, *constexprs.values())
                call(3, 1, 1, stream, *middle, *([values] if is_packed else values))
                agrees = compiled is other and torch.equal(out[:290], direct_out[:290])
        except Exception:
            _log.debug("The self-check of direct launches raised on device %d.", device, exc_info=True)
    if not agrees:
        _log.warning(
            "On device %d, Triton %s launches kernels in another way than Tigon expects. Each launch therefore goes "
            "through Triton and takes about 10 us more of the host's time. Results are unaffected.",
            device,
            triton.__version__,
        )
    return agrees


def may_wait() -> bool:
    """Return whether the host may wait for the device, and new tensors are ordinary tensors. Waiting would end the
    capture of a CUDA graph, and raises in torch's synchronisation debug mode. A dispatch mode counts or fakes the
    tensors that it sees."""
    if torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode():
        return False
    return not dispatch_modes()

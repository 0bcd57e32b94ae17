"""The private names of Triton give the known answers, and Tigon works without them as the file says."""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import triton

from tigon.ops.logits import softmax
from tigon.runtime.compat import triton as triton_private
from tigon.runtime.compat.triton import (
    JITFunction,
    TileDescriptor,
    direct_launch,
    gl,
    has_hopper_instructions,
    has_launch_hook,
    has_tensor_descriptors,
    hopper,
)

pytestmark = pytest.mark.no_interpreter("The interpreter launches nothing through these names.")


@pytest.mark.parametrize("scratch", [0, 128])
def test_a_recorded_launch_is_repeated_with_the_call_of_the_function_in_c(scratch, monkeypatch):
    """This is the launcher of the installed Triton for NVIDIA, with a function in Python instead of that in C."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    allocate = SimpleNamespace(allocate_default_profile_scratch=lambda *arguments: object())
    monkeypatch.setattr(driver.triton.runtime, "driver", SimpleNamespace(active=allocate))
    calls, run = [], object.__new__(driver.CudaLauncher)
    run.launch = lambda *arguments: calls.append(arguments)
    for name in ("global_scratch_size", "profile_scratch_size"):
        setattr(run, name, scratch)
    for name in ("global_scratch_align", "profile_scratch_align", "num_ctas"):
        setattr(run, name, 16)
    for name in ("launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature", "gsan_enabled"):
        setattr(run, name, None)
    for name in ("_allocator", "_profile_allocator"):
        monkeypatch.setattr(driver._allocation, name, SimpleNamespace(get=lambda: lambda *arguments: object()))
    values = torch.zeros(2), None, 3, 0.5, 128, "plain"
    record = run, 4, 1, 1, 7, "function", "metadata", {"name": "kernel"}, print, print, *values
    call, middle, is_packed = direct_launch(record, 4, 7, values)
    assert calls == []
    assert (call is run.launch) == (scratch == 0)
    run(4, 1, 1, 7, "function", "metadata", None, None, None, *values)
    call(4, 1, 1, 7, *middle, *([values] if is_packed else values))
    expected, repeated = calls
    assert len(repeated) == len(expected)
    assert scratch or repeated == expected


@pytest.mark.parametrize("record", [
    (None, 4, 1, 1, 7, "function", "metadata", None, None, None, 3),
    (None, 1, 4, 1, 7, "function", "metadata", None, None, None, 3, 128),
    (None, 4, 1, 1, "function", 7, "metadata", None, None, None, 3, 128),
    (None, 4, 1, 1, 7, "function", "metadata", None, None, None, None, 3, 128),
    (None, 4, 1, 1, 7, "function", "metadata", None, None, None, 128, 3),
], ids=["one missing", "grid", "order", "one more", "order of the arguments"])  # fmt: skip
def test_launches_of_another_form_are_not_repeated(record):
    assert direct_launch(record, 4, 7, (3, 128)) is None


LATER, OTHERS = ["3.6.0", "3.7.1+git4bd2c1b0", "3.10.0", "4.0"], ["3.4.0", "3.5.1", "2.9", "not installed", ""]
TESTED, UNTESTED = ["3.6.0", "3.7.1", "3.7.1+git4bd2c1b0", "3.7"], ["3.5.1", "3.8.0", "3.60.0", "3.10.0", "4.3.6", ""]


def test_versions_have_what_the_kernels_need(monkeypatch):
    def is_true_with(has: Callable[[], bool], version: str) -> bool:
        monkeypatch.setattr(triton, "__version__", version)
        return has()

    for has, versions, others in ((has_tensor_descriptors, LATER, OTHERS), (has_hopper_instructions, TESTED, UNTESTED)):
        assert [v for v in (*versions, *others) if is_true_with(has, v)] == versions


needs_hopper = pytest.mark.skipif(not has_hopper_instructions(), reason="this Triton is neither 3.6 nor 3.7")

# How many arguments the kernels of tiles pass by position, and the names of the others.
TILE_FUNCTIONS = {
    "mbarrier.init": (1, ["count"]), "mbarrier.wait": (2, []), "mbarrier.arrive": (1, []), "mbarrier.expect": (2, []),
    "mbarrier.MBarrierLayout": (0, []), "tma.async_copy_global_to_shared": (4, []),
    "tma.async_copy_shared_to_global": (3, []), "tma.store_wait": (0, ["pendings"]),
    "warpgroup_mma": (3, ["use_acc", "is_async"]), "warpgroup_mma_wait": (0, ["num_outstanding", "deps"]),
    "fence_async_shared": (0, []),
}  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("name", TILE_FUNCTIONS)
def test_the_instructions_of_hopper_take_the_arguments_of_the_kernels(name):
    function = hopper
    for part in name.split("."):
        function = getattr(function, part)
    count, names = TILE_FUNCTIONS[name]
    inspect.signature(function).bind(*[None] * count, **dict.fromkeys(names))


@needs_hopper
def test_the_descriptor_of_a_tile_names_its_tensor_its_shape_and_its_layout():
    x = torch.zeros(32, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)
    # 64 values of two bytes are one line of 128 bytes, the widest one whose parts the layout permutes.
    assert (layout.swizzle_byte_width, layout.transposed) == (128, False)
    descriptor = TileDescriptor(x, list(x.shape), list(x.stride()), [16, 64], layout)
    assert descriptor.base is x
    assert (descriptor.block_shape, descriptor.layout) == ([16, 64], layout)


def test_kernel_has_the_attributes_of_the_key():
    kernel = softmax._forward_kernel
    assert isinstance(kernel, JITFunction)
    assert kernel.arg_names[0] == "x_ptr"
    assert [p.do_not_specialize for p in kernel.params if p.name in ("stride_x", "M")] == [False, True]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_a_profiler_are_noticed(which):
    assert not has_launch_hook()
    hook = lambda metadata: None
    chain = getattr(triton.knobs.runtime, which)
    if hasattr(chain, "add"):
        chain.add(hook)
        assert has_launch_hook()
        chain.remove(hook)
    else:
        setattr(triton.knobs.runtime, which, hook)
        assert has_launch_hook()
        setattr(triton.knobs.runtime, which, None)
    assert not has_launch_hook()


def test_missing_hooks_count_as_none(monkeypatch):
    import importlib.util

    monkeypatch.setattr(triton, "knobs", None)
    spec = importlib.util.spec_from_file_location(
        "triton_private_without", sys.modules[triton_private.__name__].__file__
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.has_launch_hook()


def test_ranges_take_the_argument_that_keeps_a_loop_as_it_is():
    class Range:
        def __init__(self, start, end=None, num_stages=None):
            self.values = start, end, num_stages

    triton_private.ignore_disable_licm(Range)
    assert Range(0, 4, num_stages=2, disable_licm=True).values == (0, 4, 2)
    assert Range(3).values == (3, None, None)
    assert triton_private.tl.range(0, 4, disable_licm=True).end == 4

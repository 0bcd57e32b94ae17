"""The private names of Triton give the known answers, and Tigon works without them as the file says."""

import sys

import pytest
import triton

from tigon.ops.logits import softmax
from tigon.runtime import triton_private
from tigon.runtime.triton_private import JITFunction, has_direct_launch, is_hooked

pytestmark = pytest.mark.no_interpreter("The interpreter launches nothing through these names.")


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.7.1", "3.7.1+git4bd2c1b0", "3.4"])
def test_tested_versions_launch_directly(version):
    assert has_direct_launch(version)


@pytest.mark.parametrize("version", ["3.3.1", "3.5.0", "3.8.0", "3.40.0", "4.3.4", ""])
def test_other_versions_do_not_launch_directly(version):
    assert not has_direct_launch(version)


def test_compiled_kernel_has_the_arguments_of_a_direct_launch():
    compiled = triton.compiler.CompiledKernel
    assert isinstance(compiled.run, property)
    codes = [function.__code__ for function in vars(compiled).values() if hasattr(function, "__code__")]
    names = {name for code in codes for name in code.co_names}
    assert {"function", "packed_metadata"} <= names


def test_kernel_has_the_attributes_of_the_key():
    kernel = softmax._forward_kernel
    assert isinstance(kernel, JITFunction)
    assert kernel.arg_names[0] == "x_ptr"
    assert [p.do_not_specialize for p in kernel.params if p.name in ("stride_x", "M")] == [False, True]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_a_profiler_are_noticed(which):
    assert not is_hooked()
    hook = lambda metadata: None
    chain = getattr(triton.knobs.runtime, which)
    if hasattr(chain, "add"):
        chain.add(hook)
        assert is_hooked()
        chain.remove(hook)
    else:
        setattr(triton.knobs.runtime, which, hook)
        assert is_hooked()
        setattr(triton.knobs.runtime, which, None)
    assert not is_hooked()


def test_missing_hooks_count_as_none(monkeypatch):
    import importlib.util

    monkeypatch.setattr(triton, "knobs", None)
    spec = importlib.util.spec_from_file_location(
        "triton_private_without", sys.modules[triton_private.__name__].__file__
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not module.is_hooked()

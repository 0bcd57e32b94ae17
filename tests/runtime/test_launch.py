"""Launches: a compiled variant is reused for exactly the arguments that it was compiled for."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import tigon
from op_cases import CASES, INTERPRETED, Case
from tigon.ops.experts import tiled_products
from tigon.ops.experts.tile_gradient import weight_gradient_kernel
from tigon.ops.experts.tile_product import product_kernel, row_blocks_kernel
from tigon.ops.logits import softmax
from tigon.ops.mlps import activation_kernels
from tigon.ops.norms import kernels as norm
from tigon.ops.rotary import kernels as rotary
from tigon.runtime import launch
from tigon.runtime.compat.triton import TensorDescriptor, hopper

pytestmark = pytest.mark.no_interpreter("The interpreter compiles no variants.")

if not INTERPRETED:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend

    from benchmarks.compile.steps import run_step
    from benchmarks.compile.targets import CHIPS, recorded

    BACKENDS = [CUDABackend, HIPBackend]
else:
    BACKENDS = []


def _specialised(kernel, arguments, backend) -> tuple:
    """Return the properties of the arguments by which Triton chooses a variant."""
    return tuple(
        native_specialize_impl(
            backend, x, False, not p.do_not_specialize and type(x) is not float, not p.do_not_specialize_on_alignment
        )
        for p, x in zip(kernel.params, arguments, strict=False)
    )


def _properties(kernel, arguments) -> tuple:
    """Return the properties of the arguments by which Tigon chooses a variant."""
    return launch._split_function(kernel, tuple(map(type, arguments)))(*arguments)[0]


class _Huge(torch.Tensor):
    """A tensor whose storage claims to have 2 GiB."""

    def untyped_storage(self):
        return type("Storage", (), {"nbytes": lambda _: 2**31, "size": lambda _: 2**31})()


BASE = torch.zeros(64, dtype=torch.bfloat16)
TENSORS = [None, BASE, BASE[1:], BASE[8:], BASE[:0], BASE.float(), BASE.half(), BASE.as_subclass(_Huge)]
DTYPES = [torch.bfloat16, torch.float16]
INTS = [-100, -16, -1, 0, 1, 2, 15, 16, 17, 4096, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**33, 2**33 + 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_triton_distinguishes_have_different_keys(backend, monkeypatch):
    """If Triton compiled two variants for one key, the wrong one would run."""
    monkeypatch.setattr(launch, "HIP", backend is HIPBackend)
    kernel = softmax._forward_kernel  # x_ptr, y_ptr, stride_x, stride_y, M (not specialised), N
    variants = {}
    calls = [
        *((x, y, 64, 64, 7, 64) for x, y in itertools.product(TENSORS, TENSORS)),
        *((BASE, BASE, a, b, c, 64) for a, b, c in itertools.product(INTS, INTS, INTS[::5])),
    ]
    for arguments in calls:
        kinds = [torch.Tensor if isinstance(x, torch.Tensor) else type(x) for x in arguments]
        key = (*kinds, _properties(kernel, arguments))
        assert variants.setdefault(key, variant := _specialised(kernel, arguments, backend)) == variant, arguments


def test_key_does_not_depend_on_the_batch():
    """With values in the key, each length would add a variant to the table."""
    kernel = activation_kernels._forward_kernel
    keys = set()
    for m in range(1, 2000):
        arguments = (BASE, BASE, BASE, 0, 0, 0, 1.0, 1.0, math.inf, 1.0, 0.0, m * 14336, m * 14)
        keys.add(_properties(kernel, arguments))
    assert len(keys) == 1


def test_key_depends_on_which_tensors_are_none():
    keys = set()
    for absent in itertools.product([BASE, None], repeat=3):
        arguments = (BASE, None, BASE, *absent)
        keys.add((*map(type, arguments), _properties(norm._forward_kernel, arguments)))
    assert len(keys) == 8


def _descriptors(x: torch.Tensor, rows: int, columns: int) -> list:
    """Return a descriptor of tiles [rows, columns] of x for each language of kernels."""
    descriptors = [TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])]
    if hopper is not None:
        descriptors.append(tiled_products._tiles(x, rows, columns))
    return descriptors


@pytest.mark.skipif(TensorDescriptor is None, reason="this Triton is older than 3.6")
def test_key_depends_on_dtype_and_shape_of_the_tiles_of_a_descriptor():
    """The matrix from which the tiles are copied has other sizes in each batch, so they are not part of the key."""
    kernel, variants = softmax._forward_kernel, {}
    shapes = [(64, 64), (128, 64), (256, 64), (64, 256), (16, 32)]
    for dtype, shape, matrix in itertools.product(DTYPES, shapes, [(48, 320), (1000, 320), (1, 8)]):
        for descriptor in _descriptors(torch.zeros(matrix, dtype=dtype), *shape):
            arguments = BASE, descriptor
            key = (type(descriptor), _properties(kernel, arguments))
            variant = _specialised(kernel, arguments, CUDABackend)
            assert variants.setdefault(key, variant) == variant, (dtype, shape)
    languages = 1 if hopper is None else 2
    assert len(variants) == len(set(variants.values())) == len(DTYPES) * len(shapes) * languages


def test_arguments_by_name_are_in_the_order_of_the_parameters():
    arguments = {"N": 6, "M": 5, "stride_y": 4, "stride_x": 3, "y_ptr": "y", "x_ptr": "x"}
    assert launch.in_order(softmax._forward_kernel)(**arguments) == ("x", "y", 3, 4, 5, 6)


def test_strides_of_a_tensor_are_one_argument():
    kernel = rotary._forward_kernel
    tensors = {name: name.removesuffix("_ptr") for name in kernel.arg_names if name.endswith("_ptr")}
    strides = {
        f"strides_{name}": tuple(f"{name}_{axis}" for axis in ("abs" if name == "cos" else "bhs"))
        for name in ("q", "k", "q_out", "k_out", "cos")
    }
    arguments = launch.in_order(kernel)(**tensors, **strides, S=7, eps=8, offset=9)
    expected = [name.removesuffix("_ptr").removeprefix("stride_") for name in kernel.arg_names]
    assert list(arguments) == [*expected[: len(arguments) - 3], 7, 8, 9]


@pytest.mark.parametrize("wrong", [{"N": 6, "blocks": 1}, {}], ids=["an unknown argument", "a missing argument"])
def test_arguments_that_the_kernel_does_not_have_are_refused(wrong):
    arguments = {"M": 5, "stride_y": 4, "stride_x": 3, "y_ptr": "y", "x_ptr": "x"}
    with pytest.raises(TypeError, match="blocks|'N'"):
        launch.in_order(softmax._forward_kernel)(**arguments, **wrong)


def _leaf(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)


def _rotary(op, n: int, heads_first: bool, *weights: int, **options) -> None:
    shapes = [(2, h, n, 64) if heads_first else (2, n, h, 64) for h in (6, 2)]
    tables = torch.zeros(*((3,) if "sections" in options else ()), 1, n, 64, dtype=torch.bfloat16)
    scales = [_leaf(w) for w in weights]
    options["unsqueeze_dim"] = 1 if heads_first else 2
    _run(lambda *tensors: op(*tensors, tables, tables, **options), *(_leaf(*shape) for shape in shapes), *scales)


def _run(op, *tensors: torch.Tensor) -> None:
    outputs = op(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [y.detach() for y in outputs])


# The table of workloads has the ops at other widths.
STEPS = {
    "rms_norm of an odd width": lambda n: _run(tigon.rms_norm, _leaf(n, 77), _leaf(77)),
    "rms_norm of wide rows": lambda n: _run(tigon.rms_norm, _leaf(n, 32768), _leaf(32768)),
    "rope, heads first": lambda n: _rotary(tigon.rope, n, True),
    "qk_norm_rope over all heads": lambda n: _rotary(tigon.qk_norm_rope, n, False, 384, 128),
    "swiglu of an odd width": lambda n: _run(tigon.swiglu, _leaf(n, 2 * 77)),
    "swiglu of wide rows": lambda n: _run(tigon.swiglu, _leaf(n, 14336), _leaf(n, 14336)),
    "relu2 of an odd width": lambda n: _run(tigon.relu2, _leaf(n, 77)),
    "softmax": lambda n: _run(tigon.softmax, _leaf(n, 4096)),
    "softmax of wide rows": lambda n: _run(tigon.softmax, _leaf(n, 32768)),
}


def _step_of(case: Case, n: int) -> None:
    """Run forward and backward of a test variant from the table of workloads, with `n` rows, tokens or positions."""
    sizes = list(case.variant.sizes)
    sizes[case.workload.rows_axis] = n
    run_step(case.workload, replace(case.variant, sizes=tuple(sizes)))


def _experts(n: int) -> None:
    """Run forward and backward of experts whose products are those of `tiled_products` on Hopper."""
    up, down = _leaf(4, 128, 64), _leaf(4, 64, 64)
    index, weights = torch.arange(2 * n).view(n, 2) % 4, torch.ones(n, 2)
    _run(lambda x, up, down: tigon.moe_mlp(x, up, down, index, weights), _leaf(n, 64), up, down)


def _variants(step, n: int, chip) -> set:
    """Return what Triton would compile for the launches of a step with `n` rows, tokens or positions."""
    with recorded(chip) as launches:
        step(n)
    variants = set()
    for each in launches:
        constants = {p.name: each.arguments[p.name] for p in each.kernel.params if p.is_constexpr}
        positional = [each.arguments[p.name] for p in each.kernel.params if not p.is_constexpr]
        specialised = _specialised(each.kernel, positional, CUDABackend)
        variants.add((each.kernel.__name__, specialised, *constants.items(), *each.options.items()))
    return variants


@pytest.mark.parametrize("step", [
    *(pytest.param(step, id=name) for name, step in STEPS.items()),
    *(pytest.param(partial(_step_of, case), id=f"{case.name} of the table") for case in CASES),
])  # fmt: skip
@pytest.mark.sampled(2)
def test_another_number_of_tokens_compiles_nothing(step):
    expected = _variants(step, 48, CHIPS[0])
    for n in (47, 16, 1, 400):
        assert _variants(step, n, CHIPS[0]) == expected


@pytest.mark.skipif(hopper is None, reason="this Triton is neither 3.6 nor 3.7")
def test_another_number_of_tokens_compiles_no_kernel_of_tiles():
    expected = _variants(_experts, 48, CHIPS[1])
    kernels = {row_blocks_kernel, product_kernel, weight_gradient_kernel}
    assert {kernel.__name__ for kernel in kernels} <= {name for name, *_ in expected}
    for n in (47, 16, 1, 400):
        assert _variants(_experts, n, CHIPS[1]) == expected

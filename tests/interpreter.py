"""Let Triton's interpreter compute what compiled kernels compute, in a third of the time."""

import dataclasses
import functools
from collections.abc import Callable

import torch

__all__ = ["repair_the_interpreter", "speed_up_the_interpreter"]


def repair_the_interpreter() -> None:
    """Change four places in which the interpreter of Triton 3.7 computes something else than compiled kernels.

    For the minimum or maximum of a number and NaN, the interpreter returns NaN. Compiled code returns the number, if
    the kernel does not request that NaN propagates. The interpreter truncates fp32 to bf16, where compiled code rounds.
    It stores bf16 values as 16-bit integers, and `dot` multiplies these integers. If fp32 is rounded up to the next
    power of two of an FP8 format, it loses the carry, and it rounds ties away from zero. Without this repair, 2 to 4 %
    of the values of e4m3 and 4 to 6 % of those of e5m2 differ from torch. Compiled code also limits values to the
    largest finite one.
    """
    import numpy
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounded_cast(self, x, dtype):
        if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, x, dtype)
        values = torch.from_numpy(numpy.ascontiguousarray(x.data)).to(torch.bfloat16)
        return TensorHandle(values.view(torch.int16).numpy().view(numpy.uint16).reshape(x.data.shape), tl.bfloat16)

    def dot_of_values(self, a, b, *rest):
        values = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *values, *rest)

    convert = InterpreterBuilder.create_fp_to_fp
    fp8_dtypes = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def rounded_fp8(self, x, dtype, rounding):
        fp8_dtype = fp8_dtypes.get(dtype.scalar)
        if x.dtype.scalar != tl.float32 or fp8_dtype is None:
            return convert(self, x, dtype, rounding)
        largest = torch.finfo(fp8_dtype).max
        values = torch.from_numpy(numpy.ascontiguousarray(x.data)).clamp(-largest, largest).to(fp8_dtype)
        return TensorHandle(values.view(torch.uint8).numpy().reshape(x.data.shape), dtype.scalar)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = rounded_cast, dot_of_values
    InterpreterBuilder.create_fp_to_fp = rounded_fp8

    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)


def speed_up_the_interpreter() -> None:
    """Make parts of the interpreter of Triton 3.7 faster; the results stay the same.

    Before every launch, and before every call of a device function such as `tl.sum`, the interpreter searches the
    modules of `triton.language` for functions to replace, which takes 0.6 ms. Here it does so once for each module
    whose kernels it runs. The replacements stay, because a process of the tests either interprets or compiles kernels.
    The dtype in numpy of each dtype of Triton is looked up in a dict that is made only once. The interpreter also
    computes every operation on integers again in int64, and then drops the result, because its option `debug` is off.
    After a launch, it copies the storage of every tensor to the device, which for a tensor on the CPU is a copy of all
    of its memory to the same place.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    _share_shapes()
    patch_language, find_numpy_dtype = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)
    patched_modules, pointer_dtype = set(), numpy.dtype(numpy.uint64)

    def patch_language_once(fn: Callable) -> "interpreter._LangPatchScope":
        if fn.__module__ not in patched_modules:
            patched_modules.add(fn.__module__)
            patch_language(fn)
        return interpreter._LangPatchScope()

    def numpy_dtype(dtype: tl.dtype) -> numpy.dtype:
        # A block has the dtype of its elements. Pointers have no hash.
        scalar = dtype.scalar
        return pointer_dtype if isinstance(scalar, tl.pointer_type) else find_numpy_dtype(scalar)

    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    interpreter._patch_lang, interpreter._get_np_dtype = patch_language_once, numpy_dtype
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _share_shapes() -> None:
    """Let all blocks with the same sizes share the objects that describe their shape.

    For every block that it computes, the interpreter creates a type and a tensor, and each of them creates an object
    for every size. For small blocks this takes longer than the arithmetic. If two blocks share their shape, the
    interpreter also need not compare the sizes to find that neither has to be broadcast. Equal dtypes are mostly one
    object, so a cast that changes nothing is recognised without a comparison of names.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    # By the sizes: the shape and the number of elements of a type, and those of a tensor.
    shapes_of_types: dict[tuple[int, ...], tuple] = {}
    shapes_of_tensors: dict[tuple[int, ...], tuple] = {}

    def init_type(self, element_ty, shape):
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if sizes not in shapes_of_types:
            make_type(self, element_ty, shape)
            shapes_of_types[sizes] = self.shape, self.numel
        self.shape, self.numel = shapes_of_types[sizes]
        self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty}>"

    def init_tensor(self, handle, type):
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes_of_tensors:
            make_tensor(self, handle, type)
            shapes_of_tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes_of_tensors[sizes]

    def broadcast_if_needed(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def cast_if_needed(self, value, dtype, *rounding):
        return value if value.dtype is dtype else cast(self, value, dtype, *rounding)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_if_needed, cast_if_needed

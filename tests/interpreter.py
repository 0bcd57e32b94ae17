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
        if dtype.scalar is tl.float32 and x.dtype.scalar is tl.bfloat16:
            # A bf16 is the upper half of an fp32. The interpreter converts sign, exponent and mantissa by themselves.
            return TensorHandle((x.data.astype(numpy.uint32) << 16).view(numpy.float32), tl.float32)
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
    The dtype in numpy of each dtype of Triton is looked up in a dict that is made only once. The error function is that
    of torch, in fp64, because the interpreter calls the one of Python for every element. The interpreter also
    computes every operation on integers again in int64, and then drops the result, because its option `debug` is off.
    After a launch, it copies the storage of every tensor to the device, which for a tensor on the CPU is a copy of all
    of its memory to the same place.
    """
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    _share_shapes()
    _call_builtins_directly()
    _convert_equal_operands_once()
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

    interpreter.np_erf_fp32 = lambda x: torch.from_numpy(numpy.array(x)).double().erf_().float().numpy()
    interpreter.GridExecutor._restore_args_dev = lambda *args: None
    interpreter._patch_lang, interpreter._get_np_dtype = patch_language_once, numpy_dtype
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )


def _share_shapes() -> None:
    """Let all blocks with the same sizes share the objects that describe their shape.

    For every block that it computes, the interpreter creates a type and a tensor, and each of them creates an object
    for every size. For small blocks this takes longer than the arithmetic. Two blocks of one shape have the same
    object, so a comparison of two objects shows that neither has to be broadcast. How the blocks of two shapes are
    broadcast is found only once. Equal dtypes are mostly one object, so a cast that changes nothing is recognised
    without a comparison of names.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    # By the sizes, and by the identity of the shape of a type: this shape, the number of elements, and the sizes.
    shapes: dict[tuple[int, ...] | int, tuple] = {}
    # By the identity of the shape of a type: the shape of a tensor and the number of elements.
    shapes_of_tensors: dict[int | None, tuple] = {}
    # By the identities of the shapes of two tensors: the common shape, or None for a tensor that has it.
    common_shapes: dict[tuple[int, int], tuple] = {}

    def init_type(self, element_ty, shape):
        known = shapes.get(id(shape))
        if known is None:
            sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
            if sizes not in shapes:
                make_type(self, element_ty, shape)
                shapes[sizes] = shapes[id(self.shape)] = self.shape, self.numel, sizes
            known = shapes[sizes]
        self.shape, self.numel, sizes = known
        self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty}>"

    def init_tensor(self, handle, type):
        key = id(type.shape) if type.is_block() else None
        if key not in shapes_of_tensors:
            make_tensor(self, handle, type)
            shapes_of_tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes_of_tensors[key]

    def broadcast_if_needed(self, lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if lhs.shape and not rhs.shape:
            ty = lhs.type if rhs.dtype is lhs.dtype else lhs.type.with_element_ty(rhs.dtype)
            return lhs, core.tensor(self.builder.create_splat(ty, rhs.handle), ty)
        key = id(lhs.shape), id(rhs.shape)
        if key not in common_shapes:
            left, right = broadcast(self, lhs, rhs)
            if lhs.shape and len(lhs.shape) == len(rhs.shape):
                common_shapes[key] = tuple(
                    None if after is before else after.type.shape for after, before in ((left, lhs), (right, rhs))
                )
            return left, right
        left_shape, right_shape = common_shapes[key]
        return expand(self, lhs, left_shape), expand(self, rhs, right_shape)

    def expand(self, x, shape):
        if shape is None:
            return x
        return core.tensor(self.builder.create_broadcast(x.handle, shape), core.block_type(x.dtype, shape))

    def cast_if_needed(self, value, dtype, *rounding):
        return value if value.dtype is dtype else cast(self, value, dtype, *rounding)

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_if_needed, cast_if_needed


def _call_builtins_directly() -> None:
    """Let a function of `triton.language` call its implementation directly, in place of two wrappers.

    The interpreter passes its own `_semantic` to each builtin in a wrapper around the wrapper that checks for it. A
    builtin also compares each argument with several types before it returns it.
    """
    from triton.language import core
    from triton.runtime import interpreter

    semantic, unwrap = interpreter.interpreter_semantic, core._unwrap_if_constexpr
    wrapper_code = core.builtin(lambda: None).__code__
    plain_types = {core.tensor, int, float, bool, str, type(None)}

    def patch_builtin(obj: object, name: str, member: Callable, builder: object, scope: object) -> None:
        function = member.__wrapped__ if member.__code__ is wrapper_code else member

        def call(*args, _semantic=None, **kwargs):
            return function(*args, _semantic=semantic, **kwargs)

        setattr(obj, name, call)

    interpreter._patch_attr = patch_builtin
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain_types else unwrap(value)


def _convert_equal_operands_once() -> None:
    """Find the common dtype of two operands only once for each pair of dtypes, and create each constant only once.

    What a number becomes beside a tensor depends only on the type of the tensor and on the number, and the interpreter
    writes to no block after it is computed, so all operations with the same number share a constant.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import TensorHandle

    check_types, make_constant = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.scalar_constant
    block, dtype_class, numbers = core.tensor, core.dtype, {int, float, bool}
    # By the type and the value of the number, and the dtype and the shape of the tensor.
    operands: dict[tuple, core.tensor] = {}
    constants: dict[tuple, core.tensor] = {}

    def init_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def constant(self, value, dtype):
        if type(value) not in numbers or type(dtype) is not dtype_class:
            return make_constant(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
        return constants[key]

    def check_operands(self, lhs, rhs, *options):
        if type(lhs) is block:
            if type(rhs) is block:
                if lhs.dtype is rhs.dtype and type(lhs.dtype) is dtype_class and len(options) < 4:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) in numbers and type(lhs.dtype) is dtype_class:
                key = type(rhs), rhs, lhs.dtype.name, id(lhs.shape), options
                if key in operands:
                    return lhs, operands[key]
                left, right = check_types(self, lhs, rhs, *options)
                if left is lhs:
                    operands[key] = right
                return left, right
        return check_types(self, lhs, rhs, *options)

    TensorHandle.__init__ = init_handle
    TritonSemantic.scalar_constant, TritonSemantic.binary_op_type_checking_impl = constant, check_operands

"""Run a forward without computing: its operations on the input are recorded, and none of them is carried out.

`defer(run, x)` calls `run` with a `Deferred` in place of the tensor x. A `Deferred` has the dtype, the shape and the
device of a tensor, but no values. The few operations of which a linear layer with adapters consists (products with
weights, dropout, sums, multiplication by a number, conversion to another dtype) return another `Deferred`, which holds
the operation as an `Expression`. For

    def forward(self, x):
        y = self.base(x)
        return y + self.b(self.a(x.float())) * 2.0

the result is `Sum(Product(Input(), base), Scaled(Product(Product(Cast(Input(), float32), a), b), 2.0))`.

The Python code of the forward runs as always. The expression therefore shows what this very call computes, whatever
settings the code reads and however these have changed. If the code does anything else with the input, reads its values
or stores it beyond the call, `defer` returns the reason as a `Refusal`, and the caller runs the forward on the tensor
itself.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tigon.runtime.compat.operators import native_linear


class TensorLike(NamedTuple):
    """The properties of a tensor that code may read without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


# --- expressions -----------------------------------------------------------------------------------


class Input(NamedTuple):
    """The tensor with which the forward was called."""


class Cast(NamedTuple):
    """The operand, converted to another dtype."""

    operand: "Expression"
    dtype: torch.dtype


class Dropout(NamedTuple):
    """The operand after a dropout with this probability, in training mode."""

    operand: "Expression"
    probability: float


class Product(NamedTuple):
    """operand W^T + bias."""

    operand: "Expression"
    weight: Any
    bias: Tensor | None


class Call(NamedTuple):
    """The output of a module that was called with the operand, and whose code was not run."""

    operand: "Expression"
    module: nn.Module


class Scaled(NamedTuple):
    """operand * factor."""

    operand: "Expression"
    factor: float


class Sum(NamedTuple):
    """first + second."""

    first: "Expression"
    second: "Expression"


Expression: TypeAlias = Input | Cast | Dropout | Product | Call | Scaled | Sum


def evaluate(expression: Expression, x: Tensor) -> Tensor:
    """Carry out the operations of an expression on the input x, and return the result."""
    if isinstance(expression, Input):
        return x
    if isinstance(expression, Sum):
        first = evaluate(expression.first, x)
        return first + evaluate(expression.second, x)
    operand = evaluate(expression.operand, x)
    if isinstance(expression, Cast):
        return operand.to(expression.dtype)
    if isinstance(expression, Dropout):
        return F.dropout(operand, expression.probability)
    if isinstance(expression, Product):
        return F.linear(operand, expression.weight, expression.bias)
    if isinstance(expression, Call):
        return expression.module(operand)
    return operand * expression.factor


def _nodes(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and its operands, each as often as it occurs."""
    yield expression
    if isinstance(expression, Sum):
        yield from _nodes(expression.first)
        yield from _nodes(expression.second)
    elif not isinstance(expression, Input):
        yield from _nodes(expression.operand)


def has_call(expression: Expression) -> bool:
    """Return True if an expression contains the output of a module whose code was not run."""
    return any(isinstance(node, Call) for node in _nodes(expression))


class Computed(NamedTuple):
    """The expression that a forward computes, and the shape, dtype and device of the result."""

    expression: Expression
    properties: TensorLike


# --- tensors without values --------------------------------------------------------------------------


class Refusal(str):
    """The reason why a forward cannot run without values."""


class _CannotDefer(BaseException):
    """Ends a forward that needs the values of a `Deferred`. `except Exception` in the forward does not catch it."""


class _Recording:
    """The record of one call of a forward: every `Deferred` of the call, and the reason of the first refusal."""

    def __init__(self, modes: tuple) -> None:
        self.created: list[weakref.ref[Deferred]] = []
        self.has_dropout = False
        self.refusal: Refusal | None = None
        self.modes = modes

    def refuse(self, reason: str) -> _CannotDefer:
        """Record why the forward cannot run without values, and return the exception that ends it.

        The recorded reason is needed if the forward catches the exception.
        """
        self.refusal = self.refusal or Refusal(reason)
        return _CannotDefer(reason)


def modes_of(device_type: str) -> tuple:
    """Return the modes of torch that change gradients and dtypes of operations on a type of device."""
    autocast = (
        device_type != "meta" and torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


_assign = object.__setattr__


class Deferred:
    """A tensor whose values are not computed."""

    __slots__ = ("__weakref__", "_expression", "_properties", "_recording")
    _recording: _Recording
    _expression: Expression
    _properties: TensorLike

    def __init__(self, recording: _Recording, expression: Expression, properties: TensorLike) -> None:
        # `__setattr__` of this class refuses.
        _assign(self, "_recording", recording)
        _assign(self, "_expression", expression)
        _assign(self, "_properties", properties)
        recording.created.append(weakref.ref(self))

    def _result_of(
        self, expression: Expression, shape: torch.Size | None = None, dtype: torch.dtype | None = None
    ) -> "Deferred":
        """Return a `Deferred` for the result of an operation, which may have another shape or dtype."""
        recording, properties = self._recording, self._properties
        # `evaluate` computes the whole expression in the modes in which the forward was called. If the forward enters
        # another mode, such as `torch.no_grad`, gradients would flow where the forward stops them.
        if modes_of(properties.device.type) != recording.modes:
            raise recording.refuse("changes the mode of gradients or of autocast")
        if shape is not None or dtype is not None:
            properties = TensorLike(shape or properties.shape, dtype or properties.dtype, properties.device)
        return Deferred(recording, expression, properties)

    # --- what the code may read ------------------------------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Refuse `isinstance`.

        If this returned `Tensor`, C++ code of torch would take the object for a tensor, read its memory and crash.
        """
        raise self._recording.refuse("checks the type of a tensor")

    shape = property(lambda self: self._properties.shape)
    dtype = property(lambda self: self._properties.dtype)
    device = property(lambda self: self._properties.device)
    ndim = property(lambda self: len(self._properties.shape))

    def dim(self) -> int:
        return len(self._properties.shape)

    def size(self, dim: int | None = None) -> Any:
        return self._properties.shape if dim is None else self._properties.shape[dim]

    def __getattr__(self, name: str) -> Any:
        raise self._recording.refuse(f"reads .{name} of a tensor")

    # --- operations ------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> "Deferred":
        """Return the tensor in another dtype, given as the only argument."""
        dtypes = [*args, *kwargs.values()]
        if len(dtypes) != 1 or not isinstance(dtypes[0], torch.dtype) or kwargs.keys() - {"dtype"}:
            raise self._recording.refuse("calls .to with other arguments than a dtype")
        dtype = dtypes[0]
        return self if dtype == self.dtype else self._result_of(Cast(self._expression, dtype), dtype=dtype)

    def clone(self) -> "Deferred":
        """Return the tensor. The result of an operation has memory of its own, but the input belongs to the caller."""
        if isinstance(self._expression, Input):
            raise self._recording.refuse("clones its input")
        return self._result_of(self._expression)

    def __add__(self, other: Any) -> "Deferred":
        if type(other) is not Deferred or other._recording is not self._recording:
            raise self._recording.refuse("adds another tensor or a number")
        if other.shape != self.shape or other.device != self.device:
            raise self._recording.refuse("adds tensors of different shapes")
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self._result_of(Sum(self._expression, other._expression), dtype=dtype)

    def __mul__(self, factor: Any) -> "Deferred":
        if type(factor) not in (int, float) or not self.dtype.is_floating_point:
            raise self._recording.refuse("multiplies by something else than a number")
        return self._result_of(Scaled(self._expression, float(factor)))

    __rmul__ = __mul__

    def _linear(self, weight: Any, bias: Tensor | None = None) -> "Deferred":
        properties = self._properties
        shape, dtype = properties.shape, product_dtype(properties)
        for tensor in (weight,) if bias is None else (weight, bias):
            if type(tensor) is Deferred or not isinstance(tensor, Tensor):
                raise self._recording.refuse("multiplies by something else than a weight")
            # torch raises an error for these products. The caller then runs the forward, which raises the error itself.
            if tensor.device != properties.device or product_dtype(tensor) != dtype:
                raise self._recording.refuse("multiplies by a weight of another dtype or device")
        weight_shape = weight.shape
        fits = len(weight_shape) == 2 and len(shape) > 0 and weight_shape[1] == shape[-1]
        if not fits or (bias is not None and bias.shape != weight_shape[:1]):
            raise self._recording.refuse("multiplies by a weight of another shape")
        return self._result_of(
            Product(self._expression, weight, bias), torch.Size((*shape[:-1], weight_shape[0])), dtype
        )

    def _dropout(self, p: float = 0.5, training: bool = True, inplace: bool = False) -> "Deferred":
        if inplace or not 0.0 <= p < 1.0:
            raise self._recording.refuse("calls dropout in place, or drops everything")
        if not training or p == 0.0:
            return self
        self._recording.has_dropout = True
        return self._result_of(Dropout(self._expression, float(p)))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> "Deferred":
        options = kwargs or {}
        if args and type(args[0]) is Deferred:
            if function is native_linear:
                return args[0]._linear(*args[1:], **options)
            if function is F.dropout:
                return args[0]._dropout(*args[1:], **options)
        operand = next((x for x in (*args, *options.values()) if type(x) is Deferred), None)
        assert operand is not None
        name = getattr(function, "__name__", str(function))
        raise operand._recording.refuse(f"calls {name} with its input")


def product_dtype(x: Tensor | TensorLike) -> torch.dtype:
    """Return the dtype of the product of x and a weight of the same dtype: the dtype of autocast if this is active."""
    device_type = x.device.type
    is_cast = device_type != "meta" and torch.is_autocast_enabled(device_type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if is_cast else x.dtype


def call_deferred(module: nn.Module, x: Any, features: int, dtype: torch.dtype | None = None) -> Any:
    """Return a `Deferred` for `module(x)`, without running the module, if x is a `Deferred`; otherwise None.

    `features` is the size of the last dimension of the output, and `dtype` its dtype. None is the dtype of x.
    """
    if type(x) is not Deferred:
        return None
    return x._result_of(Call(x._expression, module), dtype=dtype, shape=torch.Size((*x.shape[:-1], features)))


def _make_refusing_method(name: str) -> Callable:
    """Return a special method of `Deferred` that refuses the operation."""

    def method(self: Deferred, *args: Any, **kwargs: Any) -> Any:
        raise self._recording.refuse(f"calls {name} of a tensor")

    return method


# Python looks up special methods on the class, without `__getattr__`, so each one needs a method that refuses. Methods
# that every object has, such as `__new__` and `__sizeof__`, stay.
_OPERATORS = {name for name in dir(Tensor) if name.startswith("__") and callable(getattr(Tensor, name))}
# These methods of `object` refuse too, because they compare, show or change a tensor.
_OBJECT_METHODS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__str__", "__format__"}
_OBJECT_METHODS |= {"__setattr__", "__delattr__", "__reduce__", "__reduce_ex__"}
for _name in (_OPERATORS - {*vars(Deferred)} - {*dir(object)}) | _OBJECT_METHODS:
    setattr(Deferred, _name, _make_refusing_method(_name))
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]


def defer(run: Callable[[Any], Any], x: Tensor | TensorLike) -> Computed | Refusal:
    """Return the expression that `run` computes from x, or the reason why `run` needs the tensor itself.

    Args:
        run: A function of one tensor, such as the forward of a module.
        x: The tensor, or its shape, dtype and device.
    """
    recording = _Recording(modes_of(x.device.type))
    try:
        result = run(Deferred(recording, Input(), TensorLike(x.shape, x.dtype, x.device)))
    except _CannotDefer:
        return cast(Refusal, recording.refusal)
    except Exception as error:
        # The caller runs the forward on the tensor, which raises the error again unless the `Deferred` caused it.
        return recording.refusal or Refusal(f"raises {type(error).__name__}")
    if recording.refusal is not None:
        return recording.refusal
    if type(result) is not Deferred:
        return Refusal("returns something else than one tensor that is computed from its input")
    computed = Computed(result._expression, result._properties)
    # The result is the only `Deferred` that may be alive now. Any other one was stored by the forward.
    del result
    if any(reference() is not None for reference in recording.created):
        return Refusal("keeps a tensor after the call")
    if not recording.has_dropout:
        return computed
    dropouts = [id(node) for node in _nodes(computed.expression) if isinstance(node, Dropout)]
    # `evaluate` and the ops draw a new mask for each occurrence of a dropout in the expression.
    return computed if len({*dropouts}) == len(dropouts) else Refusal("uses the mask of a dropout twice")

"""Stand-ins for logits while the loss is computed inside the head.

`Placeholder` is the tensor that the head returns to the model's own forward. The model may scale, cap and cast it
before the loss, as it does with logits. Any other computation from it raises an error at once. `SKIPPED_LOGITS` takes
the place of the logits in the model's output. Any use of it raises an error.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from tigon.runtime.compat.autograd import DisableTorchFunctionSubclass
from tigon.runtime.engines import keeps_values

PLACEHOLDER_SHAPE = (1, 1, 3)


class LogitsSkippedError(AttributeError, RuntimeError):
    """A computation used logits that do not exist. The error is also an AttributeError, because engines call
    `hasattr(x, "to")` on every output of a model."""


def refuse(use: str) -> NoReturn:
    """Raise an error which says that the logits do not exist, and how to compute them."""
    raise LogitsSkippedError(
        f"tigon: {use} needs the logits of this call, but they do not exist, because the loss was computed inside the "
        "head without them. Call the model with skip_logits=False to compute them, or patch it with "
        "tigon.patch(model, loss=False)"
    )


class SkippedLogits:
    """A stand-in for logits that were not computed: any use raises an error that says how to compute them. It is in the
    output of a model whose loss was computed inside its head. The only instance is `SKIPPED_LOGITS`."""

    def __repr__(self) -> str:
        return "<tigon: logits that were never computed; skip_logits=False computes them>"

    def __reduce__(self) -> str:
        return "SKIPPED_LOGITS"

    def __getattr__(self, name: str) -> NoReturn:
        # Python itself reads such names when it copies or prints an object.
        if name.startswith("__") and name != "__array__":
            raise AttributeError(name)
        refuse(f"`logits.{name}`")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> NoReturn:
        refuse(f"torch's `{getattr(function, '__name__', function)}`")


def _make_refusing_method(name: str) -> Any:
    """Return a special method of `SkippedLogits` that raises the error."""

    def method(self: SkippedLogits, *args: Any) -> NoReturn:
        refuse(f"`{name}` of the logits")

    method.__name__ = name
    return method


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (
    *("getitem", "setitem", "len", "iter", "contains", "bool", "float", "int", "array", "call", "index"),
    *("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"),
    *_ARITHMETIC,
    *(f"r{name}" for name in _ARITHMETIC),
):
    setattr(SkippedLogits, f"__{_name}__", _make_refusing_method(f"__{_name}__"))

SKIPPED_LOGITS = SkippedLogits()

# OPERATIONS are the functions that a model may apply to its logits before its loss. QUERIES are the functions that
# engines call on every output.
OPERATIONS = (
    *("mul", "__mul__", "__rmul__", "mul_", "multiply", "div", "__truediv__", "div_", "divide", "true_divide"),
    *("tanh", "tanh_", "to", "float", "type", "type_as", "bfloat16", "half", "double"),
    *("clone", "contiguous", "cuda", "cpu", "view_as", "as_subclass"),
)
QUERIES = (
    *("__get__", "__hash__", "__repr__", "_is_view", "data_ptr", "dim", "element_size", "get_device", "is_complex"),
    *("is_contiguous", "is_floating_point", "size", "storage_offset", "stride", "untyped_storage"),
    *("backward", "record_stream", "requires_grad_"),
)
ALLOWED = frozenset(OPERATIONS + QUERIES)

# Attributes of the placeholder that code reads only to compute from their values.
REFUSED = frozenset(("nbytes", "T", "mT", "H", "mH", "data", "real", "grad"))

# Operations whose result may be less precise than fp32.
CASTS = frozenset(("to", "type", "type_as", "bfloat16", "half"))


class Placeholder(Tensor):
    """A tensor of three elements that the head returns in place of its logits. `is_exact` is True if every operation so
    far had an fp32 result, so that the value has only rounding errors of fp32. `shape` and `size()` return
    `logits_shape`, the shape of the logits that it stands for."""

    is_exact = False
    logits_shape: torch.Size | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        # A function that reads an attribute has the name "__get__". Its `__self__` has the name of the attribute.
        attribute = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else ""
        if attribute == "shape" or name == "size":
            return _size(*args, **kwargs)
        # A hook of an engine only observes when the gradient arrives. Any other hook may change the gradient of logits.
        if name == "register_hook" and keeps_values(args[1]):
            return super().__torch_function__(function, types, args, kwargs)
        # ZeRO-3 passes every output through an autograd function, whose forward detaches it. Gradients are off there.
        is_allowed = name in ALLOWED or (name == "detach" and not torch.is_grad_enabled())
        if not is_allowed or attribute in REFUSED:
            refuse(f"`logits.{attribute}`" if attribute else f"torch's `{name or function}`")
        result = super().__torch_function__(function, types, args, kwargs)
        if type(result) is Placeholder and not torch.compiler.is_compiling():
            source = next((x for x in args if isinstance(x, Placeholder)), None)
            if source is not None:
                result.logits_shape = source.logits_shape
                result.is_exact = source.is_exact and (name not in CASTS or _is_fp32(result))
        return result


def _size(placeholder: Placeholder, dim: int | None = None) -> torch.Size | int:
    """Return the shape of the logits, or the size of one dimension. A compiler does not know attributes of tensors."""
    shape = None if torch.compiler.is_compiling() else placeholder.logits_shape
    if shape is None:
        refuse("`logits.shape` in compiled code")
    return shape if dim is None else shape[dim]


def _is_fp32(x: Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        return x.dtype is torch.float32


def is_exact(x: Any) -> bool:
    """Return whether a value is known to be a placeholder that was never rounded to a type below fp32."""
    # A compiler does not know attributes of tensors.
    return not torch.compiler.is_compiling() and isinstance(x, Placeholder) and x.is_exact


def is_placeholder(x: Any) -> bool:
    """Return whether a value represents logits. An engine may have converted a placeholder to a plain tensor."""
    return isinstance(x, Placeholder) or (isinstance(x, Tensor) and x.shape == PLACEHOLDER_SHAPE)


def as_placeholder(x: Tensor, logits_shape: tuple[int, ...]) -> Tensor:
    """Return `x` as a placeholder for logits of a shape. It allows only what a model does to logits before its loss."""
    placeholder = x.as_subclass(Placeholder)
    if not torch.compiler.is_compiling():
        placeholder.is_exact = x.dtype is torch.float32
        placeholder.logits_shape = torch.Size(logits_shape)
    return placeholder


def as_tensor(x: Tensor) -> Tensor:
    """Return a placeholder as a plain tensor."""
    # torch.compile supports no other conversion.
    with DisableTorchFunctionSubclass():
        return x.clone()

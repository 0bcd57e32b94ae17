"""Stand-ins for logits while the loss is computed inside the head.

`Placeholder` is the tensor that the head returns to the model's own forward. It may be scaled, capped and cast on its
way to the loss, as logits are; anything else that is computed from it raises at once. `SKIPPED_LOGITS` is what the
caller finds in the model's output, and raises whenever it is used.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from tigon.recognition.replacement import is_of_an_engine

__all__ = [
    "PLACEHOLDER_SHAPE",
    "SKIPPED_LOGITS",
    "LogitsSkippedError",
    "Placeholder",
    "SkippedLogits",
    "as_placeholder",
    "as_tensor",
    "is_exact",
    "is_placeholder",
]

PLACEHOLDER_SHAPE = (1, 1, 3)


class LogitsSkippedError(AttributeError, RuntimeError):
    """Something was computed from logits that do not exist.

    It is an AttributeError too, because engines ask `hasattr(x, "to")` of everything that a model returns.
    """


def refuse(use: str) -> NoReturn:
    """Raise the error that tells a user why there are no logits, and how to get them."""
    raise LogitsSkippedError(
        f"tigon: {use} needs the logits of this call, and they do not exist: the loss was computed inside the head, "
        "without them. Call the model with skip_logits=False to get them, or patch it with "
        "tigon.patch(model, loss=False)"
    )


class SkippedLogits:
    """The logits of a call that never made them: any use raises an error that says how to get them.

    It is found in the output of a model whose loss was computed inside its head. There is one such object,
    `SKIPPED_LOGITS`.
    """

    def __repr__(self) -> str:
        return "<tigon: logits that were never computed; skip_logits=False computes them>"

    def __reduce__(self) -> str:
        return "SKIPPED_LOGITS"

    def __getattr__(self, name: str) -> NoReturn:
        # Python asks for such names by itself, to copy an object or to show it.
        if name.startswith("__") and name != "__array__":
            raise AttributeError(name)
        refuse(f"`logits.{name}`")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> NoReturn:
        refuse(f"torch's `{getattr(function, '__name__', function)}`")


def _refusing(name: str) -> Any:
    def method(self: SkippedLogits, *args: Any) -> NoReturn:
        refuse(f"`{name}` of the logits")

    method.__name__ = name
    return method


for _name in (
    *("getitem", "setitem", "len", "iter", "contains", "bool", "float", "int", "array", "call", "index"),
    *("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"),
    *(f"{side}{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul") for side in "r"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
):
    setattr(SkippedLogits, f"__{_name}__", _refusing(f"__{_name}__"))

SKIPPED_LOGITS = SkippedLogits()

# What a model may apply to its logits on the way to its loss, and what engines ask of any output.
OPERATIONS = (
    *("mul", "__mul__", "__rmul__", "mul_", "multiply", "div", "__truediv__", "div_", "divide", "true_divide"),
    *("tanh", "tanh_", "to", "float", "type", "type_as", "bfloat16", "half", "double"),
    *("clone", "contiguous", "cuda", "cpu", "view_as", "as_subclass"),
)
QUESTIONS = (
    *("__get__", "__hash__", "__repr__", "_is_view", "data_ptr", "dim", "element_size", "get_device", "is_complex"),
    *("is_contiguous", "is_floating_point", "size", "storage_offset", "stride", "untyped_storage"),
    *("backward", "record_stream", "requires_grad_"),
)
ALLOWED = frozenset(OPERATIONS + QUESTIONS)

# Attributes of the placeholder that are of no use but to compute from it.
REFUSED = frozenset(("nbytes", "T", "mT", "H", "mH", "data", "real", "grad"))

# What may give less than fp32.
CASTS = frozenset(("to", "type", "type_as", "bfloat16", "half"))


class Placeholder(Tensor):
    """A tensor of three elements that the head returns in place of its logits.

    `is_exact` tells that it was in fp32 at every step so far, so that its value has no other error than that of fp32.
    `logits_shape` is the shape of the logits that it stands for, and what it says when it is asked for its shape.
    """

    is_exact = False
    logits_shape: torch.Size | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        # What reads an attribute is called "__get__", and belongs to one of that name.
        attribute = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else ""
        if attribute == "shape" or name == "size":
            return _size(*args, **kwargs)
        # A hook of an engine looks at the gradient's arrival; another may change the gradient of logits.
        if name == "register_hook" and is_of_an_engine(args[1]):
            return super().__torch_function__(function, types, args, kwargs)
        if name not in ALLOWED or attribute in REFUSED:
            refuse(f"`logits.{attribute}`" if attribute else f"torch's `{name or function}`")
        result = super().__torch_function__(function, types, args, kwargs)
        if type(result) is Placeholder and not torch.compiler.is_compiling():
            source = next((x for x in args if isinstance(x, Placeholder)), None)
            if source is not None:
                result.logits_shape = source.logits_shape
                result.is_exact = source.is_exact and (name not in CASTS or _is_fp32(result))
        return result


def _size(placeholder: Placeholder, dim: int | None = None) -> torch.Size | int:
    """The shape of the logits, or the size of one dimension. A compiler knows no attributes of tensors."""
    shape = None if torch.compiler.is_compiling() else placeholder.logits_shape
    if shape is None:
        refuse("`logits.shape` in compiled code")
    return shape if dim is None else shape[dim]


def _is_fp32(x: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dtype is torch.float32


def is_exact(x: Any) -> bool:
    """Whether a value is a placeholder that was never rounded to less than fp32, as far as can be told."""
    # A compiler knows no attributes of tensors.
    return not torch.compiler.is_compiling() and isinstance(x, Placeholder) and x.is_exact


def is_placeholder(x: Any) -> bool:
    """Whether a value stands for logits, also one that an engine has made a plain tensor of."""
    return isinstance(x, Placeholder) or (isinstance(x, Tensor) and x.shape == PLACEHOLDER_SHAPE)


def as_placeholder(x: Tensor, logits_shape: tuple[int, ...]) -> Tensor:
    """`x` as a tensor that refuses every use but those of logits of that shape on their way to the loss."""
    placeholder = x.as_subclass(Placeholder)
    if not torch.compiler.is_compiling():
        placeholder.is_exact = x.dtype is torch.float32
        placeholder.logits_shape = torch.Size(logits_shape)
    return placeholder


def as_tensor(x: Tensor) -> Tensor:
    """A placeholder as a plain tensor."""
    # torch.compile knows no other way back.
    with torch._C.DisableTorchFunctionSubclass():
        return x.clone()

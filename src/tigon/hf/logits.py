"""Stand-ins for logits while the loss is computed inside the head.

`Placeholder` is the tensor that the head returns to the model's own forward. It may be scaled, capped and cast on its
way to the loss, as logits are; anything else that is computed from it raises at once. `SKIPPED_LOGITS` is what the
caller finds in the model's output, and raises whenever it is used.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

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

# Operations that a model may apply to its logits before its loss, and queries that engines make of any output.
ALLOWED = frozenset(
    (
        *(
            "__get__",
            "mul",
            "__mul__",
            "__rmul__",
            "mul_",
            "div",
            "true_divide",
            "__truediv__",
            "div_",
            "tanh",
            "tanh_",
        ),
        *("multiply", "divide", "to", "float", "type", "type_as", "bfloat16", "half", "double", "clone", "contiguous"),
        *("cuda", "cpu", "detach", "view_as", "register_hook", "retain_grad", "requires_grad_", "size", "dim"),
        *("stride", "is_floating_point", "is_complex", "is_contiguous", "element_size", "storage_offset", "get_device"),
        *(
            "data_ptr",
            "untyped_storage",
            "record_stream",
            "as_subclass",
            "__hash__",
            "__repr__",
            "_is_view",
            "backward",
        ),
    )
)


# Attributes of the placeholder that are of no use but to compute from it. Models do ask for the shape of their logits.
REFUSED = frozenset(("nbytes", "T", "mT", "H", "mH", "data", "real"))


# What may give less than fp32.
CASTS = frozenset(("to", "type", "type_as", "bfloat16", "half"))


class Placeholder(Tensor):
    """A tensor of three elements that the head returns in place of its logits.

    `is_exact` tells that it was in fp32 at every step so far, so that its value has no other error than that of fp32.
    """

    is_exact = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        # What reads an attribute is called "__get__", and belongs to one of that name.
        attribute = getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else ""
        if name not in ALLOWED or attribute in REFUSED:
            refuse(f"`logits.{attribute}`" if attribute else f"torch's `{name or function}`")
        result = super().__torch_function__(function, types, args, kwargs or {})
        if type(result) is Placeholder and not torch.compiler.is_compiling():
            source = next((x for x in args if isinstance(x, Placeholder)), None)
            if source is not None and source.is_exact:
                result.is_exact = name not in CASTS or _is_fp32(result)
        return result


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


def as_placeholder(x: Tensor) -> Tensor:
    """`x` as a tensor that refuses every use but those of logits on their way to the loss."""
    placeholder = x.as_subclass(Placeholder)
    if not torch.compiler.is_compiling():
        placeholder.is_exact = x.dtype is torch.float32
    return placeholder


def as_tensor(x: Tensor) -> Tensor:
    """A placeholder as a plain tensor."""
    # torch.compile knows no other way back.
    with torch._C.DisableTorchFunctionSubclass():
        return x.clone()

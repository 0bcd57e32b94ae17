"""Recognise rotary embeddings: a function of the module's file, which the forward of an attention layer calls.

The recipe of each attention layer runs the forward of its class with the op in place of this function
(`tigon.recognition.parts.functions`). The kernel rounds once where eager code rounds three times.
"""

import inspect
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tigon.ops.rotary.qk_norm_rope import qk_norm_rope_of_layer
from tigon.ops.rotary.rope import can_run_kernels, rotary_size
from tigon.recognition.guards.guard import FunctionGuard
from tigon.recognition.parts.functions import FunctionsRecipe, FusedFunction, recognise_functions
from tigon.recognition.parts.rope_forms import ComplexForm, Form, RopeCall, recognise_function, takes_complex_table
from tigon.recognition.rewriting.fused_statements import FusedStatementsRecipe
from tigon.runtime.device import runs_kernels


class _RopeArguments(NamedTuple):
    """The arguments of a rotary embedding, as the op takes them."""

    inputs: list[Tensor]
    cos: Tensor
    sin: Tensor
    unsqueeze_dim: int
    # False if the stock function has no batch dimension, and one was added.
    has_batch: bool


class FusedRope(FusedFunction):
    """Runs `rope` in place of a function of queries, keys, `cos` and `sin`."""

    def __init__(self, scope: dict[str, Any], name: str, form: Form, guard: FunctionGuard) -> None:
        super().__init__(scope, name, form, guard)
        call = RopeCall.of(self.stock)
        assert call is not None, "recognition found a form, so the function has the arguments of a rotary embedding"
        self.call = call

    def compute(self, arguments: dict[str, Any]) -> Any:
        if (rope_arguments := self._select(arguments)) is None:
            return None
        inputs, cos, sin, unsqueeze_dim, has_batch = rope_arguments
        q, k = self.form(inputs[0], inputs[1] if len(inputs) == 2 else None, cos, sin, unsqueeze_dim)
        if not has_batch:
            q, k = q[0], None if k is None else k[0]
        return q if len(inputs) == 1 else (q, k)

    def rotate_normalised(
        self, weights: list[Tensor | None], options: dict[str, Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Normalise each head with these weights and options, and rotate it, in one kernel; None if impossible."""
        named = self.read(args, kwargs)
        arguments = None if named is None else self._select(named)
        if arguments is None or len(arguments.inputs) != len(weights) or not arguments.has_batch:
            return None
        inputs, cos, sin, unsqueeze_dim, _ = arguments
        q, k = inputs[0], inputs[1] if len(inputs) == 2 else None
        first, last = weights[0], weights[-1]
        has_equal_weights = (first is None) == (last is None) and (
            first is None or last is None or first.dtype == last.dtype
        )
        fits_heads = all(w is None or tuple(w.shape) == tuple(q.shape[3:]) for w in weights)
        if not (has_equal_weights and fits_heads and q.shape[unsqueeze_dim] > 0 and q.numel() > 0):
            return None
        # The dtype that the norms return.
        rounds_first = options["rounding"] == "before_weight" and first is not None
        dtype = torch.promote_types(q.dtype, first.dtype) if rounds_first and first is not None else q.dtype
        # The op returns the dtype to which torch promotes that dtype and cos.
        has_dtype = self.form.result == "promoted" or torch.promote_types(dtype, cos.dtype) == dtype
        if self.form.table != "halves" or not has_dtype or not can_run_kernels(q, k, cos, sin):
            return None
        if not runs_kernels(q, k, *weights):
            return None
        sin = -sin if self.form.flipped else sin
        last = None if k is None else last
        results = qk_norm_rope_of_layer(
            q, k, first, last, cos, sin, unsqueeze_dim=unsqueeze_dim, layout=self.form.layout, sections=None, **options
        )
        return results[0] if k is None else results

    def _select(self, arguments: dict[str, Any]) -> _RopeArguments | None:
        """Return the arguments for the op; None if the op does not accept the arguments of the stock function."""
        call, tensors = self.call, []
        unsqueeze_dim = arguments.get("unsqueeze_dim", call.unsqueeze_dim or 2)
        for name in (*call.tensors, "cos", "sin"):
            if not isinstance(x := arguments.get(name), Tensor):
                return None
            tensors.append(x)
        if arguments.get("position_ids") is not None:
            return None
        *inputs, cos, sin = tensors
        has_batch = cos.dim() == 3
        if not has_batch and cos.dim() == 2 and call.unsqueeze_dim is None and all(x.dim() == 3 for x in inputs):
            *inputs, cos, sin = (x[None] for x in tensors)
        if unsqueeze_dim not in (1, 2) or not self._fits(inputs, cos, sin, unsqueeze_dim):
            return None
        return _RopeArguments(inputs, cos, sin, unsqueeze_dim, has_batch)

    def _fits(self, inputs: list[Tensor], cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
        """Return True if the op accepts these shapes. The stock function accepts all shapes that broadcast."""
        q = inputs[0]
        if cos.dim() != 3 or q.dim() != 4 or cos.shape != sin.shape or cos.dtype != sin.dtype:
            return False
        batch, length, size = q.shape[0], q.shape[3 - unsqueeze_dim], q.shape[3]
        for x in inputs[1:]:
            if x.dim() != 4 or (x.shape[0], x.shape[3 - unsqueeze_dim], x.shape[3]) != (batch, length, size):
                return False
            if x.dtype != q.dtype:
                return False
        width = rotary_size(cos, self.form.table)
        fits_head = width == size or (self.form.partial and width < size)
        return fits_head and width % 2 == 0 and cos.shape[0] in (1, batch) and cos.shape[1] == length


class FusedComplexRope(FusedFunction):
    """Runs `rope` in place of a function of queries, keys and a complex table."""

    def compute(self, arguments: dict[str, Any]) -> Any:
        values = [arguments.get(name) for name in self.names]
        return self.form(*values) if self.form.accepts(*values) else None


class RopeRecipe(FunctionsRecipe):
    """The stock forward of an attention class, with other rope functions and perhaps with fused statements."""

    forms: tuple[tuple[str, Form | ComplexForm], ...]

    def fuse(self, form: Any, scope: dict[str, Any], name: str, guard: FunctionGuard) -> FusedFunction:
        return (FusedComplexRope if isinstance(form, ComplexForm) else FusedRope)(scope, name, form, guard)

    def describe_statements(
        self, module: nn.Module, recipe: FusedStatementsRecipe, recipes: Mapping[nn.Module, Any]
    ) -> FusedStatementsRecipe:
        """Return the recipe whose name says whether the norms of queries and keys are fused."""
        is_supported = all(isinstance(form, Form) and form.table == "halves" for _, form in self.forms)
        return recipe.with_head_norms(module, recipes) if is_supported else recipe


def _form_of(value: types.FunctionType, module_name: str) -> Form | ComplexForm | str | None:
    """Return the form of a global that a forward names, a reason, or None if it is no rope function."""
    if not {"cos", "sin"} <= inspect.signature(value).parameters.keys() and not takes_complex_table(value):
        return None
    origin = inspect.unwrap(value).__module__ or ""
    if origin.split(".")[0] not in (module_name.split(".")[0], "transformers"):
        return f"was already replaced (by {origin})"
    return recognise_function(value) or "has other arguments than queries, keys, cos and sin"


def recognise_rope(module: nn.Module) -> Any:
    """Recognise a module whose forward calls a function of `cos` and `sin` that computes what `rope` computes."""
    return recognise_functions(module, RopeRecipe, _form_of)

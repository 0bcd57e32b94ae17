"""Recognise a function that computes a rotary embedding: compare it with every form of the op.

A function such as

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1): ...

runs on random queries, keys and tables, in several dtypes, and must reproduce the bits of one of the forms.
"""

import itertools
import logging
import types
from dataclasses import replace

import torch
from torch import Tensor

from tigon.recognition.parts.rope_complex import ComplexForm, find_complex_form, takes_complex_table
from tigon.recognition.parts.rope_forms import FORMS, Form, RopeCall
from tigon.recognition.probing.standin import describe, gradients, normal, probing, same_bits, same_gradients
from tigon.recognition.probing.trials import Trials, current_trials, not_recording, record, recording
from tigon.runtime.reach.explore import explore
from tigon.runtime.weak_cache import cached_weakly

LOGGER = logging.getLogger("tigon")

# The number of features of a head, and the numbers of heads of queries and of keys.
FEATURES, HEADS = 16, (4, 2)


def recognise_function(function: types.FunctionType) -> Form | ComplexForm | str | None:
    """Return the form that computes what a function computes, or the reason why there is none.

    The result is None if the function does not have the arguments of a rotary embedding. The comparisons use heads of
    16 features. They also try tables for a part of the head.
    """
    # A function is compared once for all layers, and again if anything that it reads has been replaced.
    reach = explore(function)
    if reach.reason:
        return reach.reason
    with reach.preserved():
        form, trials = _recognise(function, reach.fingerprint)
    if (current := current_trials()) is not None:
        current.agreements.update(trials.agreements)
        current.mismatches.update(trials.mismatches)
    return reach.reason or form


@cached_weakly
def _recognise(function: types.FunctionType, state: tuple) -> tuple[Form | ComplexForm | str | None, Trials]:
    """Return the form of a function and the comparisons that found it. `state` is the fingerprint of its reach."""
    with recording() as trials:
        return _find_form(function), trials


def _find_form(function: types.FunctionType) -> Form | ComplexForm | str | None:
    if takes_complex_table(function):
        return find_complex_form(function)
    if (call := RopeCall.of(function)) is None:
        return None
    failure = "computes another rotary embedding than the op"
    comparison = _Comparison(function, call)
    with probing():
        for form in FORMS:
            width = FEATURES // 2 if form.table == "once" else FEATURES
            try:
                if not comparison.agrees(form, width):
                    continue
            except Exception as error:
                LOGGER.debug("%s cannot be compared with %s", function.__qualname__, form, exc_info=True)
                failure = f"cannot be run by itself ({describe(error)})" if width == FEATURES else failure
                continue
            try:
                with not_recording():
                    form = replace(form, partial=comparison.agrees(form, width // 2))
            except Exception:
                LOGGER.debug("%s refuses tables narrower than the head", function.__qualname__, exc_info=True)
            return form
    return failure


class _Comparison:
    """Runs a function and forms on the same inputs.

    A case is a dimension of the heads, a batch size of the tables, and the dtypes of the tensors and of the tables.
    """

    def __init__(self, function: types.FunctionType, call: RopeCall) -> None:
        self.function, self.call = function, call
        dtypes = [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ]
        self.cases = list(itertools.product((1, 2) if call.unsqueeze_dim else (2,), (1, 2), dtypes))
        # The results of the function, by the number of the case and the width of the tables.
        self.results: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}

    def agrees(self, form: Form, width: int) -> bool:
        """Return True if a form has the results and the gradients of the function, for tables of this width."""
        for number in range(len(self.cases)):
            inputs, tables = self.prepare(number, width)
            ours, expected = self.run_form(form, number, inputs, tables), self.stock_results(number, width)
            pairs = zip(expected, ours, strict=True)
            is_same = all(a is b or (b is not None and same_bits(a, b)) for a, b in pairs)
            if not record(is_same, form, None, [*inputs, *tables], ours, expected):
                return False
        inputs, tables = self.prepare(0, width)
        stock_gradients = gradients(lambda: self.run_function(0, inputs, tables), inputs)
        our_gradients = gradients(lambda: self.run_form(form, 0, inputs, tables), inputs)
        is_same = same_gradients(our_gradients, stock_gradients)
        tensors = [*inputs, *tables]
        return record(is_same, form, None, tensors, our_gradients, stock_gradients, mode="gradients")

    def prepare(self, number: int, width: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors to rotate, and `cos` and `sin`, of a case."""
        unsqueeze_dim, batch, (dtype, table_dtype) = self.cases[number]
        shapes = [(2, n, 5, FEATURES) if unsqueeze_dim == 1 else (2, 5, n, FEATURES) for n in HEADS][
            : len(self.call.tensors)
        ]
        inputs = [normal(100 * number + n, *shape, dtype=dtype) for n, shape in enumerate(shapes)]
        return inputs, [normal(100 * number + n, batch, 5, width, dtype=table_dtype) for n in (7, 8)]

    def stock_results(self, number: int, width: int) -> tuple[Tensor, Tensor | None]:
        """Return the results of the function in a case. They are computed once for all forms."""
        if (number, width) not in self.results:
            inputs, tables = self.prepare(number, width)
            self.results[number, width] = self.run_function(number, inputs, tables)
        return self.results[number, width]

    def run_function(self, number: int, inputs: list[Tensor], tables: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Run the function. A function of one tensor has None as its second result."""
        arguments = dict(zip((*self.call.tensors, "cos", "sin"), (*inputs, *tables), strict=True))
        options = {"unsqueeze_dim": self.cases[number][0]} if self.call.unsqueeze_dim else {}
        result = self.function(**arguments, **options)
        return result if isinstance(result, tuple) else (result, None)

    def run_form(
        self, form: Form, number: int, inputs: list[Tensor], tables: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the reference of a form."""
        cos, sin = tables
        k = inputs[1] if len(inputs) == 2 else None
        return form(inputs[0], k, cos, sin, self.cases[number][0], reference=True)

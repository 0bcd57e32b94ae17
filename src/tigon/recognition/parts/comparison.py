"""Compare a module with candidates: probes select candidates, and then one of them is compared in all circumstances.

A part describes its modules by a `Subject` (`tigon.recognition.probing.probes`).
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from tigon.recognition.guards.code_facts import has_conditions
from tigon.recognition.probing.probes import (
    DTYPES,
    SHAPES,
    Subject,
    agrees,
    agrees_in_all_combinations,
    agrees_in_circumstances,
    explain_limits,
    extends_torch,
    modes_of,
)
from tigon.recognition.probing.standin import (
    FP32,
    WritesTensor,
    describe,
    probing,
    run_forward,
    select_equal,
    select_equal_gradients,
)
from tigon.recognition.probing.trials import current_trials, explain_none, recording
from tigon.runtime.reach.places import Reach

LOGGER = logging.getLogger("tigon")

CANNOT_RUN = "cannot be run by itself"

# Pairs of a dtype of the input and a dtype of the parameters. A module without parameters has None.
Pair = tuple[torch.dtype, torch.dtype | None]
EQUAL_DTYPES: tuple[Pair, ...] = tuple((dtype, dtype) for dtype in DTYPES)

Candidate = TypeVar("Candidate", bound=Callable)
Result = TypeVar("Result")


def run_probes(compute: Callable[[], Result], module: nn.Module, reach: Reach | None = None) -> Result | str:
    """Return what `compute` returns, or why the module keeps its forward. Afterwards, the places of `reach` are
    restored and compared."""
    try:
        with contextlib.nullcontext() if reach is None else reach.preserved(), probing():
            result = compute()
    except WritesTensor as error:
        return str(error)
    except Exception as error:
        LOGGER.debug("%s cannot be compared with an op", type(module).__name__, exc_info=True)
        return f"{CANNOT_RUN} ({describe(error)})"
    return result if reach is None else reach.reason or result


def select(subject: Subject, candidates: Sequence[Candidate]) -> tuple[list[Candidate], frozenset[int]]:
    """Return the candidates that agree with a module, and the numbers of dimensions that it accepts."""
    selected = list(candidates)
    for twin, inputs in subject.cases():
        if not selected:
            break
        try:
            y = run_forward(twin, *inputs)
        except WritesTensor:
            raise
        except Exception:
            # A module may refuse an input of another dtype than its parameters, so there is nothing to reproduce.
            if all(parameter.dtype == inputs[0].dtype for parameter in twin.parameters()):
                raise
            continue
        selected = select_equal(selected, twin, inputs, y)
    for training in (True, False) if selected else ():
        twin, inputs = subject(FP32, training), subject.inputs(FP32, 2, 8)
        parameters = list(twin.parameters())
        for leaves in ([*inputs, *parameters], parameters):
            selected = select_equal_gradients(selected, twin, inputs, leaves)
            inputs = [x.detach() for x in inputs]
    dims, twin = set(), subject()
    for shape in SHAPES if selected else ():
        inputs = subject.inputs(FP32, *shape)
        try:
            y = run_forward(twin, *inputs)
        except Exception:
            name = type(subject.module).__name__
            LOGGER.debug("%s refuses an input with %d dimensions", name, len(shape) + 1, exc_info=True)
            continue
        dims.add(len(shape) + 1)
        selected = select_equal(selected, twin, inputs, y)
    return selected, frozenset(dims)


def explain_difference(
    recipe: Callable,
    subject: Subject,
    reach: Reach,
    dims: Iterable[int],
    *,
    pairs: Sequence[Pair] = EQUAL_DTYPES,
    different: str,
) -> str | None:
    """Compare a candidate with a module in all other circumstances. Return the reason why the candidate does not hold,
    or None. `different` is the reason if a comparison fails, and `pairs` are the dtypes that the module accepts."""
    if not agrees_in_circumstances(recipe, subject):
        return different
    if any(agrees(recipe, make, inputs) is False for make, inputs in subject.special_cases(recipe, reach)):
        return different
    tries_all = subject.has_any_width or has_conditions(reach) or extends_torch(subject.module)
    if tries_all and not agrees_in_all_combinations(recipe, subject, modes_of(subject, reach), pairs):
        return different
    # This comes last, because each run with symbolic sizes takes 40 ms.
    return explain_limits(recipe, subject, reach, pairs, dims)


def if_similar(find: Callable[[], Result | str], candidates: Sequence[Callable]) -> Result | str | None:
    """Return what `find` returns. A reason counts only if a candidate agreed with the module in some comparison."""
    with recording(current_trials()) as trials:
        result = find()
    if not isinstance(result, str) or any(trials.agreements[candidate] for candidate in candidates):
        return result
    explain_none(result)
    return None


def is_as_exact(stock: Tensor, ours: Tensor, exact: Tensor, ours_in_fp32: Tensor) -> bool:
    """Return True if a candidate is as near to the exact output as the module in bf16, and differs by the order of sums
    at most in fp32."""
    if not stock.shape == ours.shape == exact.shape == ours_in_fp32.shape:
        return False
    exact = exact.double()
    errors = [(y.double() - exact).abs().max() / exact.abs().max() for y in (stock, ours, ours_in_fp32)]
    stock_error, our_error, fp32_error = errors
    return bool(fp32_error < 1e-5 and stock_error < 0.1 and our_error <= 2 * stock_error + 2**-8)

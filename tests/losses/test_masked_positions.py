"""No loss of hidden states, of Tigon or of its alias for Liger, depends on the values at masked positions.

`test_contracts` has the same test of the functions of log-probabilities.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tigon
from tigon.integrations.liger import chunked, layers, policy
from tigon.integrations.liger.losses import DPO_TYPES

pytestmark = pytest.mark.no_interpreter("tests/ops has the tests of the kernels at ignored rows.")

GARBAGE = (torch.nan, torch.inf, -torch.inf, -120.0, 1e30)
N, H, V = 4, 16, 37
# With few masked tokens, the heads compute the rows of all tokens. Otherwise they select the rows.
MANY = torch.ones(N, 6, dtype=torch.bool)
MANY[0, 4:], MANY[1, 2:4], MANY[2] = False, False, False
FEW = torch.ones(N, 80, dtype=torch.bool)
FEW[0, 78:], FEW[1, 3], FEW[3, 5:7] = False, False, False


class Case(NamedTuple):
    """A loss, its arguments, and those that get a gradient."""

    name: str
    loss: Callable[..., Tensor]
    arguments: dict[str, Tensor]
    leaves: tuple[str, ...]


def normal(name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def log_probs(name: str, mask: Tensor) -> Tensor:
    return -normal(name, *mask.shape).abs() - 0.1


def first(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """Return a function whose result is the loss without the metrics."""

    def loss(**arguments: Tensor) -> Tensor:
        result = function(**arguments, **options)
        return result[0] if isinstance(result, tuple) else result

    return loss


def options_of(loss_type: str) -> dict[str, Any]:
    length = {"max_completion_length": 9} if loss_type == "dr_grpo" else {}
    return {"loss_type": loss_type, **length}


def head_cases(mask: Tensor) -> Iterator[Case]:
    shape = tuple(mask.shape)
    tokens = torch.randint(V, shape, generator=torch.Generator().manual_seed(0))
    hidden = {"hidden": normal("hidden", *shape, H), "weight": normal("weight", V, H), "bias": normal("bias", V)}
    marked = hidden | {"targets": tokens, "mask": mask}
    ignored = hidden | {"targets": tokens.where(mask, -100), "mask": mask}
    leaves = "hidden", "weight", "bias"
    reference = {"ref_hidden": normal("ref", *shape, 8), "ref_weight": normal("head", V, 8)}
    case = lambda name, loss, **more: Case(name, loss, marked | more, leaves)
    for cls in (tigon.ORPOLoss, tigon.CPOLoss, tigon.SimPOLoss):
        yield case(cls.__name__, first(cls()))
    for loss_type in ("sigmoid", "aot"):
        yield case(f"DPOLoss {loss_type}", first(tigon.DPOLoss(loss_type=loss_type)), **reference)
    kto = first(tigon.KTOLoss(), is_desirable=torch.tensor([True, False, True, False]))
    yield case("KTOLoss", kto, **reference)
    old, ref = log_probs("old", mask), log_probs("ref", mask)
    advantages = normal("advantages", *shape)
    for options in ({"loss_type": "grpo"}, {"top_entropy_quantile": 0.5}, {"entropy_coef": 0.1}):
        loss = first(tigon.GRPOLoss(beta=0.1, **options))
        yield case(f"GRPOLoss {options}", loss, advantages=advantages, old_log_probs=old, ref_log_probs=ref)
    yield case("PPOLoss", first(tigon.PPOLoss()), advantages=advantages, old_log_probs=old)
    yield case("RLOOLoss", first(tigon.RLOOLoss(), advantages=advantages[:, 0]), old_log_probs=old)

    def without_mask(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
        return lambda mask, **arguments: first(function, **options)(**arguments)

    teacher = {"teacher_hidden": reference["ref_hidden"], "teacher_weight": reference["ref_weight"]}
    for divergence in ("jsd", "kl", "reverse_kl", "tvd", "cosine"):
        for fp32_logits in (False, True):
            loss = tigon.DistillationLoss(divergence=divergence, hard_weight=0.5, fp32_logits=fp32_logits)
            name = f"DistillationLoss {divergence} {fp32_logits}"
            yield Case(name, without_mask(loss), ignored | teacher, leaves)
    logits = normal("teacher", *shape, V)
    for form, values in {"teacher_logits": logits, "teacher_probs": logits.softmax(-1)}.items():
        loss = tigon.DistillationLoss(divergence="kl")
        yield Case(f"DistillationLoss of {form}", without_mask(loss), ignored | {form: values}, leaves)
    for group in ("token", "sequence", "pair", "batch"):
        options = {"group": group, "loss_fn": lambda values: values.square().sum()}
        for budget in (None, 1):
            loss = without_mask(tigon.linear_loss, max_logits_mib=budget, **options)
            yield Case(f"linear_loss {group} {budget}", loss, ignored, leaves)
    for reduction in ("mean", "none"):
        entropies = lambda reduction=reduction, **x: tigon.linear_cross_entropy(
            x["hidden"], x["weight"], x["targets"], linear_bias=x["bias"], reduction=reduction,
            low_rank=(x["h"], x["b"]) if "h" in x else None,
        ).sum()  # fmt: skip
        factors = {"h": normal("h", *shape, 3), "b": normal("b", V, 3)}
        yield Case(f"linear_cross_entropy {reduction}", entropies, ignored, leaves)
        yield Case(f"linear_cross_entropy {reduction} low_rank", entropies, ignored | factors, (*leaves, *factors))
    squares = lambda **arguments: tigon.linear_log_probs(**arguments).square().sum()
    yield Case("linear_log_probs", without_mask(squares), ignored, leaves)


def alias_cases(mask: Tensor) -> Iterator[Case]:
    shape = tuple(mask.shape)
    tokens = torch.randint(V, shape, generator=torch.Generator().manual_seed(0))
    hidden = {"_input": normal("hidden", *shape, H), "lin_weight": normal("weight", V, H), "bias": normal("bias", V)}
    leaves = tuple(hidden)
    reference = {"ref_input": normal("ref", *shape, 8), "ref_weight": normal("head", V, 8)}
    old, ref, advantages = log_probs("old", mask), log_probs("ref", mask), normal("advantages", N)
    ratio = log_probs("ratio", mask).exp()
    given = {"ref_per_token_logps": ref}
    for loss_type in policy.LOSS_TYPES:
        for level in ("token", "sequence") if loss_type not in policy.TYPES_WITHOUT_CLIPPING else ("token",):
            for which, values in {"given": given, "computed": reference}.items():
                module = chunked.LigerFusedLinearGRPOLoss(
                    importance_sampling_level=level, use_bias_correction_kl=True, **options_of(loss_type)
                )
                call = lambda mask, module=module, **more: module(attention_mask=mask.float(), **more)[0]
                arguments = {"selected_token_ids": tokens, "old_per_token_logps": old, "vllm_is_ratio": ratio}
                arguments |= {"advantages": advantages, "mask": mask}
                yield Case(f"Liger's GRPO {loss_type} {level} {which}", call, hidden | arguments | values, leaves)
            logits = {"logits": normal("logits", N, shape[1] + 1, V), "mask": mask}
            more = {"completion_ids": tokens, "old_logp": old, "ref_logp": ref, "vllm_is_ratio": ratio}
            more["advantages"] = advantages
            for reduce in (True, False):
                options = {"reduce": reduce, "importance_sampling_level": level, **options_of(loss_type)}
                call = lambda mask, options=options, **x: policy.triton_grpo_loss(
                    completion_mask=mask.long(), **x, **options
                )[0].sum()  # fmt: skip
                yield Case(f"triton_grpo_loss {loss_type} {level} {reduce}", call, logits | more, ("logits",))
    pairs = hidden | {"target": tokens.where(mask, -100), "mask": mask}
    drop = lambda module, **fixed: lambda mask, **x: module(**x, **fixed)[0]
    for cls in (chunked.LigerFusedLinearCPOLoss, chunked.LigerFusedLinearSimPOLoss, chunked.LigerFusedLinearORPOLoss):
        yield Case(cls.__name__, drop(cls()), pairs, leaves)
    for loss_type in DPO_TYPES:
        module = chunked.LigerFusedLinearDPOLoss(
            loss_type=loss_type, label_smoothing=0.1, average_log_prob=True, compute_nll_loss=True
        )
        yield Case(f"Liger's DPO {loss_type}", drop(module), pairs | reference, leaves)
    kto = chunked.LigerFusedLinearKTOLoss(use_ref_model=True)
    labels = torch.tensor([True, False, True, False])
    yield Case("Liger's KTO", drop(kto, preference_labels=labels), pairs | reference, leaves)
    students = {"student_input": hidden["_input"], "student_weight": hidden["lin_weight"], "mask": mask}
    students |= {"teacher_input": reference["ref_input"], "teacher_weight": reference["ref_weight"]}
    leaves = "student_input", "student_weight"
    for cls in (chunked.LigerFusedLinearJSDLoss, chunked.LigerFusedLinearCosineSimilarityLoss):
        call = lambda mask, cls=cls, **x: cls()(true_labels=pairs["target"], **x)
        yield Case(cls.__name__, call, students, leaves)
    call = lambda mask, **x: layers.LigerFusedLinearJSD()(
        shift_labels=pairs["target"].flatten(), **{k: v if "weight" in k else v.flatten(0, 1) for k, v in x.items()}
    )  # fmt: skip
    yield Case("Liger's fused JSD", call, students, leaves)
    rows = {"log_q": normal("q", *shape, V).log_softmax(-1), "log_p": normal("p", *shape, V).log_softmax(-1)}
    flat = lambda x: {name: value.flatten(0, 1) for name, value in x.items()}
    call = lambda mask, **x: layers.LigerJSD()(shift_labels=pairs["target"].flatten(), **flat(x))
    yield Case("Liger's JSD", call, rows | {"mask": mask}, ("log_q",))
    call = lambda mask, p, q: layers.LigerTVDLoss()(p.flatten(0, 1), q.flatten(0, 1), pairs["target"].flatten())
    probs = {"p": rows["log_q"].exp(), "q": rows["log_p"].exp(), "mask": mask}
    yield Case("Liger's TVD", call, probs, ("p",))


SIZES = (("many", MANY, head_cases), ("few", FEW, head_cases), ("many", MANY, alias_cases))
CASES = {f"{case.name}, {size} masked": case for size, mask, cases in SIZES for case in cases(mask)}


def loss_and_gradients(case: Case, arguments: dict[str, Tensor]) -> tuple[Tensor, ...]:
    arguments = {k: v.detach().requires_grad_() if k in case.leaves else v for k, v in arguments.items()}
    loss = case.loss(**arguments)
    return loss.detach(), *torch.autograd.grad(loss, [arguments[name] for name in case.leaves])


def with_garbage(values: Tensor, mask: Tensor) -> Tensor | None:
    """Return a copy with the garbage at masked positions, or None if the argument has no such positions."""
    if values.dim() and len(values) == N and values.shape[1:2] == mask.shape[1:]:
        is_masked = ~mask
    elif values.dim() == 3 and values.shape[1] == mask.shape[1] + 1:
        # The last logits of a sequence predict no token.
        is_masked = torch.cat((~mask, torch.ones(N, 1, dtype=torch.bool)), 1)
    elif values.shape == (N,) and values.is_floating_point():
        is_masked = ~mask.any(-1)
    else:
        return None
    positions = is_masked.nonzero()
    for i, position in enumerate(positions.unbind()):
        if values.is_floating_point():
            values = values.index_put(tuple(position), torch.tensor(GARBAGE[i % len(GARBAGE)]))
        elif values.dtype == torch.int64 and values[tuple(position)] != -100:
            # An ignored target stays ignored. Where the mask alone says so, a target may be anything.
            values = values.index_put(tuple(position), torch.tensor((10**9, -7)[i % 2]))
    return values


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)
def test_values_at_masked_positions_have_no_effect(name):
    case = CASES[name]
    mask, expected = case.arguments["mask"], loss_and_gradients(case, case.arguments)
    assert all(value.isfinite().all() for value in expected)
    changed = 0
    for argument, values in case.arguments.items():
        other = with_garbage(values, mask)
        if other is None or torch.equal(other, values):
            continue
        changed += 1
        results = loss_and_gradients(case, case.arguments | {argument: other})
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6, msg=f"{argument} at masked positions")
    assert changed

"""How each peer is called for a case: Liger, Quack, cut-cross-entropy, TRL, and torch's own fused ops.

A loader imports its package, which raises `ImportError` where it is not installed, and returns the call; or it raises
`Unsupported` for a case that the peer cannot compute.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.bench.cases import Case

Run = Callable[..., tuple[Tensor, ...]]


class Unsupported(Exception):
    """The provider cannot compute this case; the message says why."""


def _only(case: Case, *options: str) -> None:
    """The peer has no options but these."""
    others = [f"{key}={value}" for key, value in case.options.items() if key not in options]
    if others:
        raise Unsupported(f"no {', '.join(others)}")


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# --- torch's own ---------------------------------------------------------------------------------


def torch_rms_norm(case: Case) -> Run:
    _only(case)
    return lambda x, weight: (F.rms_norm(x, weight.shape, weight, 1e-6),)


def torch_softmax(case: Case) -> Run:
    return lambda x: (F.softmax(x, -1),)


def torch_cross_entropy(case: Case) -> Run:
    return lambda input, target: (F.cross_entropy(input, target),)


def torch_linear_cross_entropy(case: Case) -> Run:
    if not hasattr(F, "linear_cross_entropy"):
        raise Unsupported("torch.nn.functional.linear_cross_entropy is in torch 2.13 and later")
    _only(case)
    return lambda input, linear_weight, target: (F.linear_cross_entropy(input, linear_weight, target),)


def torch_kl_div(case: Case) -> Run:
    return lambda input, target: (F.kl_div(input, target, reduction="batchmean", **case.options),)


# --- Liger: the autograd functions and modules that its patched models run ------------------------


def _casting(case: Case) -> tuple[float, str]:
    after_weight = case.options.get("rounding") == "after_weight"
    return case.options.get("offset", 0.0), "gemma" if after_weight else "llama"


def liger_rms_norm(case: Case) -> Run:
    from liger_kernel.ops import LigerRMSNormFunction

    offset, casting = _casting(case)
    return lambda x, weight: (LigerRMSNormFunction.apply(x, weight, 1e-6, offset, casting, False),)


def liger_add_rms_norm(case: Case) -> Run:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    offset, casting = _casting(case)
    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, 1e-6, offset, casting, False
    )


def liger_layer_norm(case: Case) -> Run:
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias: (LigerLayerNormFunction.apply(x, weight, bias, 1e-5),)


def liger_rope(case: Case) -> Run:
    from liger_kernel.transformers import liger_rotary_pos_emb
    from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb

    _only(case, "sections")
    if sections := case.options.get("sections"):
        return lambda q, k, cos, sin: tuple(liger_multimodal_rotary_pos_emb(q, k, cos, sin, list(sections)))
    return lambda q, k, cos, sin: tuple(liger_rotary_pos_emb(q, k, cos, sin))


def liger_qk_norm_rope(case: Case) -> Run:
    """Its norm of each head as stored, (B, S, H, D), then its rope, over the norm's output."""
    from liger_kernel.ops import LigerRMSNormFunction
    from liger_kernel.transformers import liger_rotary_pos_emb

    _only(case, "offset", "rounding")
    offset, casting = _casting(case)

    def normalised(x: Tensor, weight: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x.transpose(1, 2), weight, 1e-6, offset, casting, False).transpose(1, 2)

    return lambda q, k, q_weight, k_weight, cos, sin: tuple(
        liger_rotary_pos_emb(normalised(q, q_weight), normalised(k, k_weight), cos, sin)
    )


def liger_swiglu(case: Case) -> Run:
    from liger_kernel.ops import LigerSiLUMulFunction

    return lambda gate, up: (LigerSiLUMulFunction.apply(gate, up),)


def liger_geglu(case: Case) -> Run:
    from liger_kernel.ops import LigerGELUMulFunction

    if case.options.get("approximate") != "tanh":
        raise Unsupported("tanh only")
    return lambda gate, up: (LigerGELUMulFunction.apply(gate, up),)


def liger_relu2(case: Case) -> Run:
    from liger_kernel.ops import LigerReLUSquaredFunction

    return lambda x: (LigerReLUSquaredFunction.apply(x),)


def liger_softmax(case: Case) -> Run:
    from liger_kernel.ops import LigerSoftmaxFunction

    return lambda x: (LigerSoftmaxFunction.apply(x),)


def liger_cross_entropy(copy: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        loss = LigerCrossEntropyLoss()
        return lambda input, target: (loss(input.clone() if copy else input, target),)

    return load


def liger_linear_cross_entropy(accum_dtype: torch.dtype | None) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(softcap=case.options.get("softcap"), accum_dtype=accum_dtype)
        return lambda input, linear_weight, target: (loss(linear_weight, input, target),)

    return load


def liger_kl_div(case: Case) -> Run:
    from liger_kernel.transformers import LigerKLDIVLoss

    _only(case, "log_target")
    loss = LigerKLDIVLoss(reduction="batchmean", **case.options)
    return lambda input, target: (loss(input, target),)


def liger_jsd(case: Case) -> Run:
    from liger_kernel.transformers import LigerJSD

    _only(case, "beta", "from_logits")
    loss = LigerJSD(beta=case.options.get("beta", 0.5))
    # It takes log-probabilities only: logits go through torch's log_softmax first, as in its own distillation code.
    convert = F.log_softmax if case.options.get("from_logits") else lambda x, dim: x
    return lambda input, target: (loss(convert(input, -1), convert(target, -1)),)


def liger_tvd(case: Case) -> Run:
    from liger_kernel.transformers import LigerTVDLoss

    _only(case)
    loss = LigerTVDLoss(reduction="batchmean")
    return lambda input, target: (loss(input, target),)


def liger_cute(name: str) -> Callable[[Case], Run]:
    """Liger's functional API, which takes its CuTe kernels where nvidia-cutlass-dsl is installed."""

    def load(case: Case) -> Run:
        import cutlass  # noqa: F401  without it these are the kernels of the row "liger"
        from liger_kernel import functional

        function, (offset, casting) = getattr(functional, name), _casting(case)
        if name in ("rms_norm", "fused_add_rms_norm"):
            return lambda *tensors: _tuple(function(*tensors, eps=1e-6, offset=offset, casting_mode=casting))
        if name == "layer_norm":
            return lambda x, weight, bias: (function(x, weight, bias, 1e-5),)
        if name == "kl_div":
            return lambda input, target: (function(input, target, reduction="batchmean", **case.options),)
        return lambda *tensors: _tuple(function(*tensors))

    return load


# --- Quack ---------------------------------------------------------------------------------------


def quack_rms_norm(case: Case) -> Run:
    import quack

    offset = case.options.get("offset", 0.0)
    return lambda x, weight: (quack.rmsnorm(x, weight, eps=1e-6, weight_offset=offset),)


def quack_add_rms_norm(case: Case) -> Run:
    import quack

    offset = case.options.get("offset", 0.0)
    return lambda x, residual, weight: quack.rmsnorm(
        x, weight, residual=residual, eps=1e-6, prenorm=True, weight_offset=offset
    )


def _quack_turn(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from quack.rotary import apply_rotary_emb

    _only(case, "offset", "rounding")

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, H, S, D]; it wants [B, S, H, D] and [S, D / 2]
        cos, sin = (table[0, :, : table.shape[-1] // 2] for table in (cos, sin))
        return apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2)

    return turn


def quack_rope(case: Case) -> Run:
    turn = _quack_turn(case)
    return lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))


def quack_qk_norm_rope(case: Case) -> Run:
    import quack

    turn, offset = _quack_turn(case), case.options.get("offset", 0.0)

    def normalised(x: Tensor, weight: Tensor) -> Tensor:
        return quack.rmsnorm(x.transpose(1, 2), weight, eps=1e-6, weight_offset=offset).transpose(1, 2)

    return lambda q, k, q_weight, k_weight, cos, sin: (
        turn(normalised(q, q_weight), cos, sin),
        turn(normalised(k, k_weight), cos, sin),
    )


def quack_softmax(case: Case) -> Run:
    import quack

    return lambda x: (quack.softmax(x),)


def quack_cross_entropy(inplace: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        import quack

        return lambda input, target: (quack.cross_entropy(input, target, inplace_backward=inplace),)

    return load


def quack_linear_cross_entropy(case: Case) -> Run:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    _only(case)
    return lambda input, linear_weight, target: (chunked_linear_cross_entropy(input, linear_weight, target),)


# --- cut-cross-entropy, TRL, and the floor -------------------------------------------------------


def cce(exact: bool) -> Callable[[Case], Run]:
    def load(case: Case) -> Run:
        from cut_cross_entropy import linear_cross_entropy

        options = {"impl": "cce", "softcap": case.options.get("softcap"), **({"filter_eps": None} if exact else {})}
        return lambda input, linear_weight, target: (linear_cross_entropy(input, linear_weight, target, **options),)

    return load


def trl_linear_cross_entropy(case: Case) -> Run:
    """The chunked log-probabilities of its trainers; as there, only the valid positions are scored."""
    from trl.trainer import utils

    function, chunk_size = utils._ChunkedLogProbFunction, getattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 32768)
    _only(case, "softcap")
    softcap = case.options.get("softcap")

    def run(input: Tensor, linear_weight: Tensor, target: Tensor) -> tuple[Tensor]:
        valid = target != -100
        rest = (1.0, chunk_size, softcap, 1.0, ())  # temperature; logit scale, outputs beside the log-probabilities
        log_probs = function.apply(input[valid], linear_weight, None, target[valid], *rest)[0]
        return (-log_probs.sum() / valid.sum().clamp(min=1),)

    return run


def products(case: Case) -> Run:
    """Logits and the gradients asked for as bare products of the valid rows, a chunk at a time, and no softmax."""
    valid = round(case.shape[0] * (1 - case.ignored))

    def run(input: Tensor, linear_weight: Tensor, target: Tensor, chunk: int = 8192) -> tuple[Tensor, ...]:
        with torch.no_grad():
            dinput = torch.empty_like(input) if input.requires_grad else None
            dweight = None
            for start in range(0, valid, chunk):
                rows = slice(start, min(start + chunk, valid))
                logits = F.linear(input[rows], linear_weight)
                if dinput is not None:
                    torch.mm(logits, linear_weight, out=dinput[rows])
                if linear_weight.requires_grad and dweight is None:
                    dweight = logits.t() @ input[rows]
                elif linear_weight.requires_grad:
                    dweight.addmm_(logits.t(), input[rows])
            return tuple(gradient for gradient in (dinput, dweight) if gradient is not None)

    return run

"""Hyper-connections, compositions of torch without kernels. Source: Xie et al., arXiv:2512.24880.

A layer F reads a weighted sum of S residual streams x [..., S, H], and its result is added to mixed streams:
    u = sum_i pre_i x_i,    y_o = sum_i res_oi x_i + post_o F(u),
where `pre` [..., S], `post` [..., S] and `res` [..., S, S] are functions of x, and `res` is doubly stochastic. They are
computed in fp32. M = S^2 + 2 S.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tigon.integrations.liger.signatures import serve


def liger_mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return pre, post and res in fp32, for projections phi [S H, M] of the norm of all streams and a bias b [M].
    Raises an AssertionError for x in fp32 unless `allow_fp32` is True, as Liger does."""
    if x.dtype not in (torch.float16, torch.bfloat16) and not (allow_fp32 and x.dtype == torch.float32):
        raise AssertionError(f"liger_mhc_coeffs: x must be fp16 or bf16 (fp32 with allow_fp32=True), got {x.dtype}")
    streams = x.shape[-2]
    with torch.autocast(x.device.type, enabled=False):
        rows = x.flatten(-2).float()
        mix = (rows @ phi.float()) * torch.rsqrt(rows.square().mean(-1, keepdim=True) + rms_eps)
        sizes = streams, streams, streams * streams
        alphas = zip((alpha_pre, alpha_post, alpha_res), sizes, strict=True)
        factors = [alpha.reshape(1).expand(size) for alpha, size in alphas]
        pre, post, res = (mix * torch.cat(factors).float() + b.float()).split(sizes, -1)
        res = res.unflatten(-1, (streams, streams)).softmax(-1) + sinkhorn_eps
        # Sinkhorn and Knopp scale the columns and the rows in turn.
        for iteration in range(tmax):
            if iteration:
                res = res / (res.sum(-1, keepdim=True) + sinkhorn_eps)
            res = res / (res.sum(-2, keepdim=True) + sinkhorn_eps)
        return pre.sigmoid() + pre_eps, post.sigmoid() * post_mult, res


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """Return the weighted sum [..., H] of the streams, in the dtype of x."""
    return (x.float() * h_pre.float()[..., None]).sum(-2).to(x.dtype)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Return the mixed streams plus the layer's result f_out [..., H], in the dtype of x."""
    with torch.autocast(x.device.type, enabled=False):
        mixed = h_res.float() @ x.float()
        return (mixed + h_post.float()[..., None] * f_out.float()[..., None, :]).to(x.dtype)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Any:
    """Return the streams after a layer, and the layer's input on request."""
    y = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (y, liger_mhc_pre(x, h_pre)) if return_x_in else y


def _forward(
    x: Tensor, layer: Callable[[Tensor], Tensor], phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor,
    alpha_res: Tensor, *, return_coeffs: bool, **options: Any,
) -> Any:  # fmt: skip
    """Return the streams after the layer, and (pre, post, res) on request. The layer's input has its weights' dtype."""
    pre, post, res = liger_mhc_coeffs(x, phi, b, alpha_pre, alpha_post, alpha_res, **options)
    u = liger_mhc_pre(x, pre)
    parameters = layer.parameters() if isinstance(layer, nn.Module) else iter(())
    y = liger_mhc_post_res(x, layer(u.to(next(parameters, u).dtype)), post, res)
    return (y, (pre, post, res)) if return_coeffs else y


liger_mhc_forward = serve(
    "liger_mhc_forward", _forward,
    "x, layer, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, tmax=20, rms_eps=1e-6, pre_eps=0.0, "
    "sinkhorn_eps=1e-6, post_mult=2.0, return_coeffs=False",
)  # fmt: skip


class LigerMHC(nn.Module):
    """A layer with hyper-connections, for streams [..., S, H]."""

    def __init__(
        self, layer: nn.Module, *, hc: int, c: int, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer, self.hc, self.c = layer, hc, c
        self.options = {
            "tmax": tmax, "rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps, "post_mult": post_mult,
            "allow_fp32": allow_fp32,
        }  # fmt: skip
        weight, count = next(layer.parameters(), None), hc * hc + 2 * hc
        with torch.device("cpu" if weight is None else weight.device):
            self.phi = nn.Parameter(torch.randn(hc * c, count, dtype=phi_dtype) * 0.02)
            self.b = nn.Parameter(torch.zeros(count, dtype=torch.float32))
            self.alpha_pre, self.alpha_post, self.alpha_res = (
                nn.Parameter(torch.ones((), dtype=torch.float32)) for _ in range(3)
            )

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-2:]) != (self.hc, self.c):
            raise ValueError(f"LigerMHC: x must have shape [..., {self.hc}, {self.c}], got {tuple(x.shape)}")
        alphas = self.alpha_pre, self.alpha_post, self.alpha_res
        y: Tensor = liger_mhc_forward(x, self.layer, self.phi, self.b, *alphas, **self.options)
        return y

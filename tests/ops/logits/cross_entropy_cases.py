"""The inputs and options of the tests of `cross_entropy`."""

import torch

from op_cases import DEVICE

# Two classes, widths that fill no block, and one wider than a block of the kernel.
SHAPES = [(20, 2), (23, 7), (4, 5, 100), (6, 5000)]

OPTIONS = {
    "plain": {}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"},
    "label smoothing": {"label_smoothing": 0.1}, "softcap": {"softcap": 3.0}, "logit scale": {"logit_scale": 0.25},
    "z-loss": {"z_loss": 0.05}, "token scaling": {"token_scaling": True}, "items": {"num_items": 17},
    "all": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01},
    "all, none": {"label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01, "reduction": "none"},
    "all, token scaling": {
        "label_smoothing": 0.2, "softcap": 5.0, "logit_scale": 1.5, "z_loss": 0.01, "token_scaling": True,
    },
}  # fmt: skip


def logits_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 4).to(DEVICE, dtype).requires_grad_()


def target_of(*shape: int, v: int, ignored: int = 3) -> torch.Tensor:
    target = torch.randint(v, shape, generator=torch.Generator().manual_seed(v))
    target.view(-1)[1::ignored] = -100
    return target.to(DEVICE)


def class_weights(v: int) -> torch.Tensor:
    return torch.rand(v, generator=torch.Generator().manual_seed(v)).to(DEVICE) + 0.1

"""The arguments that kernels over chunks share: rows of the inputs, sizes, and the chunks of packed samples."""

from typing import Any

import torch
from torch import Tensor

from tigon.ops.mixers.chunks import chunks_of, samples_of
from tigon.ops.mixers.delta_rule_kernels import chunk_list_kernel
from tigon.runtime.launch import in_order, launch
from tigon.runtime.rows import dense_rows

# The offsets of 64 rows take 32 bits. Rows that are further apart are copied.
MAX_STRIDE = 2**24


class ChunkLaunch:
    """The chunks of tensors [B, T, ...]. With `bounds`, a kernel lists the chunks of packed samples on the device."""

    def __init__(self, like: Tensor, bounds: Tensor | None, **tensors: Tensor) -> None:
        self.like, self.tokens = like, like.shape[1]
        self.samples, self.chunks = samples_of(like, bounds), chunks_of(like, bounds)
        self.total_chunks = self.chunks * (like.shape[0] if bounds is None else 1)
        self.rows: dict[str, Tensor] = {}
        self.strides: dict[str, int] = {}
        for name, x in tensors.items():
            self.add_rows(name, x)
        self.bounds = None if bounds is None else bounds.contiguous()
        self.list: Any = None
        self.starts: Any = None
        if bounds is not None:
            self.list = like.new_empty((self.chunks, 3), dtype=torch.int32)
            self.starts = like.new_empty((self.samples,), dtype=torch.int32)
            launch(
                chunk_list_kernel, self.chunks,
                *in_order(chunk_list_kernel)(
                    bounds_ptr=self.bounds, chunks_ptr=self.list, starts_ptr=self.starts, N=self.samples, T=self.tokens
                ),
                BLOCK_N=128, num_warps=1,
            )  # fmt: skip

    def add_rows(self, name: str, x: Tensor) -> None:
        """Store the rows of x [B, T, ...], whose other dimensions are dense, and their stride."""
        rows, stride = dense_rows(x.flatten(2) if x.dim() > 3 else x)
        if stride >= MAX_STRIDE:
            rows, stride = dense_rows(rows.contiguous())
        self.rows[f"{name}_ptr"], self.strides[f"stride_{name}"] = rows, stride

    def arguments(self, *names: str) -> dict[str, Any]:
        """Return the rows of these tensors, their strides and the sizes, by the names of the kernels' parameters."""
        rows = {f"{name}_ptr": self.rows[f"{name}_ptr"] for name in names}
        strides = {f"stride_{name}": self.strides[f"stride_{name}"] for name in names}
        return rows | strides | {"T": self.tokens, "chunks": self.chunks}

"""Launches of the kernels of the delta rules: the pairs of all chunks, the scans, and the gradients."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.mixers.chunk_launch import ChunkLaunch
from tigon.ops.mixers.chunks import CHUNK
from tigon.ops.mixers.delta_rule_chunks import (
    DeltaGradients,
    DeltaInputs,
    DeltaOptions,
    count_samples,
)
from tigon.ops.mixers.delta_rule_config import DeltaConfig
from tigon.ops.mixers.delta_rule_couplings import couplings_kernel
from tigon.ops.mixers.delta_rule_gradient_kernels import (
    backward_scan_kernel,
    key_gradients_kernel,
    pair_gradients_kernel,
    query_gradients_kernel,
)
from tigon.ops.mixers.delta_rule_kernels import VECTORS, chunk_pairs_kernel, forward_scan_kernel
from tigon.ops.mixers.kda_gradient_kernels import (
    kda_level_gradients_kernel,
    kda_norm_gradients_kernel,
    kda_pair_gradients_kernel,
    kda_state_gradients_kernel,
)
from tigon.ops.mixers.kda_kernels import kda_pairs_kernel, kda_rows_kernel
from tigon.runtime.device import cdiv, next_power_of_2
from tigon.runtime.launch import in_order, launch

# `kda_level_gradients_kernel` computes these features at a time. Its registers do not hold more.
LEVEL_BLOCK = 16


class _Launch(ChunkLaunch):
    """The launches for one call."""

    def __init__(self, inputs: DeltaInputs, options: DeltaOptions, config: DeltaConfig) -> None:
        q, _, v, *_, bounds = inputs
        super().__init__(q, bounds, **{name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta")})
        self.config, self.options = config, options
        (self.key_heads, self.key_size), (self.heads, self.value_size) = q.shape[2:], v.shape[2:]
        self.groups, self.has_feature_decay = self.heads // self.key_heads, inputs.g.dim() == 4
        self.block_k = max(16, next_power_of_2(self.key_size))

    @property
    def inverse_precision(self) -> str:
        return "ieee" if self.like.dtype == torch.float16 else self.config.precision

    def states(self, dtype: torch.dtype) -> Tensor:
        """Allocate one state of each sequence and head."""
        return self.like.new_empty((self.samples, self.heads, self.key_size, self.value_size), dtype=dtype)

    def chunk_states(self) -> Tensor:
        """Allocate one state of each chunk and head, in the dtype of q."""
        return self.like.new_empty((self.total_chunks, self.heads, self.key_size, self.value_size))

    def scan_constants(self, block: int) -> dict[str, Any]:
        """Return the constants of a scan that computes blocks of these columns."""
        return {
            "HEADS": self.heads, "GROUPS": 1 if self.has_feature_decay else self.groups,
            "KEY_SIZE": self.key_size, "VALUE_SIZE": self.value_size,
            "BLOCK_K": self.block_k, "BLOCK_V": block,
            "STAGES": self.config.scan_stages, "num_warps": self.config.scan_warps,
        }  # fmt: skip

    @property
    def backward_blocks(self) -> int:
        """The number of blocks of columns of a state in backward."""
        return cdiv(self.value_size, self.config.backward_block_v)

    def compute_pairs(self) -> dict[str, Any]:
        """Return Z, the scores and the vectors of all chunks, and the rows that the scans multiply."""
        places = self.total_chunks, self.heads
        pairs = {
            "couplings_ptr": self.like.new_empty((*places, CHUNK, CHUNK)),
            "scores_ptr": self.like.new_empty((*places, CHUNK, CHUNK)),
            "vectors_ptr": self.like.new_empty((*places, VECTORS.value, CHUNK), dtype=torch.float32),
        }
        keys, others = self.compute_feature_pairs(pairs) if self.has_feature_decay else self.compute_scores(pairs)
        launch(
            couplings_kernel, self.total_chunks * self.heads,
            *in_order(couplings_kernel)(
                **self.arguments("k", "g", "beta"), keys_ptr=keys, couplings_ptr=pairs["couplings_ptr"],
                chunks_ptr=self.list, groups=self.groups,
            ),
            KEY_HEADS=self.key_heads, KEY_SIZE=self.key_size, BLOCK_K=self.block_k, NORMALISES=self.options.normalises,
            PRECISION=self.inverse_precision, num_warps=self.config.couplings_warps,
        )  # fmt: skip
        return pairs | others

    def compute_scores(self, pairs: dict[str, Tensor]) -> tuple[None, dict[str, Any]]:
        """Compute the scores and the vectors of the gated delta rule. `couplings_kernel` computes K itself."""
        launch(
            chunk_pairs_kernel, self.total_chunks * self.key_heads,
            *in_order(chunk_pairs_kernel)(
                **self.arguments("q", "k", "g", "beta"), scores_ptr=pairs["scores_ptr"],
                vectors_ptr=pairs["vectors_ptr"], chunks_ptr=self.list, groups=self.groups, scale=self.options.scale,
            ),
            KEY_HEADS=self.key_heads, KEY_SIZE=self.key_size, BLOCK_K=self.block_k, NORMALISES=self.options.normalises,
            num_warps=self.config.pairs_warps,
        )  # fmt: skip
        return None, {"totals_ptr": None, "writes_ptr": None}

    @property
    def feature_constants(self) -> dict[str, Any]:
        """The constants of the kernels of Kimi Delta Attention."""
        return {
            "KEY_SIZE": self.key_size, "BLOCK_K": self.config.feature_block, "num_warps": self.config.feature_warps
        }  # fmt: skip

    @property
    def feature_levels(self) -> tuple[dict[str, int], ...]:
        """The constants of the two launches of `kda_pairs_kernel` and of `kda_level_gradients_kernel`."""
        near = {"TOKENS": 16, "FIRST_LEVEL": 0, "END_LEVEL": 4, "num_warps": 1}
        return {"TOKENS": CHUNK, "FIRST_LEVEL": 4, "END_LEVEL": 6}, near

    def compute_feature_pairs(self, pairs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        """Compute the scores of Kimi Delta Attention. Return K, and G and the rows with its decays."""
        rows = lambda: self.like.new_empty((*self.like.shape[:2], self.heads, self.key_size))
        queries, reads, writes = rows(), rows(), rows()
        places = self.total_chunks, self.heads, CHUNK
        totals, keys = (self.like.new_empty((*places, n), dtype=torch.float32) for n in (self.key_size, CHUNK))
        shared = {"vectors_ptr": pairs["vectors_ptr"], "totals_ptr": totals, "chunks_ptr": self.list}
        shared |= {"groups": self.groups, "scale": self.options.scale}
        launch(
            kda_rows_kernel, self.total_chunks * self.heads,
            *in_order(kda_rows_kernel)(
                **self.arguments("q", "k", "g", "beta"), **shared, queries_ptr=queries, reads_ptr=reads,
                writes_ptr=writes,
            ),
            HEADS=self.heads, NORMALISES=self.options.normalises, **self.feature_constants,
        )  # fmt: skip
        for levels in self.feature_levels:
            launch(
                kda_pairs_kernel, self.total_chunks * self.heads * (CHUNK // levels["TOKENS"]),
                *in_order(kda_pairs_kernel)(
                    **self.arguments("q", "k"), **shared, keys_ptr=keys, scores_ptr=pairs["scores_ptr"]
                ),
                HEADS=self.heads, **self.feature_constants | levels,
            )  # fmt: skip
        stride = self.heads * self.key_size
        scanned = {"q_ptr": queries, "stride_q": stride, "k_ptr": reads, "stride_k": stride}
        return keys, scanned | {"totals_ptr": totals, "writes_ptr": writes}

    def compute_feature_gradients(self, results: DeltaGradients, pairs: dict[str, Any], **tensors: Tensor) -> None:
        """Write dq, dk, dg and dbeta of Kimi Delta Attention."""
        shape = *self.like.shape[:2], self.key_heads, self.key_size
        dq_rows, dk_rows = (self.like.new_empty(shape, dtype=torch.float32) for _ in range(2))
        dg_rows = results.dg
        if dg_rows is None or dg_rows.dtype != torch.float32:
            dg_rows = self.like.new_empty((*shape[:2], self.heads, self.key_size), dtype=torch.float32)
        parts = tensors.pop("parts_ptr")
        shared = {"vectors_ptr": pairs["vectors_ptr"], "chunks_ptr": self.list}
        products = {"couplings_ptr": pairs["couplings_ptr"], "scores_ptr": pairs["scores_ptr"]}
        features = self.feature_constants
        launch(
            kda_pair_gradients_kernel, self.total_chunks * self.heads,
            *in_order(kda_pair_gradients_kernel)(
                **self.arguments("do"), **shared, **products, errors_ptr=tensors["errors_ptr"],
                dx_ptr=tensors["dx_ptr"], parts_ptr=parts, dbeta_ptr=results.dbeta, width=self.value_size,
            ),
            HEADS=self.heads, VALUE_SIZE=self.value_size, BLOCK_V=self.config.gradient_block_v,
            BLOCKS=self.backward_blocks, STAGES=self.config.gradient_stages, num_warps=self.config.gradient_warps,
        )  # fmt: skip
        key_places = self.total_chunks * self.key_heads
        gradients = {"dq_rows_ptr": dq_rows, "dk_rows_ptr": dk_rows, "dg_rows_ptr": dg_rows}
        launch(
            kda_state_gradients_kernel, key_places * cdiv(self.key_size, features["BLOCK_K"]),
            *in_order(kda_state_gradients_kernel)(
                **self.arguments("q", "k", "do"), **shared, **tensors, **gradients, totals_ptr=pairs["totals_ptr"],
                groups=self.groups, width=self.value_size, scale=self.options.scale,
            ),
            KEY_HEADS=self.key_heads, VALUE_SIZE=self.value_size, BLOCK_V=self.config.gradient_block_v,
            PRECISION=self.config.precision, **features,
        )  # fmt: skip
        for levels, dg in zip(self.feature_levels, (None, results.dg), strict=True):
            launch(
                kda_level_gradients_kernel,
                key_places * cdiv(self.key_size, LEVEL_BLOCK) * (CHUNK // levels["TOKENS"]),
                *in_order(kda_level_gradients_kernel)(
                    **self.arguments("q", "k", "g"), **shared, **products, **gradients, dg_ptr=dg,
                    totals_ptr=pairs["totals_ptr"], groups=self.groups, scale=self.options.scale,
                ),
                KEY_HEADS=self.key_heads, PRECISION=self.config.precision,
                **features | levels | {"BLOCK_K": LEVEL_BLOCK},
            )  # fmt: skip
        launch(
            kda_norm_gradients_kernel, key_places,
            *in_order(kda_norm_gradients_kernel)(
                **self.arguments("q", "k"), **shared, groups=self.groups, scale=self.options.scale,
                dq_rows_ptr=dq_rows, dk_rows_ptr=dk_rows, dq_ptr=results.dq, dk_ptr=results.dk,
            ),
            KEY_HEADS=self.key_heads, NORMALISES=self.options.normalises, **(features | {"BLOCK_K": self.block_k}),
        )  # fmt: skip

    def compute_gradients(self, results: DeltaGradients, pairs: dict[str, Any], **tensors: Tensor) -> None:
        """Write dq, dk, dg and dbeta of the gated delta rule."""
        config = self.config
        shared = {"vectors_ptr": pairs["vectors_ptr"], "chunks_ptr": self.list}
        shared |= {"groups": self.groups, "width": self.value_size}
        constants = {
            "KEY_HEADS": self.key_heads, "KEY_SIZE": self.key_size, "VALUE_SIZE": self.value_size,
            "BLOCK_K": self.block_k, "BLOCK_V": config.gradient_block_v, "STAGES": config.gradient_stages,
            "num_warps": config.gradient_warps,
        }  # fmt: skip
        systems = torch.empty_like(pairs["couplings_ptr"])
        launch(
            pair_gradients_kernel, self.total_chunks * self.heads,
            *in_order(pair_gradients_kernel)(
                **self.arguments("k", "do"), **shared, errors_ptr=tensors["errors_ptr"], dx_ptr=tensors["dx_ptr"],
                couplings_ptr=pairs["couplings_ptr"], scores_ptr=pairs["scores_ptr"], systems_ptr=systems,
                scale=self.options.scale,
            ),
            **constants,
        )  # fmt: skip
        constants["NORMALISES"] = self.options.normalises
        launch(
            query_gradients_kernel, self.total_chunks * self.key_heads,
            *in_order(query_gradients_kernel)(
                **self.arguments("q", "k", "do"), **shared, scores_ptr=pairs["scores_ptr"],
                states_ptr=tensors["states_ptr"], scale=self.options.scale, dq_ptr=results.dq,
            ),
            **constants,
        )  # fmt: skip
        launch(
            key_gradients_kernel, self.total_chunks * self.key_heads,
            *in_order(key_gradients_kernel)(
                **self.arguments("q", "k"), **shared, **tensors, couplings_ptr=pairs["couplings_ptr"],
                systems_ptr=systems, dk_ptr=results.dk, dg_ptr=results.dg, dbeta_ptr=results.dbeta,
            ),
            BLOCKS=self.backward_blocks, **constants,
        )  # fmt: skip

    def scan_forward(self, pairs: dict[str, Any], initial_state: Tensor | None, **outputs: Tensor | None) -> None:
        """Write o, the last states, the states before all chunks and E, each if there is a tensor for it."""
        initial = None if initial_state is None else initial_state.float().contiguous()
        block = self.config.scan_block_v if "o" in outputs else self.config.backward_block_v
        launch(
            forward_scan_kernel, self.samples * self.heads * cdiv(self.value_size, block),
            *in_order(forward_scan_kernel)(
                **(self.arguments("q", "k", "v") | pairs), initial_ptr=initial, bounds_ptr=self.bounds,
                starts_ptr=self.starts,
                **{f"{name}_ptr": outputs.get(name) for name in ("o", "last", "states", "errors")},
            ),
            **self.scan_constants(block),
        )  # fmt: skip


def empty_forward(inputs: DeltaInputs, options: DeltaOptions) -> tuple[Tensor, Any]:
    """Allocate what `delta_rule_forward` returns."""
    q, v = inputs.q, inputs.v
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    shape = count_samples(inputs), v.shape[2], q.shape[3], v.shape[3]
    return o, q.new_empty(shape, dtype=torch.float32) if options.returns_state else None


def launch_forward(inputs: DeltaInputs, options: DeltaOptions, config: DeltaConfig) -> tuple[Tensor, Tensor]:
    """Return o and, if requested, the last states."""
    o, last_state = empty_forward(inputs, options)
    run = _Launch(inputs, options, config)
    run.scan_forward(run.compute_pairs(), inputs.initial_state, o=o, last=last_state)
    return o, last_state


class NeededDeltaGradients(NamedTuple):
    """True for each kind of gradients that the backward computes. dv costs no kernel of its own."""

    # dq, dk, dg or dbeta.
    others: bool
    initial_state: bool


def empty_backward(inputs: DeltaInputs, needs: NeededDeltaGradients) -> DeltaGradients:
    """Allocate dv and the gradients that are needed. All other fields are None."""
    empty = lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
    q, k, v, g, beta, initial_state, _ = inputs
    dq, dk, dg, dbeta = (empty(x) if needs.others else None for x in (q, k, g, beta))
    dinitial = empty(initial_state) if needs.initial_state and initial_state is not None else None
    return DeltaGradients(dq, dk, empty(v), dg, dbeta, dinitial)


def launch_backward(
    do: Tensor, dlast_state: Tensor | None, inputs: DeltaInputs, options: DeltaOptions, needs: NeededDeltaGradients,
    config: DeltaConfig,
) -> DeltaGradients:  # fmt: skip
    """Return the gradients of the inputs."""
    results = empty_backward(inputs, needs)
    run = _Launch(inputs, options, config)
    run.add_rows("do", do)
    pairs, states, dstates = run.compute_pairs(), run.chunk_states(), run.chunk_states()
    errors, dx = (torch.empty_like(inputs.v, memory_format=torch.contiguous_format) for _ in range(2))
    run.scan_forward(pairs, inputs.initial_state, states=states, errors=errors)
    initial = results.dinitial_state
    parts = run.like.new_empty((run.total_chunks, run.heads, run.backward_blocks, 2, CHUNK), dtype=torch.float32)
    dinitial = initial if initial is None or initial.dtype == torch.float32 else run.states(torch.float32)
    launch(
        backward_scan_kernel, run.samples * run.heads * run.backward_blocks,
        *in_order(backward_scan_kernel)(
            **(run.arguments("q", "k", "do") | pairs), bounds_ptr=run.bounds, starts_ptr=run.starts,
            dlast_ptr=None if dlast_state is None else dlast_state.float().contiguous(),
            errors_ptr=errors, dx_ptr=dx, dv_ptr=results.dv, dstates_ptr=dstates, dinitial_ptr=dinitial,
            parts_ptr=parts,
        ),
        **run.scan_constants(run.config.backward_block_v),
    )  # fmt: skip
    if initial is not None and dinitial is not None and dinitial is not initial:
        initial.copy_(dinitial)
    tensors = {
        "states_ptr": states, "dstates_ptr": dstates, "errors_ptr": errors, "dx_ptr": dx,
        "parts_ptr": parts,
    }  # fmt: skip
    if needs.others and run.has_feature_decay:
        # Only the scans read these rows, which take as much memory as v.
        for name in ("q_ptr", "k_ptr", "writes_ptr"):
            del pairs[name]
        run.compute_feature_gradients(results, pairs, **tensors)
    elif needs.others:
        run.compute_gradients(results, pairs, **tensors)
    return results

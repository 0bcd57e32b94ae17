"""The launches of the kernels of the state space dual, as operators, and their self-check."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops.mixers.chunk_launch import ChunkLaunch
from tigon.ops.mixers.chunks import CHUNK, samples_of
from tigon.ops.mixers.kernel_check import CHECK_TOKENS, compare_results, make_bounds, make_draw, move, passes_check
from tigon.ops.mixers.ssd_chunks import SSDGradients, SSDInputs, SSDOptions, chunked_backward, chunked_forward
from tigon.ops.mixers.ssd_config import SSDConfig, choose_config, split_count
from tigon.ops.mixers.ssd_gradient_kernels import (
    PARTS,
    ssd_group_gradients_kernel,
    ssd_step_gradients_kernel,
    ssd_value_gradients_kernel,
)
from tigon.ops.mixers.ssd_kernels import (
    VECTORS,
    group_products_kernel,
    ssd_outputs_kernel,
    ssd_scan_kernel,
    step_vectors_kernel,
)
from tigon.runtime.device import cdiv, next_power_of_2
from tigon.runtime.launch import in_order, launch, launcher

# A program of the kernels of steps computes this many heads.
HEAD_BLOCK = 16
# A program of `ssd_value_gradients_kernel` computes at most this many features of a head. Its registers do not hold
# more.
VALUE_BLOCK = 64


class _Launch(ChunkLaunch):
    """The launches for one call."""

    def __init__(self, inputs: SSDInputs, options: SSDOptions, config: SSDConfig) -> None:
        x, dt, A, B, C, D, dt_bias, _, bounds = inputs
        super().__init__(x, bounds, x=x, dt=dt, b=B, c=C)
        self.config, self.options = config, options
        self.heads, self.size = x.shape[2:]
        self.groups, self.state_size = B.shape[2:]
        self.block_n = max(16, next_power_of_2(self.state_size))
        self.rates, self.bias = A.contiguous(), None if dt_bias is None else dt_bias.contiguous()
        self.weights = None if D is None else D.float().view(self.heads, -1).expand(-1, self.size).contiguous()
        self.vectors = x.new_empty((self.total_chunks, self.heads, VECTORS.value, CHUNK), dtype=torch.float32)
        self.limits = {"smallest": options.smallest_step, "largest": options.largest_step}
        launch(
            step_vectors_kernel, self.total_chunks * cdiv(self.heads, HEAD_BLOCK),
            *in_order(step_vectors_kernel)(
                **self.arguments("dt"), rates_ptr=self.rates, bias_ptr=self.bias, chunks_ptr=self.list,
                vectors_ptr=self.vectors, **self.limits,
            ),
            HEADS=self.heads, BLOCK_H=HEAD_BLOCK, APPLIES_SOFTPLUS=options.applies_softplus, num_warps=4,
        )  # fmt: skip

        self.products = x.new_empty((self.total_chunks, self.groups, CHUNK, CHUNK), dtype=torch.float32)
        launch(
            group_products_kernel, self.total_chunks * self.groups,
            *in_order(group_products_kernel)(
                **self.arguments("b", "c"), chunks_ptr=self.list, products_ptr=self.products,
                state_width=self.state_size,
            ),
            K=self.groups, STATE_SIZE=self.state_size, BLOCK_N=min(64, self.block_n), STAGES=1, num_warps=4,
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that all kernels of chunks take."""
        return {
            "HEADS": self.heads, "GROUPS": self.heads // self.groups, "SIZE": self.size, "STATE_SIZE": self.state_size
        }  # fmt: skip

    @property
    def blocks(self) -> dict[str, int]:
        """The features of a head, and the features of a state that the kernels of one chunk compute at a time."""
        return {"BLOCK_P": max(16, next_power_of_2(self.size)), "BLOCK_N": self.config.gradient_block_n}

    def scan(self, x: str, b: str, initial: Tensor | None, last: Tensor | None) -> Tensor:
        """Write the last states. Return the states before all chunks, or their gradients if x is "dy" and b is "c"."""
        arguments, config = self.arguments(x, b), self.config
        names = {f"{x}_ptr": "x_ptr", f"stride_{x}": "stride_x", f"{b}_ptr": "b_ptr", f"stride_{b}": "stride_b"}
        arguments = {names.get(name, name): value for name, value in arguments.items()}
        states = self.like.new_empty((self.total_chunks, self.heads, self.size, self.state_size))
        launch(
            ssd_scan_kernel, self.samples * self.heads * cdiv(self.size, config.scan_block_p),
            *in_order(ssd_scan_kernel)(
                **arguments, vectors_ptr=self.vectors,
                initial_ptr=None if initial is None else initial.float().contiguous(),
                bounds_ptr=self.bounds, starts_ptr=self.starts, last_ptr=last, states_ptr=states,
            ),
            **self.sizes, BLOCK_P=config.scan_block_p, BLOCK_N=self.block_n, IS_GRADIENT=x == "dy",
            STAGES=config.scan_stages, num_warps=config.scan_warps,
        )  # fmt: skip
        return states

    def outputs(self, states: Tensor, y: Tensor) -> None:
        """Write y, given the states before all chunks."""
        launch(
            ssd_outputs_kernel, self.total_chunks * self.heads,
            *in_order(ssd_outputs_kernel)(
                **self.arguments("x", "c"), vectors_ptr=self.vectors, products_ptr=self.products, states_ptr=states,
                weights_ptr=self.weights, chunks_ptr=self.list, y_ptr=y, state_width=self.state_size,
            ),
            **self.sizes, **self.blocks, STAGES=1, num_warps=self.config.gradient_warps,
        )  # fmt: skip

    def group_gradients(self, states: Tensor, dstates: Tensor, dB: Any, dC: Any) -> Tensor:
        """Write dB and dC. Return the parts of dg that `ssd_group_gradients_kernel` computes."""
        block, splits = self.config.gradient_block_n, split_count(self.heads // self.groups)
        blocks, rows = cdiv(self.state_size, block), dB.shape[0] * dB.shape[1]
        parts = self.like.new_empty((self.total_chunks, self.heads, blocks, PARTS.value, CHUNK), dtype=torch.float32)
        # The sum over several parts of a group is rounded once.
        sums = [dB, dC]
        if splits > 1:
            sums = [self.like.new_empty((splits, *dB.shape), dtype=torch.float32) for _ in range(2)]
        launch(
            ssd_group_gradients_kernel, self.total_chunks * self.groups * splits * blocks,
            *in_order(ssd_group_gradients_kernel)(
                **self.arguments("x", "b", "c", "dy"), vectors_ptr=self.vectors, states_ptr=states, dstates_ptr=dstates,
                chunks_ptr=self.list, parts_ptr=parts, db_ptr=sums[0], dc_ptr=sums[1], rows=rows,
            ),
            **self.sizes, **self.blocks, SPLITS=splits, STAGES=1, num_warps=self.config.gradient_warps,
        )  # fmt: skip
        if splits > 1:
            for total, part in zip((dB, dC), sums, strict=True):
                total.copy_(part.sum(0))
        return parts

    def head_gradients(self, dstates: Tensor, parts: Tensor, dx: Any, ddt: Any) -> tuple[Tensor, Tensor | None]:
        """Write dx and ddt. Return dA and ddt_bias as [2, H], and dD as [H, P] if there is a D."""
        blocks = self.blocks | {"BLOCK_P": min(VALUE_BLOCK, self.blocks["BLOCK_P"])}
        count = cdiv(self.size, blocks["BLOCK_P"])
        new = lambda *shape: self.like.new_empty((self.total_chunks, *shape), dtype=torch.float32)
        value_parts, drates = new(self.heads, count, 2, CHUNK), new(2, self.heads)
        dweights = None if self.weights is None else new(self.heads, self.size)
        launch(
            ssd_value_gradients_kernel, self.total_chunks * self.heads * count,
            *in_order(ssd_value_gradients_kernel)(
                **self.arguments("x", "b", "dy"), products_ptr=self.products, weights_ptr=self.weights,
                vectors_ptr=self.vectors, dstates_ptr=dstates, chunks_ptr=self.list, dx_ptr=dx,
                value_parts_ptr=value_parts, dweights_ptr=dweights, state_width=self.state_size,
            ),
            **self.sizes, **blocks, PRECISION=self.config.precision, STAGES=1, num_warps=self.config.gradient_warps,
        )  # fmt: skip
        launch(
            ssd_step_gradients_kernel, self.total_chunks * cdiv(self.heads, HEAD_BLOCK),
            *in_order(ssd_step_gradients_kernel)(
                **self.arguments("dt"), **self.limits, rates_ptr=self.rates, bias_ptr=self.bias,
                vectors_ptr=self.vectors, chunks_ptr=self.list, parts_ptr=parts, value_parts_ptr=value_parts,
                ddt_ptr=ddt, drates_ptr=drates,
            ),
            HEADS=self.heads, BLOCK_H=HEAD_BLOCK, N_BLOCKS=parts.shape[2], P_BLOCKS=count,
            APPLIES_SOFTPLUS=self.options.applies_softplus, num_warps=4,
        )  # fmt: skip
        return drates.sum(0), None if dweights is None else dweights.sum(0)


# --- operators -----------------------------------------------------------------------------------


def _empty_forward(like: Tensor, inputs: SSDInputs, options: SSDOptions) -> tuple[Tensor, Any]:
    x = inputs.x
    shape = samples_of(x, inputs.cu_seqlens), *x.shape[2:], inputs.B.shape[3]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(shape, dtype=torch.float32) if options.returns_states else None


@launcher(fake=_empty_forward)
def ssd_forward(like: Tensor, inputs: SSDInputs, options: SSDOptions) -> tuple[Tensor, Tensor]:
    """Return y [B, T, H, P] and, if requested, the last states in fp32. `like` is any tensor on the device."""
    config = choose_config(inputs)
    if not _is_checked(inputs, options, options.returns_states, config):
        y, last_states = chunked_forward(inputs, options)
        return y, last_states
    return _launch_forward(inputs, options, config)


def _launch_forward(inputs: SSDInputs, options: SSDOptions, config: SSDConfig) -> tuple[Tensor, Tensor]:
    y, last_states = _empty_forward(inputs.x, inputs, options)
    run = _Launch(inputs, options, config)
    run.outputs(run.scan("x", "b", inputs.initial_states, last_states), y)
    return y, last_states


def _empty_backward(
    dy: Tensor, dlast_states: Tensor | None, inputs: SSDInputs, options: SSDOptions
) -> SSDGradients:  # fmt: skip
    empty = lambda x: None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    return SSDGradients._make(map(empty, inputs[:-1]))


@launcher(fake=_empty_backward)
def ssd_backward(
    dy: Tensor, dlast_states: Tensor | None, inputs: SSDInputs, options: SSDOptions
) -> SSDGradients:  # fmt: skip
    """Return all gradients, each in the dtype of its tensor."""
    config = choose_config(inputs)
    if not _is_checked(inputs, options, dlast_states is not None, config):
        return chunked_backward(dy, dlast_states, inputs, options)
    return _launch_backward(dy, dlast_states, inputs, options, config)


def _launch_backward(
    dy: Tensor, dlast_states: Tensor | None, inputs: SSDInputs, options: SSDOptions, config: SSDConfig
) -> SSDGradients:  # fmt: skip
    x, dt, A, B, C, D, dt_bias, initial_states, _ = inputs
    dx, ddt, dB, dC = (torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, dt, B, C))
    run = _Launch(inputs, options, config)
    run.add_rows("dy", dy)
    dinitial = None
    if initial_states is not None:
        # The kernels compute states in fp32.
        dinitial = x.new_empty(initial_states.shape, dtype=torch.float32)
    states, dstates = run.scan("x", "b", initial_states, None), run.scan("dy", "c", dlast_states, dinitial)
    parts = run.group_gradients(states, dstates, dB, dC)
    drates, dweights = run.head_gradients(dstates, parts, dx, ddt)
    dA, dD, ddt_bias = drates[0].to(A.dtype), None, None
    if D is not None and dweights is not None:
        dD = (dweights.sum(-1) if D.dim() == 1 else dweights).to(D.dtype)
    if dt_bias is not None:
        ddt_bias = drates[1].to(dt_bias.dtype)
    if initial_states is not None:
        dinitial = move(dinitial, initial_states.dtype)
    return SSDGradients(dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial)


# --- the self-check ------------------------------------------------------------------------------


class SSDVariant(NamedTuple):
    """The properties of a call for which Triton compiles kernels of their own."""

    size: int
    state_size: int
    groups: int
    applies_softplus: bool
    has_initial_states: bool
    # True if forward returns the last states, and backward reads their gradient.
    has_last_states: bool
    # The dtype of `cu_seqlens`, or None without packed samples.
    bounds_dtype: torch.dtype | None
    config: SSDConfig
    # The dtypes of dt, A, D and dt_bias. D and dt_bias may be None.
    dtypes: tuple[torch.dtype | None, ...]


def _is_checked(inputs: SSDInputs, options: SSDOptions, has_last_states: bool, config: SSDConfig) -> bool:
    x, dt, A, B, _, D, dt_bias, initial_states, bounds = inputs
    variant = SSDVariant(
        x.shape[3], B.shape[3], x.shape[2] // B.shape[2], options.applies_softplus,
        initial_states is not None, has_last_states, None if bounds is None else bounds.dtype, config,
        tuple([None if tensor is None else tensor.dtype for tensor in (dt, A, D, dt_bias)]),
    )  # fmt: skip
    return passes_check("ssd", x, variant, lambda: check_kernels(x, variant))


def _draw_check(dtype: torch.dtype, variant: SSDVariant) -> tuple[SSDInputs, Tensor, Tensor | None]:
    """Return inputs on the CPU, and the gradients of y and of the last states."""
    size, state_size, heads, tokens = variant.size, variant.state_size, variant.groups, CHECK_TOKENS
    draw, bounds = make_draw(), make_bounds(variant.bounds_dtype)
    shape = 1 if bounds is None else 2, heads, size, state_size
    x, dy = draw(1, tokens, heads, size).to(dtype), draw(1, tokens, heads, size).to(dtype)
    B, C = ((draw(1, tokens, 1, state_size) * state_size**-0.25).to(dtype) for _ in range(2))
    states, dlast = draw(*shape), draw(*shape)
    drawn = draw(1, tokens, heads).abs(), -draw(heads).exp(), draw(heads), draw(heads).abs()
    vectors: list[Any] = [None if kind is None else y.to(kind) for y, kind in zip(drawn, variant.dtypes, strict=True)]
    dt, A, D, bias = vectors
    inputs = SSDInputs(x, dt, A, B, C, D, bias, states if variant.has_initial_states else None, bounds)
    return inputs, dy, dlast if variant.has_last_states else None


def check_kernels(like: Tensor, variant: SSDVariant) -> bool:
    """Return whether the kernels compute what `ssd_chunks` computes: full chunks, a tail, and all gradients."""
    options = SSDOptions(variant.applies_softplus, 0.0, math.inf, variant.has_last_states)

    def run() -> tuple[Any, Any]:
        inputs, dy, dlast = _draw_check(like.dtype, variant)
        expected = *chunked_forward(inputs, options), *chunked_backward(dy, dlast, inputs, options)
        inputs = SSDInputs._make(move(x, like.device) for x in inputs)
        outputs = _launch_forward(inputs, options, variant.config)
        gradients = _launch_backward(
            dy.to(like.device), move(dlast, like.device), inputs, options, variant.config
        )  # fmt: skip
        return (*outputs, *gradients), expected

    return compare_results(like.device, run)

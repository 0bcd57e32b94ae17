"""`tigon.lean()` with other hooks of saved tensors, second derivatives, and the memory that stays after a step."""

import contextlib
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tigon
from memory.steps import ROWS, WIDTH, Step, assert_same_bits, block, normal, run, total
from memory.test_lean import norm_and_product
from tigon.memory.lean import recomputed_by_call


class Host(saved_tensors_hooks):
    """Hooks that copy every tensor twice, as `save_on_cpu` does on a GPU, and record the shapes."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, ...]] = []
        super().__init__(self.pack, lambda copy: copy.clone())

    def __enter__(self) -> "Host":
        super().__enter__()
        return self

    def pack(self, t: Tensor) -> Tensor:
        self.copies.append(tuple(t.shape))
        return t.detach().clone()


class Exp(torch.autograd.Function):
    """A function that saves only its input, as the kernels of norms and gates do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0].exp()


def test_hooks_around_the_block_get_the_saved_tensors():
    """The op and the recomputation save the same input, so the hooks get it once. They do not get the result."""
    exp = recomputed_by_call(Exp.apply)

    def forward(lean: bool, step: Step) -> Tensor:
        x = step.x()
        host.copies.clear()
        with block(lean):
            y = exp(x)
            step.watch(x=x, y=y)
            z = step.product(y), step.product(y)
        inputs.append(host.copies.count((*ROWS, WIDTH)))
        return total(*z)

    results, inputs = [], []
    for lean in (True, False):
        with Host() as host:
            alive, values = run(functools.partial(forward, lean), False)
        assert alive == set()
        results.append(values)
    # The products save views of the other tensors.
    assert inputs == [1, 1]
    assert_same_bits(*results)


def test_a_recomputed_result_has_the_strides_of_the_first_one():
    """Hooks may return the input with other strides, as `save_on_cpu` with pinned memory does."""

    def forward(lean: bool, step: Step) -> Tensor:
        with saved_tensors_hooks(lambda t: (t.detach().contiguous(), 0), lambda packed: packed[0]), block(lean):
            y = tigon.relu2(step.x(2, 3, 4, 5).transpose(1, 2))
            assert not y.is_contiguous()
            return total(y.transpose(1, 2) * step.leaf(5))

    assert_same_bits(*(run(functools.partial(forward, lean), False)[1] for lean in (True, False)))


def test_a_freed_tensor_is_not_mistaken_for_a_later_one():
    """Other hooks copy the tensor, so its memory is reused at once."""

    def forward(step: Step) -> Tensor:
        with Host(), block(lean):
            h = step.x()
            for _ in range(20):
                h = torch.sin(h) * step.leaf(*ROWS, WIDTH)
                h = h + tigon.relu2(h.detach().requires_grad_())
        return total(h)

    lean = False
    expected = run(forward, False)[1]
    lean = True
    assert_same_bits(run(forward, False)[1], expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_checkpointed_region_may_contain_the_block(reentrant):
    def gradients(lean: bool) -> list[Tensor]:
        step = Step()
        w, v = step.weight(), step.weight(WIDTH, WIDTH)

        def layers(x: Tensor) -> Tensor:
            with block(lean):
                for _ in range(2):
                    x = x + F.linear(tigon.swiglu(tigon.rms_norm(x, w), x), v)
            return x

        loss = total(checkpoint(layers, step.x(), use_reentrant=reentrant))
        loss.backward()
        return [loss.detach(), *step.gradients()]

    assert_same_bits(gradients(True), gradients(False))


def test_products_have_a_second_derivative():
    """The second derivative of the product reads the recomputed result, which is computed without a graph."""
    modes = []

    def norm(x: Tensor, w: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return tigon.ops.norms.rms_norm.rms_norm_reference(x, w)

    def gradients(lean: bool) -> list[Tensor]:
        step = Step()
        with block(lean):
            z = step.product(recomputed_by_call(norm)(step.x(), step.weight()))
        (first,) = torch.autograd.grad(total(z), step.leaves[2], create_graph=True)
        total(first).backward()
        return step.gradients()

    assert_same_bits(gradients(True), gradients(False))
    assert modes == [True, *[False] * (len(modes) - 2), True]


@pytest.mark.interpreter
def test_ops_without_a_second_derivative_refuse():
    step = Step()
    with tigon.lean():
        loss = norm_and_product(step)
    with pytest.raises(RuntimeError, match="RMSNorm has no second derivative"):
        torch.autograd.grad(loss, step.leaves[0], create_graph=True)


@pytest.mark.no_interpreter("The interpreter leaves reference cycles.")
@pytest.mark.parametrize("backward", [True, False], ids=["after backward", "dropped before"])
@pytest.mark.parametrize("inside", [True, False], ids=["in the block", "after it"])
def test_no_reference_cycle_keeps_memory_alive(backward, inside):
    """The garbage collector is off."""
    gc.collect()
    gc.disable()
    try:
        step, stack = Step(), contextlib.ExitStack()
        stack.enter_context(tigon.lean())
        x = step.x()
        y = tigon.rms_norm(x, step.weight())
        z = tigon.swiglu(y, y)
        step.watch(x=x, y=y, z=z)
        products = [step.product(z), step.product(y), F.linear(z.double(), normal(9, 3, WIDTH).double())]
        loss = total(*products)
        if not inside:
            stack.close()
        if backward:
            loss.backward()
        del x, y, z, products, loss
        assert step.alive() == set()
        assert not inside or not (tigon.memory.lean._block().by_storage or tigon.memory.lean._block().by_node)
        stack.close()
    finally:
        gc.enable()


def test_an_output_that_the_user_keeps_holds_no_other_tensor():
    """Backward does not change the output."""
    step = Step()
    with tigon.lean():
        x = step.x()
        y = tigon.rms_norm(x, step.weight())
        z = step.product(y)
        step.watch(x=x)
    before = y.detach().clone()
    total(z).backward()
    del x, z
    assert torch.equal(y, before)
    assert step.alive() == set()

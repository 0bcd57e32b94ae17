"""`tigon.lean()`: which tensors are saved, how often backward recomputes them, and how lean works with other hooks."""

import threading

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import tigon
from memory.steps import ROWS, WIDTH, Step, assert_same_bits, block, run, total
from tigon.memory.lean import recomputed_by_call
from tigon.ops.norms.rms_norm import rms_norm_reference


class Counted:
    """An rms_norm that records the storages of its results."""

    def __init__(self) -> None:
        self.results: list[StorageWeakRef] = []
        self.recomputed_norm = recomputed_by_call(self.norm)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm_reference(x, weight)
        self.results.append(StorageWeakRef(y.untyped_storage()))
        return y

    def alive(self) -> list[int]:
        return [i for i, storage in enumerate(self.results) if not storage.expired()]


def compare(forward, **options) -> tuple[set[str], set[str]]:
    """Check that lean has the same bits, and return the tensors that are alive without lean and with it."""
    alive, expected = run(forward, False, **options)
    alive_in_lean, actual = run(forward, True, **options)
    assert_same_bits(actual, expected)
    return alive, alive_in_lean


def test_three_products_share_one_recomputed_result():
    """The first product recomputes it. It is freed after the third one, before the backward of the norm itself."""
    step, norm, live_results = Step(), Counted(), []
    with tigon.lean():
        x = step.x()
        x.register_hook(lambda _: live_results.append(norm.alive()))
        y = norm.recomputed_norm(x, step.weight())
        # This hook runs after all three products.
        y.register_hook(lambda _: live_results.append(norm.alive()))
        loss = total(step.product(y), step.product(y), step.product(y))
        del y
    assert norm.alive() == []
    loss.backward()
    assert len(norm.results) == 2
    assert live_results == [[], []]


def test_every_backward_recomputes_once():
    norm = Counted()

    def gradients(lean: bool) -> list[Tensor]:
        step = Step()
        with block(lean):
            y = norm.recomputed_norm(step.x(), step.weight())
            loss = total(step.product(y), step.product(y))
            del y
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return step.gradients()

    expected = gradients(False)
    norm.results.clear()
    assert_same_bits(gradients(True), expected)
    # One call in the forward, and one in each backward.
    assert len(norm.results) == 4
    assert norm.alive() == []


VIEWS = {
    "view": lambda y: y.view(-1, WIDTH), "transposed": lambda y: y.reshape(2, 3, 4, 4).transpose(1, 2),
    "slice": lambda y: y[:, 1:, ::2], "detached": lambda y: y.detach(), "half": lambda y: y.chunk(2, -1)[1],
    "expanded": lambda y: y[None].expand(5, *y.shape), "of another dtype": lambda y: y.detach().view(torch.int32),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_results_are_not_saved(view):
    """A product of two tensors saves both."""

    def forward(step: Step) -> Tensor:
        y = tigon.rms_norm(step.x(), step.weight())
        step.watch(y=y)
        v = view(y)
        return total(v * step.leaf(*v.shape), step.product(y))

    has_other_dtype = view(torch.zeros(*ROWS, WIDTH)).dtype != torch.float32
    assert compare(forward) == ({"y"}, {"y"} if has_other_dtype else set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_casts_of_autocast_are_recomputed(dtype):
    """Each product saves its own cast. Backward runs outside of autocast."""

    def forward(step: Step) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            # The layer norm of torch returns fp32 under autocast.
            y = tigon.layer_norm(step.x(), step.weight())
            z = step.product(y), step.product(y)
        step.watch(y=y)
        return total(*z)

    compare(forward, dtype=dtype)
    step, saved_tensors = Step(dtype), []
    with saved_tensors_hooks(lambda t: saved_tensors.append((t.dtype, t.shape[-1])) or t, lambda t: t), tigon.lean():
        forward(step)
    casts = [(d, n) for d, n in saved_tensors if d == torch.bfloat16 and n == WIDTH and dtype == torch.float32]
    assert not casts


@pytest.mark.parametrize("backward", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("forward", [False, True], ids=["forward outside", "forward inside"])
def test_backward_recomputes_with_the_autocast_of_the_forward_pass(forward, backward):
    """The product of torch computes in another dtype under autocast."""
    op = recomputed_by_call(lambda x: x @ x.mT)

    def gradients(lean: bool) -> list[Tensor]:
        step = Step()
        with torch.autocast("cpu", torch.bfloat16, forward), block(lean):
            y = op(step.x())
            loss = total(y * step.leaf(*y.shape))
        with torch.autocast("cpu", torch.bfloat16, backward):
            loss.backward()
        return step.gradients()

    assert_same_bits(gradients(True), gradients(False))


def write(y: Tensor) -> None:
    with torch.no_grad():
        y.add_(1)


@pytest.mark.parametrize(
    "change", [write, lambda y: write(y.detach()), lambda y: write(y.view(-1)), lambda y: y.add_(1)],
    ids=["without gradient", "detached", "a view", "with gradient"],
)  # fmt: skip
@pytest.mark.parametrize("alias", [lambda y: y, lambda y: y.data], ids=["itself", "data"])
@pytest.mark.sampled(in_interpreter=3)
def test_results_that_were_written_before_they_are_saved_stay_saved(change, alias):
    """Otherwise backward would recompute the values from before the write."""

    def forward(step: Step) -> Tensor:
        y = tigon.rms_norm(step.x(), step.weight())
        change(y)
        step.watch(y=y)
        return total(step.product(alias(y)), y)

    assert compare(forward)[1] == {"y"}


def test_each_node_gets_the_values_that_it_saved():
    with tigon.lean():
        step = Step()
        y = tigon.rms_norm(step.x(), None)
        one = step.product(y)
        expected = y.detach().clone()
        write(y)
        two = step.product(y)
    total(one, two).backward()
    for leaf, saved_input, z in zip(step.leaves[1:], (expected, expected + 1), (one, two), strict=True):
        torch.testing.assert_close(leaf.grad, torch.einsum("abi,abj->ij", 2 * z, saved_input))


@pytest.mark.parametrize("when", ["before it is saved", "after"])
def test_backward_refuses_inputs_that_were_written(when):
    """Without lean, autograd raises the error too. A product that saved the result itself has the right gradient."""
    step = Step()
    with tigon.lean():
        x, w = step.x(), step.weight()
        y = tigon.rms_norm(x, w)
        if when == "before it is saved":
            write(x)
        z, saved_input = step.product(y), y.detach().clone()
        if when == "after":
            write(x)
        del y
    if when == "before it is saved":
        (gradient,) = torch.autograd.grad(total(z), step.leaves[2], retain_graph=True)
        torch.testing.assert_close(gradient, torch.einsum("abi,abj->ij", 2 * z, saved_input))
    with pytest.raises(RuntimeError, match="modified by an inplace operation.* at version 1; expected version 0"):
        total(z).backward()


def test_backward_refuses_other_tensors_that_were_written():
    """Saved-tensor hooks disable the check of autograd, so lean checks the tensors of other ops itself."""
    with tigon.lean():
        a, b = Step().x(), Step().x()
        z = total(a * b)
    write(a)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[.*\[2, 3, 16\]\] is at version 1"):
        z.backward()


@pytest.mark.parametrize("change", ["exchanged", "emptied"])
def test_products_recompute_a_norm_whose_weight_was_freed(change, monkeypatch):
    """An engine gathers the weight for the backward of the norm, which comes after that of the products."""
    monkeypatch.setattr("tigon.memory.recomputation.dist.is_initialized", lambda: True)

    def gradients(lean: bool) -> list[Tensor]:
        step = Step()
        with block(lean):
            w = step.weight()
            y = tigon.rms_norm(step.x(), w)
            z = step.product(y)
        values, step.loss = w.detach().clone(), total(z)
        if change == "exchanged":
            step.watch(w=w)
            w.data = torch.empty(0)
            # The engine wants to free the memory of the weight.
            assert step.alive() == set()
        else:
            w.untyped_storage().resize_(0)

        def gather(_: Tensor) -> None:
            if change == "exchanged":
                w.data = values
            else:
                w.untyped_storage().resize_(values.nbytes)
                w.data.copy_(values)

        y.register_hook(gather)
        step.loss.backward()
        return step.gradients()

    assert_same_bits(gradients(True), gradients(False))


def test_weights_are_copied_only_in_a_process_group(monkeypatch):
    """Elsewhere a freed weight is an error, not a read of freed memory."""
    step, copies = Step(), []
    monkeypatch.setattr(Tensor, "clone", lambda x: copies.append(x))
    with tigon.lean():
        w = step.weight()
        z = step.product(tigon.rms_norm(step.x(), w))
    assert copies == []
    w.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the memory of a weight was freed between forward and backward"):
        total(z).backward()


def norm_and_product(step: Step) -> Tensor:
    y = tigon.rms_norm(step.x(), step.weight())
    step.watch(y=y)
    return total(step.product(y))


def test_an_exception_ends_the_block():
    step = Step()

    def fail() -> None:
        with tigon.lean(), tigon.lean():
            step.loss = total(step.product(tigon.rms_norm(step.x(), None)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert tigon.memory.lean._open_blocks == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    step.loss.backward()
    assert run(norm_and_product, True)[0] == set()


def test_an_op_that_fails_in_backward_is_called_in_the_next_backward():
    calls = []

    def failing(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("once")
        return x.exp()

    step = Step()
    with tigon.lean():
        z = step.product(recomputed_by_call(failing)(step.x()))
    with pytest.raises(KeyError, match="once"):
        total(z).backward(retain_graph=True)
    total(z).backward()
    assert len(calls) == 3


def test_lean_is_a_decorator():
    alive, actual = run(tigon.lean()(norm_and_product), False)
    assert alive == set()
    assert_same_bits(actual, run(norm_and_product, False)[1])


@pytest.mark.no_interpreter("The interpreter has one thread.")
def test_each_thread_has_its_own_blocks():
    """A thread without a block saves as before. The backward of a graph may run in another thread."""
    expected, results, barrier = run(norm_and_product, False)[1], {}, threading.Barrier(3, timeout=60)

    def work(name: int, lean: bool) -> None:
        for _ in range(10):
            barrier.wait()
            results.setdefault(name, []).append(run(norm_and_product, lean))

    threads = [threading.Thread(target=work, args=(i, i < 2)) for i in range(3)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert {name: len(runs) for name, runs in results.items()} == {0: 10, 1: 10, 2: 10}
    for name, runs in results.items():
        for alive, actual in runs:
            assert alive == ({"y"} if name == 2 else set())
            assert_same_bits(actual, expected)

    step = Step()
    with tigon.lean():
        loss = norm_and_product(step)
    other = threading.Thread(target=loss.backward)
    other.start(), other.join()
    assert_same_bits(step.gradients(), expected[1:])
    assert tigon.memory.lean._open_blocks == 0


def test_lean_without_gradients_records_nothing():
    with tigon.lean(), torch.no_grad():
        x = Step().x()
        y = tigon.rms_norm(x, None)
        assert not tigon.memory.lean._block().by_storage
    with torch.inference_mode(), tigon.lean():
        assert torch.equal(tigon.rms_norm(x, None), y)


def test_lean_is_refused_where_hooks_are_forbidden():
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="no hooks here"), tigon.lean():
            pass
    assert tigon.memory.lean._open_blocks == 0

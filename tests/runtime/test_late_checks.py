"""A failed check on a GPU makes the result NaN, and a later call raises its error. No assertion runs on the device."""

import re
from pathlib import Path

import pytest
import torch
from torch import library
from torch._subclasses import FakeTensorMode

import tigon
from tigon.runtime import late_checks
from tigon.runtime.late_checks import check_later, raise_earlier

FORBIDDEN = re.compile(r"_assert_async|_assert_tensor|device_assert|assert_on_device")
LATE = r"the rule \(an earlier call on a GPU found this; its loss or its gradients are NaN\)"


class Event:
    def __init__(self, is_done: bool) -> None:
        self.query = lambda: is_done


@pytest.fixture
def pending(monkeypatch):
    """Return a function that adds a check to those whose values have not reached the host."""
    checks = late_checks._pending
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield lambda holds, is_done=True, error="RuntimeError", message="the rule": checks.append(
        late_checks._Check(late_checks.LateFlag(torch.tensor(holds), Event(is_done)), error, message)
    )
    checks.clear()


@pytest.mark.parametrize("error", ["ValueError", "RuntimeError"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_cpu_raises_the_error_at_once(error, compiled):
    function = lambda x: 2.0 * check_later((x > 0).all(), error, "the rule")
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert function(torch.ones(3)) == 2.0
    with pytest.raises({"ValueError": ValueError, "RuntimeError": RuntimeError}[error], match="^the rule$"):
        function(torch.tensor([1.0, -1.0, torch.nan]))


def test_a_fake_tensor_has_a_fake_result():
    with FakeTensorMode() as mode:
        result = check_later(mode.from_tensor(torch.tensor(False)), "ValueError", "the rule")
    assert result.shape == ()
    assert result.dtype == torch.float32
    assert check_later(torch.tensor(False, device="meta"), "ValueError", "the rule").is_meta


def test_the_operator_is_registered_correctly():
    library.opcheck(torch.ops.tigon.check_later.default, (torch.tensor(True), "ValueError", "the rule"))


def test_a_failed_check_raises_once_its_value_has_reached_the_host(pending):
    pending(True)
    pending(False)
    pending(False, error="ValueError", message="another rule")
    pending(True, is_done=False)
    with pytest.raises(RuntimeError, match=LATE):
        raise_earlier()
    with pytest.raises(ValueError, match="another rule"):
        check_later(torch.tensor(True), "RuntimeError", "the rule")
    assert check_later(torch.tensor(True), "RuntimeError", "the rule") == 1.0
    assert len(late_checks._pending) == 1


def test_no_value_is_read_before_it_has_reached_the_host(pending):
    pending(False, is_done=False)
    pending(False)
    raise_earlier()
    assert len(late_checks._pending) == 2


def test_linear_loss_raises_the_error_of_an_earlier_call_before_it_calls_the_function(pending):
    pending(False)
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    with pytest.raises(RuntimeError, match=LATE):
        tigon.linear_loss(hidden, weight, torch.arange(3), lambda x: pytest.fail("The function was called."))


def test_the_heads_of_models_and_of_trl_raise_the_error_of_an_earlier_call(pending):
    transformers, trl_head = pytest.importorskip("transformers"), pytest.importorskip("tigon.integrations.trl_head")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model, tokens = transformers.LlamaForCausalLM(config).train(), torch.arange(6).view(1, 6)
    tigon.patch(model)
    hidden, head = torch.randn(1, 3, 8, requires_grad=True), trl_head.Head(torch.randn(5, 8), None)
    arguments = torch.arange(3).view(1, 3), trl_head.LogitOptions(1.0, None, 1.0), "nll", True, None, None
    for call in (
        lambda: model(input_ids=tokens, labels=tokens),
        lambda: trl_head._summed_log_probs(hidden, head, *arguments),
    ):
        pending(False)
        with pytest.raises(RuntimeError, match=LATE):
            call()
        call()


def test_no_assertion_on_a_device_is_in_the_code():
    files = [*Path(tigon.__file__).parent.rglob("*.py")]
    assert files
    assert [str(file) for file in files if FORBIDDEN.search(file.read_text())] == []

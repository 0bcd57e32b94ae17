"""The number of steps that the optimizers of this process have taken.

FSDP and DeepSpeed write gathered weights without changing the version of the tensor, but they write new values only
after an optimizer has stepped. A value that was computed from weights is therefore outdated if this number has changed.
"""

from torch.optim.optimizer import register_optimizer_step_post_hook

from tigon.runtime.compat.autograd import backward_id

_count = 0
# The id of a backward pass in which parameters have stepped, and which is not counted yet. It is None otherwise.
_stepping_backward: int | None = None
_has_hook = False


def _count_step(*_: object) -> None:
    global _count
    _count += 1


def count_steps() -> None:
    """Count the steps of all optimizers of torch from now on."""
    global _has_hook
    if not _has_hook:
        _has_hook = True
        register_optimizer_step_post_hook(_count_step)


def count_step_in_backward() -> None:
    """Count the step that one parameter takes inside the running backward pass, which calls no hooks of the optimizer.
    All steps of a backward pass count as one step, which is counted after the pass. The pass may therefore go on using
    copies of its weights: a parameter steps only when this pass no longer needs its old value."""
    global _stepping_backward
    step_count()
    _stepping_backward = backward_id()


def step_count() -> int:
    """Return the number of steps."""
    global _stepping_backward
    if _stepping_backward is not None and _stepping_backward != backward_id():
        _stepping_backward = None
        _count_step()
    return _count

"""The number of steps that the optimizers of this process have taken.

FSDP and DeepSpeed write gathered weights without a change of their version, but they write new values only after an
optimizer has stepped. A value that was computed from weights is therefore outdated if this number has changed.
"""

from torch.optim.optimizer import register_optimizer_step_post_hook

from tigon.runtime.torch_private.autograd import backward_id

__all__ = ["count_step_in_backward", "count_steps", "step_count"]

_count = 0
# The backward pass in which parameters have stepped since the number was last raised, or None.
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
    """Count a step of one parameter that the running backward pass takes, without the hooks of its optimizer.

    All steps of a backward pass count as one, and only after it. The copies of weights that the pass itself still needs
    stay in use, because a parameter steps when nothing in this pass needs its old value.
    """
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

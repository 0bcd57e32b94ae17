"""Let a config of transformers request Tigon for the experts of a mixture: `experts_implementation="tigon"`.

    tigon.integrations.experts.register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="tigon")

Shapes: T tokens, K choices each, H hidden size.
"""

from typing import Any

from torch import Tensor, nn

from tigon.ops.experts.moe_mlp import moe_mlp
from tigon.recognition.parts.experts import parameter_names
from tigon.runtime.requirements import require

NAME = "tigon"


def _activation_of(module: Any) -> Any:
    """Return the activation of a module of experts as `moe_mlp` takes it: a name, or the module's own function."""
    from transformers.integrations import moe

    if not module.has_gate:
        return module.act_fn
    default = getattr(moe, "_default_apply_gate", None)
    is_silu = isinstance(module.act_fn, nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"
    is_default = default is not None and getattr(type(module), "_apply_gate", None) is default
    return "silu" if is_default and is_silu else module._apply_gate


def compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the sum of the experts [T, H] of a module that transformers marks with its layout, by `tigon.moe_mlp`. An
    index [T, K] of at least the number of experts stands for an expert of another rank."""
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"experts_implementation='tigon' does not compute {type(module).__name__}, which has a norm after each "
            "expert; use 'grouped_mm'"
        )
    up, down, *biases = (getattr(module, name) for name in parameter_names(module))
    up_bias, down_bias = biases or (None, None)
    return moe_mlp(
        hidden_states, up, down, top_k_index, top_k_weights,
        up_bias=up_bias, down_bias=down_bias, transposed=module.is_transposed, activation=_activation_of(module),
    )  # fmt: skip


def register() -> None:
    """Register `experts_implementation="tigon"` in transformers. A second call changes nothing.

    Raises:
        ImportError: transformers is missing or too old.

    Source: `transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS` of transformers 5.17.

    Example:
        >>> tigon.integrations.experts.register()
        >>> from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        >>> "tigon" in ALL_EXPERTS_FUNCTIONS
        True
    """
    require("tigon.integrations.experts.register", "transformers", extra="hf")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)

"""The table of the parts that `tigon.patch` replaces: how each is recognised and installed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tigon.hf.learn import attach, learn_loss
from tigon.recognition.guards.guard import install_guarded
from tigon.recognition.parts.activations import recognise_gelu, recognise_relu2
from tigon.recognition.parts.adapters import install_adapters, recognise_adapters
from tigon.recognition.parts.experts import recognise_experts
from tigon.recognition.parts.mixers import recognise_mixer
from tigon.recognition.parts.mixtures import recognise_mixture
from tigon.recognition.parts.mlps import recognise_glu, recognise_mlp
from tigon.recognition.parts.norms import recognise_norm
from tigon.recognition.parts.rope import recognise_rope
from tigon.recognition.replacement import install
from tigon.recognition.rewriting.fused_statements import recognise_fused_statements


@dataclass(frozen=True)
class Part:
    """How modules of one part are recognised and replaced."""

    # It returns a recipe, the reason why a module of this kind has none, or None for another kind.
    recognise: Callable[[nn.Module], Any]
    install: Callable[[nn.Module, Any], Callable[[], None]]
    # The condition for a comparison with the op. `report.why` shows this text for a module that does not meet it.
    condition: str
    # True if the op saves its input for backward, where the stock module in half precision saves a copy of it. If the
    # input is changed in place after the module has run, the module then keeps its forward.
    saves_input: bool = False


NORM_CONDITION = (
    'a norm has no children, one or two inputs, and either a weight and an epsilon or "norm" in the name of its class'
)
PARTS = {
    "rms_norm": Part(recognise_norm, install_guarded, NORM_CONDITION, saves_input=True),
    "layer_norm": Part(recognise_norm, install_guarded, NORM_CONDITION, saves_input=True),
    "glu": Part(
        recognise_glu, install_guarded, "a gated MLP has two or three linear children whose sizes fit gate, up and down"
    ),
    "mlp": Part(
        recognise_mlp, install_guarded, "an MLP without a gate has two linear children, and no other parameters"
    ),
    "experts": Part(
        lambda module: recognise_experts(module) or recognise_mixture(module),
        install_guarded,
        "experts have the layout that transformers marks, or share a parent with a router and an MLP for all tokens",
    ),
    # The modules above compute their activations themselves, so these come after them.
    "relu2": Part(recognise_relu2, install_guarded, "a squared ReLU has no children, no parameters and one input"),
    "gelu": Part(recognise_gelu, install_guarded, "a GELU has no children, no parameters and one input"),
    "adapters": Part(
        recognise_adapters,
        install_adapters,
        "a layer with adapters has a linear base_layer, and lora_A, lora_B and lora_dropout, as those of PEFT",
        saves_input=True,
    ),
    "rope": Part(recognise_rope, install, "its forward names no function of cos and sin"),
    "mixers": Part(
        recognise_mixer, install, "its forward names no function of a gated delta rule, or of a convolution before one"
    ),
    "fused_statements": Part(
        recognise_fused_statements, install, "the module has fewer than two children, or no forward of its own"
    ),
    "loss": Part(learn_loss, attach, "a causal language model has output embeddings and a loss function"),
}
ACTIVATIONS = ("relu2", "gelu")

"""`tigon.AutoModelForCausalLM` builds models as transformers does, and applies `tigon.patch` to them."""

from typing import Any

from torch import nn

from tigon.hf.patch import patch
from tigon.runtime.requirements import require

__all__ = ["AutoModelForCausalLM"]


def _build(constructor: str, args: tuple, kwargs: dict[str, Any], patch_options: dict[str, Any] | None) -> nn.Module:
    """Call a constructor of `transformers.AutoModelForCausalLM`, and patch the model."""
    require("tigon.AutoModelForCausalLM", "transformers", extra="hf")
    import transformers

    model = getattr(transformers.AutoModelForCausalLM, constructor)(*args, **kwargs)
    patch(model, **(patch_options or {}))
    return model


class AutoModelForCausalLM:
    """Builds the model that `transformers.AutoModelForCausalLM` builds, and patches it with `patch_options`.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = tigon.AutoModelForCausalLM.from_config(config, patch_options={"rope": False})
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> model(input_ids=tokens, labels=tokens, skip_logits=True).logits
        <tigon: logits that were never computed; skip_logits=False computes them>
    """

    @staticmethod
    def from_pretrained(*args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> nn.Module:
        """Return the patched model of `transformers.AutoModelForCausalLM.from_pretrained(*args, **kwargs)`."""
        return _build("from_pretrained", args, kwargs, patch_options)

    @staticmethod
    def from_config(*args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> nn.Module:
        """Return the patched model of `transformers.AutoModelForCausalLM.from_config(*args, **kwargs)`."""
        return _build("from_config", args, kwargs, patch_options)

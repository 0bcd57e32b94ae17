"""The auto classes build models as those of transformers do, and apply `tigon.patch` to them."""

from typing import Any, ClassVar

from torch import nn

from tigon.hf.patch import patch
from tigon.runtime.requirements import require


class _PatchedAutoModel:
    """Calls the constructors of one auto class of transformers, and patches their models."""

    auto_class: ClassVar[str]

    @classmethod
    def _build(cls, constructor: str, args: tuple, kwargs: dict[str, Any], patch_options: dict[str, Any] | None) -> Any:
        require(f"tigon.{cls.auto_class}", "transformers", extra="hf")
        import transformers

        result = getattr(getattr(transformers, cls.auto_class), constructor)(*args, **kwargs)
        # `from_pretrained(..., output_loading_info=True)` returns the model and a report of the weights.
        model = result[0] if isinstance(result, tuple) else result
        if isinstance(model, nn.Module):
            patch(model, **(patch_options or {}))
        return result

    @classmethod
    def from_pretrained(cls, *args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Return the patched model of `from_pretrained(*args, **kwargs)` of the class of the same name."""
        return cls._build("from_pretrained", args, kwargs, patch_options)

    @classmethod
    def from_config(cls, *args: Any, patch_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """Return the patched model of `from_config(*args, **kwargs)` of the class of the same name."""
        return cls._build("from_config", args, kwargs, patch_options)


class AutoModelForCausalLM(_PatchedAutoModel):
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

    auto_class = "AutoModelForCausalLM"


class AutoModelForImageTextToText(_PatchedAutoModel):
    """Builds the model that `transformers.AutoModelForImageTextToText` builds, and patches it with `patch_options`.

    The vision tower is patched too.

    Example:
        >>> from transformers import Gemma3Config
        >>> size = {
        ...     "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2
        ... }
        >>> config = Gemma3Config(
        ...     text_config=size | {"vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16},
        ...     vision_config=size | {"image_size": 8, "patch_size": 4},
        ...     mm_tokens_per_image=4,
        ... )
        >>> type(tigon.AutoModelForImageTextToText.from_config(config)).__name__
        'Gemma3ForConditionalGeneration'
    """

    auto_class = "AutoModelForImageTextToText"


class AutoModelForSequenceClassification(_PatchedAutoModel):
    """Builds the model that `transformers.AutoModelForSequenceClassification` builds, and patches it.

    Reward models are such models. Their head and their loss stay stock, because they have no vocabulary.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        ...     num_labels=1, pad_token_id=0,
        ... )
        >>> model = tigon.AutoModelForSequenceClassification.from_config(config, patch_options={"memory": "lean"})
        >>> model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits.shape
        torch.Size([1, 1])
    """

    auto_class = "AutoModelForSequenceClassification"

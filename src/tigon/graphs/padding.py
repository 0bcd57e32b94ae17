"""Pad the sequences of a training call on the right, so that calls of many lengths have few shapes.

A new length costs time: attention kernels make a plan for each new shape. A padded call has the results of the call
without padding, up to rounding:

- The labels of the padding are ignored, and the mean of the loss counts valid tokens only.
- Causal attention and recurrent layers pass nothing from the right to the left. Then no mask is needed, and attention
  keeps its fast kernels. A mask of the caller is left out too if it has no effect on the loss: if it masks nothing, or
  only tokens on the right whose labels are ignored.
- Otherwise the padding has zeros in the attention mask. This also excludes it from attention that is not causal and
  from the loss that balances the experts of a mixture. It is exact for any mask of the caller, also one of padding on
  the left.
- In packed input whose boundaries are arguments, the padding is a sample of its own.
- Outputs are cut to the true length. The cache of keys and values is not computed unless the caller requests it.

Shapes: B sequences of S tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.runtime.device import PLAIN, is_capturing

# The labels that the standard loss ignores.
_IGNORED = -100
# Arguments of shape [B, S], except the mask and those below, with the value of the padding.
_FILLS = {"token_type_ids": 0, "mm_token_type_ids": 0}
# Arguments that show where the samples of packed input begin.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
_POSITIONS = ("position_ids", *_BOUNDARIES)
# The other arguments whose tensors may have the size S.
_KNOWN = {"input_ids", "inputs_embeds", "attention_mask", *_POSITIONS}
_CACHES = ("past_key_values", "cache_params", "cache_position")
# Outputs that have no dimension of tokens.
_OTHER_OUTPUTS = ("image_", "audio_", "video_", "past_key_values", "rope_deltas")


def bucket_length(length: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `length`."""
    return -(-length // multiple) * multiple


def ladder_length(length: int) -> int:
    """Return the smallest of the lengths 64, 128, 256, ..., 1024, 1280, ..., 2048, 2560, ... not below `length`. Two of
    these lengths above 128 differ by a quarter of a power of two, and at least by 128, so there are few of them."""
    return 64 if length <= 64 else bucket_length(length, max(128, 1 << ((length - 1).bit_length() - 3)))


@dataclass(frozen=True)
class Buckets:
    """The lengths that calls are padded to."""

    # Their multiples, or, with None, the lengths of `ladder_length`.
    multiple: int | None

    def length(self, length: int) -> int:
        """Return the padded length of a call."""
        return ladder_length(length) if self.multiple is None else bucket_length(length, self.multiple)

    def __str__(self) -> str:
        return "one of a few lengths" if self.multiple is None else f"a multiple of {self.multiple} tokens"


@dataclass(frozen=True)
class PaddingRules:
    """The facts about a model that the padding of its calls depends on."""

    # A token that stands for text. Some tokens stand for images, whose number is checked.
    token: int = 0
    # The lengths above which positions are computed in another way, or have no embedding.
    position_limits: tuple[int, ...] = ()
    # False if positions are computed from the length of the call above these limits (dynamic RoPE).
    keeps_positions: bool = True
    # True if the forward has the parameter `use_cache`.
    takes_use_cache: bool = True
    # True if a call with labels computes no logits.
    skips_logits: bool = False
    # True if some attention is not causal, and its mask excludes masked tokens.
    always_masks: bool = False
    # True if attention adds large negative numbers where others have no key, as eager attention does.
    adds_mask: bool = False
    # The config of the text part, which is read at each call.
    config: Any = None

    def read(self, arguments: dict[str, Any], name: str) -> Any:
        """Return an option of a call, or the one of the config if the call does not set it."""
        value = arguments.get(name)
        return getattr(self.config, name, None) if value is None else value

    def needs_mask(self, arguments: dict[str, Any]) -> bool:
        """Return whether only a mask excludes the padding: attention is not causal, or a loss counts all tokens."""
        is_causal = getattr(self.config, "is_causal", True) is not False and not self.always_masks
        is_bidirectional = bool(getattr(self.config, "use_bidirectional_attention", False))
        # Token types may mark a prefix whose tokens attend to each other.
        has_types = arguments.get("token_type_ids") is not None
        return not is_causal or is_bidirectional or has_types or bool(self.read(arguments, "output_router_logits"))

    def returns_states(self, arguments: dict[str, Any]) -> bool:
        """Return whether a caller gets results of single tokens, also of masked ones."""
        names = ("output_hidden_states", "output_attentions")
        skips_logits = self.skips_logits if arguments.get("skip_logits") is None else arguments["skip_logits"]
        return not skips_logits or any(self.read(arguments, name) for name in names)


@dataclass(frozen=True)
class PaddedCall:
    """The arguments of a padded call by name, and the two lengths."""

    arguments: dict[str, Any]
    # The length of the sequences of the caller, S.
    length: int
    # The length of the padded sequences.
    padded: int

    def cut(self, output: Any) -> Any:
        """Return the output of the padded call without the padding."""
        return cut_output(output, self.length, self.padded)


def pad_call(arguments: dict[str, Any], length: int, rules: PaddingRules | None = None) -> PaddedCall | str:
    """Return a call padded on the right to `length`, or the reason why it cannot be padded exactly. The given arguments
    are not changed. At the length of the sequences themselves, only a mask without effect is left out."""
    rules = rules or PaddingRules()
    tokens, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    x: Any = embeds if tokens is None else tokens
    if type(x) not in PLAIN or x.dim() != (3 if tokens is None else 2) or (tokens is not None and embeds is not None):
        return "its tokens are no input_ids [B, S] or inputs_embeds [B, S, H]"
    batch, true_length = x.shape[:2]
    if length < true_length:
        raise ValueError(f"pad_call: length must be at least {true_length}, got {length}")
    missing = length - true_length
    if (reason := _find_obstacle(arguments, batch, true_length, length, rules)) is not None:
        return reason
    mask = _find_mask(arguments, x, missing, rules)
    if isinstance(mask, str):
        return mask
    padded = dict(arguments)
    if "attention_mask" in arguments or mask is not None:
        padded["attention_mask"] = mask
    if missing:
        padded.update(_pad_tokens(arguments, missing, rules))
        padded.update(_pad_positions(arguments, true_length, missing, rules))
        if rules.takes_use_cache:
            padded["use_cache"] = False
        if kept := arguments.get("logits_to_keep"):
            padded["logits_to_keep"] = slice(*slice(-kept, None).indices(true_length)[:2])
    return PaddedCall(padded, true_length, length)


def _find_obstacle(
    arguments: dict[str, Any], batch: int, true_length: int, length: int, rules: PaddingRules
) -> str | None:
    """Return why a call cannot be padded; None if it can. The mask is checked elsewhere."""
    if any(arguments.get(name) is not None for name in _CACHES) or arguments.get("use_cache"):
        return "it has a cache"
    if arguments.get("is_causal") is False:
        return "its attention is not causal (is_causal=False)"
    if not isinstance(arguments.get("logits_to_keep", 0), (int, type(None))):
        return "logits_to_keep is no number"
    has_boundaries = any(arguments.get(name) is not None for name in _BOUNDARIES)
    has_positions = arguments.get("position_ids") is not None
    may_be_packed = (has_positions or has_boundaries) and arguments.get("attention_mask") is None
    if may_be_packed and rules.takes_use_cache and rules.read(arguments, "use_cache"):
        return "its input may be packed, and with a cache transformers does not separate samples (use_cache=False does)"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        may_be_part = arguments.get("shift_labels") is not None or (has_positions and not has_boundaries)
        if may_be_part and torch.distributed.get_world_size() > 1:
            return "its rank may have a part of a longer sequence (a call with position_ids or shift_labels)"
    crossed = [n for n in rules.position_limits if n < length and (true_length <= n or not rules.keeps_positions)]
    if length > true_length and crossed and not (has_positions and rules.keeps_positions):
        return f"its padded length of {length} is above {crossed[0]}, where the positions of the model change"
    shapes = dict.fromkeys(("labels", "shift_labels", *_FILLS, "seq_idx"), (batch, true_length))
    for name, value in _tensors(arguments):
        if name in shapes and value.shape != shapes[name]:
            return f"{name} has the shape {tuple(value.shape)}"
        if name == "position_ids" and value.shape[-1:] != (true_length,):
            return f"{name} has the shape {tuple(value.shape)}"
        if type(value) not in PLAIN:
            return f"{name} is a {type(value).__name__}"
        is_known = name in shapes or name in _KNOWN
        if not is_known and (true_length in value.shape[1:] or value.shape == (true_length,)):
            return f"the argument {name} may have a value for each token"
    return None


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among arguments, and in their lists, tuples and dicts, with the names of the arguments."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _tensors({f"{name}[{i}]": item for i, item in enumerate(value)})
        elif isinstance(value, dict):
            yield from _tensors({f"{name}[{key!r}]": item for key, item in value.items()})


def _find_mask(arguments: dict[str, Any], x: Tensor, missing: int, rules: PaddingRules) -> Tensor | str | None:
    """Return the mask of a padded call, None if it needs none, or the reason why it cannot have one."""
    mask = arguments.get("attention_mask")
    if mask is None:
        if not missing or not rules.needs_mask(arguments):
            return None
        # With a mask, transformers does not separate the samples of packed input.
        if any(arguments.get(name) is not None for name in _POSITIONS):
            return "its input may be packed, and this model needs a mask that excludes the padding"
        return F.pad(x.new_ones(x.shape[:2], dtype=torch.long), (0, missing))
    if not isinstance(mask, Tensor) or mask.shape != x.shape[:2]:
        return "its attention_mask is not of the shape [B, S]"
    if has_useless_mask(arguments, rules):
        return None
    adds_mask = rules.adds_mask or getattr(rules.config, "_attn_implementation", "") == "eager"
    if missing and adds_mask and _reads_left_padding(mask, arguments):
        return "its loss reads the results of padding on the left, which eager attention computes from all tokens"
    return F.pad(mask, (0, missing)) if missing else mask


def _targets(arguments: dict[str, Any]) -> Tensor | None:
    """Return the label that each position predicts, or None without labels."""
    if isinstance(shifted := arguments.get("shift_labels"), Tensor):
        return shifted
    labels = arguments.get("labels")
    if not isinstance(labels, Tensor):
        return None
    return F.pad(labels[:, 1:], (0, 1), value=arguments.get("ignore_index", _IGNORED))


def _reads_left_padding(mask: Tensor, arguments: dict[str, Any]) -> bool:
    """Return whether a masked token on the left predicts a label. Eager attention to no token is to all tokens."""
    targets = _targets(arguments)
    if targets is None or mask.is_meta or is_capturing(mask):
        return False
    is_left = (mask != 0).cumsum(1) == 0
    return bool((is_left.to(targets.device) & (targets != arguments.get("ignore_index", _IGNORED))).any())


def has_useless_mask(arguments: dict[str, Any], rules: PaddingRules) -> bool:
    """Return whether a call gives the same results without its mask [B, S]; False if it has none. The host waits for
    the device, as transformers would, which looks for zeros in a mask."""
    mask = arguments.get("attention_mask")
    has_positions = any(arguments.get(name) is not None for name in _POSITIONS)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or has_positions or rules.needs_mask(arguments):
        return False
    if mask.is_meta or is_capturing(mask):
        return False
    if bool(mask.all()):
        return True
    targets = _targets(arguments)
    if (
        targets is None
        or (targets.device, targets.shape) != (mask.device, mask.shape)
        or rules.returns_states(arguments)
    ):
        return False
    # The results of masked tokens do not reach the loss, and no token on their left reads them.
    is_valid = mask != 0
    is_ignored = (is_valid | (targets == arguments.get("ignore_index", _IGNORED))).all()
    return bool((is_valid[:, 1:] <= is_valid[:, :-1]).all() & is_ignored)


def _pad_tokens(arguments: dict[str, Any], missing: int, rules: PaddingRules) -> dict[str, Tensor]:
    """Return the padded arguments that have one value or vector for each token."""
    ignored = arguments.get("ignore_index", _IGNORED)
    fills = {"input_ids": rules.token, "labels": ignored, "shift_labels": ignored, **_FILLS}
    padded = {
        name: F.pad(value, (0, missing), value=fills[name])
        for name, value in arguments.items()
        if name in fills and value is not None
    }
    if (embeds := arguments.get("inputs_embeds")) is not None:
        padded["inputs_embeds"] = F.pad(embeds, (0, 0, 0, missing))
    return padded


def _pad_positions(arguments: dict[str, Any], true_length: int, missing: int, rules: PaddingRules) -> dict[str, Any]:
    """Return the padded positions and boundaries of samples. Positions continue those of the last token, because
    transformers would take positions that begin again for a further sample, and attention to samples is slower.
    Attention is causal, so the last sample does not change. If boundaries are given, or if the positions could exceed a
    limit, the positions begin again."""
    padded: dict[str, Any] = {}
    begins_again = any(arguments.get(name) is not None for name in _BOUNDARIES)
    begins_again |= any(limit < true_length + missing for limit in rules.position_limits)
    if (positions := arguments.get("position_ids")) is not None:
        # [..., missing]
        new = torch.arange(missing, dtype=positions.dtype, device=positions.device).expand(
            *positions.shape[:-1], missing
        )
        padded["position_ids"] = torch.cat((positions, new if begins_again else positions[..., -1:] + 1 + new), -1)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if (ends := arguments.get(name)) is not None:
            padded[name] = torch.cat((ends, ends.new_full((1,), true_length + missing)))
    for name in ("max_length_q", "max_length_k"):
        if (longest := arguments.get(name)) is not None:
            padded[name] = longest.clamp(min=missing) if isinstance(longest, Tensor) else max(longest, missing)
    if (samples := arguments.get("seq_idx")) is not None:
        # [B, S]
        padded["seq_idx"] = torch.cat((samples, (samples[:, -1:] + 1).expand(-1, missing)), -1)
    return padded


def cut_output(output: Any, length: int, padded: int) -> Any:
    """Cut the tensors in an output, an object or a dict in place, from the padded length to the true length."""
    if length == padded:
        return output
    if isinstance(output, tuple):
        return tuple(_cut(value, length, padded) for value in output)
    if isinstance(output, Tensor):
        return _cut(output, length, padded)
    # An output of transformers is a dict, and an item is an attribute too.
    is_dict = isinstance(output, dict)
    for name, value in [*(output if is_dict else vars(output)).items()]:
        if (cut := _cut(value, length, padded, name)) is not value:
            output.__setitem__(name, cut) if is_dict else setattr(output, name, cut)
    return output


def _cut(value: Any, length: int, padded: int, name: str = "") -> Any:
    """Cut an output: a tensor [B, S, ...], attention [B, heads, S, S], or logits of routers [B * S, experts]."""
    if name.startswith(_OTHER_OUTPUTS):
        return value
    if type(value) in (tuple, list):
        return type(value)(_cut(item, length, padded, name or "item") for item in value)
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    # A whole output has the dimensions [B, S]. An item of a tuple may be the logits of a router.
    is_flat = "router" in name or (name == "item" and value.shape[1] != padded)
    if value.dim() == 2 and is_flat and value.shape[0] % padded == 0:
        return value.unflatten(0, (-1, padded))[:, :length].flatten(0, 1)
    if value.dim() == 4 and value.shape[2:] == (padded, padded):
        return value[:, :, :length, :length]
    return value[:, :length] if value.shape[1] == padded else value

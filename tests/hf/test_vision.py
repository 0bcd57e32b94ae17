"""Tiny vision-language models with images in the text: every part is patched, also in the vision tower."""

import pytest
import torch
from torch import Tensor, nn

import tigon
from tigon.hf.logits import SKIPPED_LOGITS

transformers = pytest.importorskip("transformers")
from hf.same_step import assert_within_noise, make_batch, noise, step  # noqa: E402
from hf.tiny import VOCABULARY, tiny_config  # noqa: E402

# The token that stands for a part of an image, and the number of such tokens for a whole image.
IMAGE, TOKENS = 130, 4

# Fields that the rules for tiny configs do not set: images of 8 x 8 in patches, and sizes that must agree.
SMALL_IMAGES = {"image_size": 8, "patch_size": 4}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_TOWER = {"depth": 2, "patch_size": 4, "out_hidden_size": 64}
QWEN = {"text_config": {"rope_parameters": SECTIONS}, "image_token_id": IMAGE, "vision_start_token_id": 129}
QWEN3 = QWEN | {"vision_config": QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}}
GLM = {
    "text_config": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}},
    "vision_config": {"depth": 2, "patch_size": 4, "image_size": 8, "out_hidden_size": 64},
    "image_token_id": IMAGE,
}
VISION = {
    "qwen2_vl": QWEN | {"vision_config": {"depth": 2, "patch_size": 4, "embed_dim": 64}},
    "qwen2_5_vl": QWEN | {"vision_config": QWEN_TOWER | {"window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "llava": {
        "vision_config": SMALL_IMAGES, "vision_feature_layer": -1,
        "image_token_index": IMAGE, "image_seq_length": TOKENS,
    },
    "gemma3": {"vision_config": SMALL_IMAGES, "image_token_index": IMAGE, "mm_tokens_per_image": TOKENS},
    "internvl": {"vision_config": {"image_size": [8, 8], "patch_size": [2, 2]}, "image_token_id": IMAGE},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            "image_size": 8, "patch_size": 4, "num_global_layers": 1, "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            "intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * 64,
        },
    },
    "glm4v": GLM,
    "glm4v_moe": GLM,
    "smolvlm": {"vision_config": SMALL_IMAGES, "image_token_id": IMAGE, "scale_factor": 1},
    "llama4": {
        "vision_config": SMALL_IMAGES | {
            "intermediate_size": 64,
            "pixel_shuffle_ratio": 1.0, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
        },
        "image_token_index": IMAGE,
    },
    # The tower of Pixtral.
    "mistral3": {
        "vision_config": SMALL_IMAGES | {"head_dim": 16}, "image_token_index": IMAGE, "spatial_merge_size": 1,
    },
    "gemma4": {
        "vision_config": {
            "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 8, "hidden_size": 64, "head_dim": 16,
            "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        },
        "image_token_id": IMAGE,
    },
    "muse_glimmer": {
        "vision_config": {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        "image_token_id": IMAGE, "out_hidden_size": 256, "projector_hidden_size": 64,
    },
    "paligemma": {
        "vision_config": SMALL_IMAGES | {"projection_dim": 64}, "projection_dim": 64, "image_token_index": IMAGE,
    },
}  # fmt: skip


def vision_model(model_type: str) -> nn.Module:
    config = tiny_config(transformers.AutoConfig.for_model(model_type), VISION[model_type])
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Some of these parameters are gates whose initial value is zero.
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return model


def batch_with_images(model_type: str) -> dict[str, Tensor]:
    """Return two texts that begin with an image, in the form that the processor of the type returns."""
    batch = make_batch(IMAGE - 1)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    # The second image is cut into two tiles.
    if model_type == "mllama":
        tile_mask = torch.tensor([[[1, 0]], [[1, 1]]])
        token_mask = tile_mask[:, None].repeat(1, 12, 1, 1)
        token_mask[:, 0] = 0
        return batch | {
            "pixel_values": torch.stack([images, images.flip(0)], 1)[:, None],
            "aspect_ratio_ids": torch.tensor([[1], [2]]),
            "aspect_ratio_mask": tile_mask,
            "cross_attention_mask": token_mask,
        }
    batch["input_ids"][:, 1 : 1 + TOKENS] = IMAGE
    batch["labels"][:, : 1 + TOKENS] = -100
    token_types = (batch["input_ids"] == IMAGE).long()
    # The images have different shapes, and their patches form one sequence.
    if model_type.startswith(("qwen", "glm", "muse")):
        grid = torch.tensor([[1, 4, 4], [1, 2, 8]])
        patches = torch.randn(32, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
        return batch | {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": token_types}
    # Each image is a row of patches, with the place of each patch.
    if model_type == "gemma4":
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
        patches = torch.rand(2, 16, 3 * 4 * 4, generator=torch.Generator().manual_seed(0))
        positions = {"image_position_ids": places.expand(2, -1, -1), "mm_token_type_ids": token_types}
        return batch | {"pixel_values": patches} | positions
    if model_type == "mistral3":
        batch["image_sizes"] = torch.tensor([[8, 8], [8, 8]])
    # A text may have several images.
    batch["pixel_values"] = images[:, None] if model_type == "smolvlm" else images
    return batch | ({"token_type_ids": token_types} if model_type in ("gemma3", "paligemma") else {})


# These norms of vision towers come after the features that the text model gets.
UNUSED = {"llava": "model.vision_tower.post_layernorm"}
UNUSED |= dict.fromkeys(("gemma3", "paligemma"), "model.vision_tower.head.layernorm")


# The types whose towers or projectors have a GELU outside of an MLP of two layers, and those without such an MLP.
WITH_GELU = {
    "qwen3_vl", "qwen3_vl_moe", "internvl", "glm4v", "glm4v_moe", "llama4", "mistral3", "gemma4", "muse_glimmer",
}  # fmt: skip
WITHOUT_MLP = {"glm4v", "glm4v_moe", "mistral3", "gemma4"}
# The types whose towers have RMS norms in place of layer norms.
WITHOUT_LAYER_NORM = {"qwen2_5_vl", "mistral3", "gemma4"}
# Parts of which some modules keep their forward. Llama 4 computes its loss from the logits of a causal language model
# inside of it, and the rope of the tower of Gemma 4 has several axes in one table.
LEFT_ALONE = {"llama4": ["loss"], "gemma4": ["rope"]}


def parts_of(model_type: str) -> set[str]:
    """Return the parts that are replaced."""
    parts = {"rms_norm", "rope", "fused_statements", "loss"}
    parts |= set() if model_type in WITHOUT_LAYER_NORM else {"layer_norm"}
    parts |= {"experts"} if model_type.endswith("_moe") or model_type == "llama4" else set()
    # The experts of these types have an MLP beside them that all tokens share.
    parts |= {"glu"} if model_type in ("glm4v_moe", "llama4") or not model_type.endswith("_moe") else set()
    parts |= {"gelu"} if model_type in WITH_GELU else set()
    return parts | (set() if model_type in WITHOUT_MLP else {"mlp"})


# Each type gets images. Without them, a model runs its language model alone, which is one for many of these types.
CASES = [*((model_type, True) for model_type in VISION), *((model_type, False) for model_type in [*VISION][::5])]


@pytest.mark.parametrize(("model_type", "images"), CASES)
@pytest.mark.sampled(8)
def test_every_part_gives_the_results_of_stock(model_type, images):
    model = vision_model(model_type)
    batch = batch_with_images(model_type) if images else make_batch(VOCABULARY)
    expected = step(model, batch)
    allowed = noise(model, batch, expected)
    report = tigon.patch(model)
    assert {entry.part for entry in report.replaced} == parts_of(model_type)
    left_alone = [entry.part for entry in report.left_alone]
    assert left_alone == LEFT_ALONE.get(model_type, [])
    assert (model(**batch).logits is SKIPPED_LOGITS) == ("loss" not in left_alone)
    if images:
        norms = {name for entry in report.replaced if "norm" in entry.part for name in entry.names}
        norms = {name for name in norms if getattr(model.get_submodule(name), "weight", None) is not None}
        assert norms - {UNUSED.get(model_type)} == {name for name in norms if f"{name}.weight" in expected}
    assert_within_noise(step(model, batch), expected, allowed, report)
    report.restore()
    assert all(torch.equal(value, expected[name]) for name, value in step(model, batch).items())

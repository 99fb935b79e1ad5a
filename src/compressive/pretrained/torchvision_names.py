"""Rename the weights of torchvision's ViTs and ConvNeXts to timm's names."""

import re

import torchvision
from torch import Tensor

from compressive.augment.published_crop import PublishedCrop
from compressive.pretrained.state_dict import TensorsByName
from compressive.pretrained.timm_weights import Preprocessing

# Patterns of torchvision's names and timm's names, tried in order. torchvision calls the layers of
# an MLP linear_1 and linear_2 in older files.
_VIT_PATTERNS = (
    (r"class_token", "cls_token"),
    (r"conv_proj\.(.+)", r"patch_embed.proj.\1"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.ln_(\d)\.(.+)", r"blocks.\1.norm\2.\3"),
    (
        r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.in_proj_(.+)",
        r"blocks.\1.attn.qkv.\2",
    ),
    (
        r"encoder\.layers\.encoder_layer_(\d+)\.self_attention\.out_proj\.(.+)",
        r"blocks.\1.attn.proj.\2",
    ),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:0|linear_1)\.(.+)", r"blocks.\1.mlp.fc1.\2"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.mlp\.(?:3|linear_2)\.(.+)", r"blocks.\1.mlp.fc2.\2"),
    (r"encoder\.ln\.(.+)", r"norm.\1"),
    (r"heads\.(.+)", r"head.\1"),
)
# Odd numbers of `features` are stages, even ones the layers before them.
_CONVNEXT_PATTERNS = (
    (r"features\.0\.(.+)", r"stem.\1"),
    (r"features\.[1357]\.(\d+)\.block\.0\.(.+)", r"stages.{stage}.blocks.\1.conv_dw.\2"),
    (r"features\.[1357]\.(\d+)\.block\.2\.(.+)", r"stages.{stage}.blocks.\1.norm.\2"),
    (r"features\.[1357]\.(\d+)\.block\.3\.(.+)", r"stages.{stage}.blocks.\1.mlp.fc1.\2"),
    (r"features\.[1357]\.(\d+)\.block\.5\.(.+)", r"stages.{stage}.blocks.\1.mlp.fc2.\2"),
    (r"features\.[1357]\.(\d+)\.layer_scale", r"stages.{stage}.blocks.\1.gamma"),
    (r"features\.[246]\.(.+)", r"stages.{stage}.downsample.\1"),
    (r"classifier\.0\.(.+)", r"head.norm.\1"),
    (r"classifier\.2\.(.+)", r"head.fc.\1"),
)


def torchvision_to_timm(state: TensorsByName) -> dict[str, Tensor] | None:
    """Return the weights of torchvision's ViT or ConvNeXt by timm's names, None for others."""
    if "encoder.pos_embedding" in state and "conv_proj.weight" in state:
        return {_timm_name(name, _VIT_PATTERNS): value for name, value in state.items()}
    if "features.1.0.layer_scale" in state and "features.0.0.weight" in state:
        named = {_timm_name(name, _CONVNEXT_PATTERNS): value for name, value in state.items()}
        # The scale of a channel has shape (channels, 1, 1) in torchvision.
        return {k: v.flatten() if k.endswith(".gamma") else v for k, v in named.items()}
    return None


def _timm_name(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for pattern, new in patterns:
        if found := re.fullmatch(pattern, name):
            number = re.match(r"features\.(\d)", name)
            stage = int(number[1]) // 2 if number else 0  # 1 and 2 to 0 and 1, 3 and 4 to 1 and 2
            return found.expand(new.replace("{stage}", str(stage)))
    return name


def torchvision_preprocessing(name: str) -> Preprocessing:
    """Return the preprocessing of torchvision's first weights of a network with this timm name."""
    own = re.sub(r"vit_(\w)\w*_patch(\d+)_224", r"vit_\1_\2", name)
    if own not in torchvision.models.list_models(torchvision.models):
        return Preprocessing(crop=PublishedCrop(interpolation="bilinear"))
    first = next(iter(torchvision.models.get_model_weights(own))).transforms()
    (size,), (resized,) = first.crop_size, first.resize_size
    crop = PublishedCrop(size / resized, first.interpolation.value)
    return Preprocessing(size, tuple(first.mean), tuple(first.std), crop)

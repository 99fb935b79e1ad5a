"""Infer the network of third-party weights from their names and shapes."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import timm

from compressive.config import RESNETS, Network
from compressive.pretrained.state_dict import FoundBackbone, TensorsByName, find_backbone

# Blocks of the four stages, and whether a block has three convolutions.
_RESNET_BLOCKS: dict[tuple[tuple[int, ...], bool], tuple[str, ...]] = {
    ((2, 2, 2, 2), False): ("resnet18",),
    ((3, 4, 6, 3), False): ("resnet34",),
    ((3, 4, 6, 3), True): ("resnet50", "wide_resnet50_2", "resnext50_32x4d"),
    ((3, 4, 23, 3), True): (
        *("resnet101", "wide_resnet101_2", "resnext101_32x8d", "resnext101_64x4d"),
    ),
    ((3, 8, 36, 3), True): ("resnet152",),
}
_VITS = {  # width and depth
    **{(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"},
    **{(1280, 32): "huge", (1536, 40): "giant"},
}
_CONVNEXTS = {  # width of the first stage and depth of the third
    **{(40, 6): "atto", (48, 6): "femto", (64, 6): "pico", (80, 8): "nano", (96, 9): "tiny"},
    **{(96, 27): "small", (128, 27): "base", (192, 27): "large", (256, 27): "xlarge"},
}
# Published weights of the same kind, whose preprocessing timm knows.
_TAGS = ("tv_in1k", "dino", "lvd142m", "fb_in1k", "fcmae_ft_in1k", "")
SUPPORTED = "ResNets, ViTs (torchvision, DINO, DINOv2, MoCo v3) and ConvNeXts"


class Guess(NamedTuple):
    """A network that the weights may be of."""

    network: Network
    found: FoundBackbone
    size: int = 0  # side of the images that position embeddings are for; 0: any
    tagged: str = ""  # timm name whose preprocessing is the usual one of such weights


def guesses(state: TensorsByName, place: object) -> Iterator[Guess]:
    """Yield the networks that weights may be of, by their names and shapes."""
    for each in (_resnets, _vits, _convnexts):
        yield from each(state, place)


def _resnets(state: TensorsByName, place: object) -> Iterator[Guess]:
    found = find_backbone(state, "conv1.weight", ["bn1.weight", "layer1.0.conv1.weight"])
    if found is None:
        return
    own = found.state
    blocks = tuple(_count_blocks(own, rf"layer{stage}\.(\d+)\.") for stage in (1, 2, 3, 4))
    channels, _, side, _ = own["conv1.weight"].shape
    has_three = "layer1.0.conv3.weight" in own
    stem = "cifar" if side == 3 else "imagenet"
    # Only the ResNet-18 and -34 of the official code project the input of their first block.
    variant = "official" if not has_three and "layer1.0.downsample.0.weight" in own else "timm"
    for name in _RESNET_BLOCKS.get((blocks, has_three), ()):
        width = max(1, channels // 64) if name in RESNETS else 1
        plain = stem == "imagenet" and width == 1 and variant == "timm"
        if name in RESNETS or plain:
            network = Network(name=name, width=width, stem=stem, variant=variant)
            yield Guess(network, found, tagged=_tagged(name))


def _vits(state: TensorsByName, place: object) -> Iterator[Guess]:
    found = find_backbone(state, "patch_embed.proj.weight", ["blocks.0.norm1.weight", "pos_embed"])
    if found is None:
        return
    own = found.state
    width, _, patch, _ = own["patch_embed.proj.weight"].shape
    kind = _VITS.get((width, _count_blocks(own, r"blocks\.(\d+)\.")), "")
    if kind == "small" and re.search("base_encoder|momentum_encoder", found.prefix):
        raise ValueError(
            f"{place} is MoCo v3's ViT-S, which has 12 heads; timm's ViT-S has 6, so its features "
            "would differ; use MoCo v3's ViT-B"
        )
    registers = own.get("register_tokens", own.get("reg_token"))
    name = f"vit_{kind}_patch{patch}_224"
    if "blocks.0.ls1.gamma" in own:
        count = 0 if registers is None else registers.shape[1]
        name = f"vit_{kind}_patch{patch}{f'_reg{count}' if count else ''}_dinov2"
    if not kind or not timm.is_model(name):
        return
    # DINOv2's position embeddings have a class token; timm's with registers do not.
    tokens = own["pos_embed"].shape[1] - (0 if "reg_token" in own else 1)
    size = math.isqrt(tokens) * patch
    if math.isqrt(tokens) ** 2 == tokens:
        yield Guess(Network(name=name), found, size, _tagged(name))


def _convnexts(state: TensorsByName, place: object) -> Iterator[Guess]:
    for first, block in (
        ("stem.0.weight", "stages.0.blocks.0.conv_dw.weight"),
        ("downsample_layers.0.0.weight", "stages.0.0.dwconv.weight"),
    ):
        if (found := find_backbone(state, first, [block])) is None:
            continue
        own = found.state
        depth = _count_blocks(own, r"stages\.2\.(?:blocks\.)?(\d+)\.(?:conv_dw|dwconv)")
        version = "v2" if any(".grn." in name for name in own) else ""
        kind = _CONVNEXTS.get((own[first].shape[0], depth), "")
        name = f"convnext{version}_{kind}"
        if kind and timm.is_model(name):
            yield Guess(Network(name=name), found, tagged=_tagged(name))


def _count_blocks(state: TensorsByName, pattern: str) -> int:
    """Return the number of different blocks that names have."""
    return len({found[1] for name in state if (found := re.match(pattern, name))})


def _tagged(name: str) -> str:
    """Return the timm name with the tag of published weights whose preprocessing fits."""
    known = timm.list_pretrained(f"{name}.*") if timm.is_model_pretrained(name) else []
    return next((f"{name}.{tag}" for tag in _TAGS if f"{name}.{tag}" in known), name)

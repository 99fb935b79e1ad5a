"""Names of weights here -> paths of variables in the official code.

Paths are attributes of Keras objects. The order of variables in a Keras model is not used: a
bottleneck block lists its shortcut first, a basic block last.
"""

from collections.abc import Sequence

_NORM = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "moving_mean",
    "running_var": "moving_variance",
}
_STEM, _GROUPS = "initial_conv_relu_max_pool", "block_groups"
STEM_KERNEL = f"{_STEM}/0/conv2d/kernel"
BOTTLENECK_LAYERS = "conv_relu_dropblock_layers"
CLASSIFIER_PATHS = {
    "classifier.weight": "linear_layer/dense/kernel",
    "classifier.bias": "linear_layer/dense/bias",
}
# Blocks of each group, and whether they are bottlenecks -> timm's name.
BLOCKS: dict[tuple[tuple[int, ...], bool], str] = {
    ((2, 2, 2, 2), False): "resnet18",
    ((3, 4, 6, 3), False): "resnet34",
    ((3, 4, 6, 3), True): "resnet50",
    ((3, 4, 23, 3), True): "resnet101",
    ((3, 8, 36, 3), True): "resnet152",
}


def blocks_path(group: int) -> str:
    """Return the path of the list of blocks of a group."""
    return f"{_GROUPS}/{group}/layers"


def backbone_paths(blocks: Sequence[int], *, bottleneck: bool) -> dict[str, str]:
    """Return timm's names of a ResNet's weights and their paths."""
    if bottleneck:  # drop-block takes a position after each convolution and norm
        layers, count, step, shortcut = BOTTLENECK_LAYERS, 3, 3, "projection_layers"
    else:
        layers, count, step, shortcut = "conv2d_bn_layers", 2, 2, "shortcut_layers"
    found = {"conv1.weight": STEM_KERNEL, **_norm("bn1", f"{_STEM}/2/bn")}
    for group, length in enumerate(blocks):
        for block in range(length):
            here, there = f"layer{group + 1}.{block}", f"{blocks_path(group)}/{block}"
            for i in range(count):
                found[f"{here}.conv{i + 1}.weight"] = f"{there}/{layers}/{step * i}/conv2d/kernel"
                found |= _norm(f"{here}.bn{i + 1}", f"{there}/{layers}/{step * i + 1}/bn")
            if block == 0:
                found[f"{here}.downsample.0.weight"] = f"{there}/{shortcut}/0/conv2d/kernel"
                found |= _norm(f"{here}.downsample.1", f"{there}/{shortcut}/1/bn")
    return found


def mlp_paths(layers: Sequence[int]) -> dict[str, str]:
    """Return the names of the weights of `networks.mlp` and their paths.

    `layers` are the positions of its linear layers in the official list.
    """
    found: dict[str, str] = {}
    for i, position in enumerate(layers):
        found[f"{3 * i}.weight"] = f"linear_layers/{position}/dense/kernel"
        if position != layers[-1]:
            found |= _norm(f"{3 * i + 1}", f"linear_layers/{position}/bn_relu/bn")
    return found


def _norm(here: str, there: str) -> dict[str, str]:
    return {f"{here}.{own}": f"{there}/{official}" for own, official in _NORM.items()}

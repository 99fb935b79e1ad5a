"""Variables of a network in the order of the official code."""

from typing import Any

from torch import Tensor, nn


def layers_in_order(network: Any) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Return convolutions and their norms in TensorFlow's order.

    A bottleneck's projection comes first in its block, a basic block's last.
    """
    pairs = [(network.conv1, network.bn1)]
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        for block in stage:
            own = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
            shortcut = [] if block.downsample is None else [tuple(block.downsample)]
            if hasattr(block, "conv3"):
                pairs += [*shortcut, *own, (block.conv3, block.bn3)]
            else:
                pairs += [*own, *shortcut]
    return pairs


def variables_in_order(network: Any) -> list[Tensor]:
    """Return all trainable variables, then all moving statistics."""
    pairs = layers_in_order(network)
    trained = [t for conv, norm in pairs for t in (conv.weight, norm.weight, norm.bias)]
    moving: list[Any] = [t for _, norm in pairs for t in (norm.running_mean, norm.running_var)]
    return [*trained, *moving]

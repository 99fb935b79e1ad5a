"""Networks that methods are built from."""

import copy

from torch import nn

from compressive.config import Config, method_info
from compressive.networks import Ema, build, feature_dim, mlp


def build_online(config: Config, *, biased_variance: bool = False) -> tuple[nn.Module, nn.Module]:
    """Build a backbone and its projection; the weights come from torch's generator.

    `biased_variance` gives batch norms TensorFlow's running variance (notation.md, row 16).
    """
    network = config.network
    encoder = build(network, config.views.size, biased_variance=biased_variance)
    projection = mlp(
        feature_dim(encoder),
        network.hidden_dim,
        network.projection_dim,
        layers=network.head_layers,
        last_norm=network.head_last_norm,
        biased_variance=biased_variance,
    )
    return encoder, projection


def build_target(
    config: Config, online: tuple[nn.Module, nn.Module], *, biased_variance: bool = False
) -> Ema | None:
    """Build the EMA target of a backbone and projection, if the method has one."""
    if not method_info(config).ema_target:
        return None
    if config.target.independent:
        online = build_online(config, biased_variance=biased_variance)
        return Ema(nn.Sequential(*online))
    return Ema(nn.Sequential(*copy.deepcopy(online)))


def build_predictor(config: Config, *, biased_variance: bool = False) -> nn.Module:
    """Build an MLP from the projection space to itself."""
    out = config.network.projection_dim
    return mlp(out, config.network.hidden_dim, out, biased_variance=biased_variance)

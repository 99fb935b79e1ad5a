"""Tiny encoders for tests of exports."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from compressive.augment.published_crop import PublishedCrop
from compressive.config import Network
from compressive.encoder import Encoder, save
from compressive.exporting.model import ExportModel
from compressive.networks import build, feature_dim


def randomized(network: nn.Module) -> nn.Module:
    """Give batch norms random statistics and weights, so that every layer changes features."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.weight.data.uniform_(0.5, 1.0, generator=generator)
    return network.eval().requires_grad_(False)


def model(
    name: str = "test_resnet",
    size: int = 16,
    *,
    side: int = 32,
    classes: tuple[str, ...] = (),
    crop: PublishedCrop | None = None,
    antialias: bool = False,
    on: str = "cpu",
    **options: Any,
) -> ExportModel:
    """Return a model; on "meta" it has no weights, only their shapes."""
    settings = Network(name=name, **options)
    # Drawing from a truncated normal takes eight times as long: 6 s for a ResNet-50 of width 2.
    drawn = mock.patch.object(nn.init, "trunc_normal_", lambda w, std, a, b: w.normal_(std=std))
    with torch.device(on), torch.no_grad(), drawn:
        network = build(settings, size)
    if on == "cpu":
        randomized(network)
    head = nn.Linear(feature_dim(network), len(classes)) if classes else None
    encoder = Encoder(network, settings, size, side, crop=crop, antialias=antialias).eval()
    return ExportModel(encoder=encoder, source="here", head=head, classes=classes)


def encoder_file(folder: Path, **options: Any) -> Path:
    """Write encoder.safetensors of a tiny network."""
    made = model(**options).encoder
    folder.mkdir(exist_ok=True)
    return save(folder, made.network, made.settings, made.size, made.side)

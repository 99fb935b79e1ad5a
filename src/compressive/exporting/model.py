"""The encoder to export: weights, preprocessing and origin."""

from dataclasses import dataclass, field
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from compressive.classifier import load_classifier
from compressive.encoder import Encoder
from compressive.evaluation.frozen_model import load_encoder
from compressive.networks import feature_dim
from compressive.rundir.checksum import checksum
from compressive.rundir.files import CLASSIFIER, CONFIG, local_path
from compressive.rundir.tensors_file import to_float16


@dataclass(frozen=True, kw_only=True)
class ExportModel:
    """An encoder, with a classifier if it has one."""

    encoder: Encoder
    source: str  # as the user named it
    run: Path | None = None  # its run folder, if it is a run
    head: nn.Linear | None = None
    classes: tuple[str, ...] = field(default=())

    @property
    def output_dim(self) -> int:
        """Return the length of the output: features, or one logit per class."""
        return len(self.classes) if self.head else feature_dim(self.encoder.network)

    @torch.inference_mode()
    def outputs(self, inputs: Tensor) -> Tensor:
        """Return features or logits of preprocessed images."""
        features = self.encoder(inputs)
        return features if self.head is None else self.head(features)

    def weights(self, *, half: bool) -> dict[str, Tensor]:
        """Return the backbone's weights by their timm names; with `half` kernels as float16."""
        return stored_weights(self.encoder.network, half=half)

    def checksum(self) -> str:
        """Return a checksum of all weights."""
        parts = [self.encoder.network, *([self.head] if self.head else [])]
        states = [{f"{i}.{k}": v for k, v in p.state_dict().items()} for i, p in enumerate(parts)]
        return checksum("", {name: value for state in states for name, value in state.items()})


def stored_weights(module: nn.Module, *, half: bool) -> dict[str, Tensor]:
    """Return contiguous weights of a module; with `half` kernels as float16."""
    state = {name: value.contiguous() for name, value in module.state_dict().items()}
    return {name: to_float16(value, name) for name, value in state.items()} if half else state


def load_model(place: str | Path, *, network: str = "", size: int = 0) -> ExportModel:
    """Load an encoder or a classifier on the CPU; raise ValueError if a weight is not finite."""
    path = local_path(place)
    run = path if (path / CONFIG).is_file() else None
    if _is_classifier(path):
        if network or size:
            raise ValueError(f"--network and --size are for third-party weights, not for {place}")
        own = load_classifier(place)
        model = ExportModel(
            encoder=own.encoder, source=str(place), run=run, head=own.head, classes=own.classes
        )
    else:
        encoder = load_encoder(place, network=network or None, size=size)
        model = ExportModel(encoder=encoder, source=str(place), run=run)
    for name, value in model.encoder.network.state_dict().items():
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(
                f"{place} cannot be exported: weight {name} has NaN or infinite values"
            )
    return model


def _is_classifier(path: Path) -> bool:
    """Return whether this is a classifier's file, or a folder that has one."""
    if path.is_dir():
        return (path / CLASSIFIER).is_file()
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    try:
        with safetensors.safe_open(path, "pt") as file:
            return "classes" in (file.metadata() or {})
    except (OSError, safetensors.SafetensorError):  # reported when it is loaded
        return False

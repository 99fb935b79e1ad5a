"""What is evaluated: the encoder of a run or of the package, a file of weights, a timm network."""

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compressive import encoder, networks, weights
from compressive.augment.ops import MEAN, STD, central_share
from compressive.config import Config
from compressive.data.loaders import canvas_side, most_needed
from compressive.data.source import Source, shrunk
from compressive.evaluation import pretrained
from compressive.evaluation.features import Crop, fingerprint
from compressive.methods import Method, build
from compressive.rundir import checkpoint, files, folder

_OTHER_WEIGHTS = (
    f"as the last checkpoint has other weights than {files.ENCODER}; the command that trained the "
    "run goes on and writes both"
)


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A frozen backbone, and how images are prepared for it."""

    name: str
    network: nn.Module
    size: int
    side: int = 0  # longer images were shrunk to it in training; 0: unknown
    antialias: bool = False
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    method: Method | None = None  # of a run of ours: its heads, too
    why_no_method: str = ""  # of a run whose heads are not those of its encoder
    config: Config | None = None
    sha256: str = ""  # of its file; none where it is a name

    @property
    def feature_dim(self) -> int:
        """Length of a feature vector."""
        return networks.feature_dim(self.network)

    def crop(self, share: float | None = None) -> Crop:
        """What it sees of an image; as pretraining has it: CIFAR's images are seen whole."""
        share = share or central_share(self.size)
        return Crop(self.size, share, self.antialias, self.mean, self.std)

    def shrinking(self) -> dict[str, str]:
        """What is done to larger images first, as it is recorded with each number."""
        side = min(self.side or math.inf, most_needed(self.size))
        words = f"longer side to {side}, shorter not below {encoder.least(self.size)}"
        return {"larger_images": f"{words}, antialiased bicubic"}

    def fitted(self, source: Source) -> tuple[Source, int]:
        """These images, shrunk as in training where that leaves what it sees; their canvases."""
        needed, least = canvas_side(source, self.size), encoder.least(self.size)
        side = min(self.side or needed, needed)
        canvas = min(needed, max(side, 2 * least))
        return shrunk(source, side, min(least, canvas), canvas), canvas


def open_subject(
    place: str, device: torch.device, *, network: str = "", size: int = 0
) -> FrozenModel:
    """A run's folder, a file of weights in our, timm's or torchvision's format, or a name.

    A name is that of an encoder that comes with the package, or else timm's of a network.
    """
    path = Path(place)
    if path.is_dir():
        if network or size:
            raise ValueError("--network and --size are for weights of others; a run knows its own")
        subject = _of_run(path, device)
    elif path.is_file():
        subject = _of_file(path, network, size)
    elif (inside := weights.find(place)) is not None:
        if network or size:
            raise ValueError(
                f"--network and --size are for weights of others; {place} knows its own"
            )
        subject = _of_ours(place, inside)
    elif "/" in place or path.suffix in (".pth", ".pt", ".safetensors"):
        raise FileNotFoundError(f"{place} is not there: neither the folder of a run nor a file")
    else:
        subject = _of_name(place, size)
    for part in (subject.network, subject.method):
        if part is not None:
            part.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            part.eval().requires_grad_(False)
    return subject


def _of_run(path: Path, device: torch.device) -> FrozenModel:
    found = encoder.load(path, device)
    config = folder.read_config(path)
    method, why = _method(path, config, device)
    if method is not None and fingerprint(method.encoder) != fingerprint(found.network):
        # Stopped between the two, or one was replaced.
        method, why = None, _OTHER_WEIGHTS
    return FrozenModel(
        name=str(path),
        network=found.network,
        size=found.size,
        side=found.side,
        antialias=config.views.antialias,
        method=method,
        why_no_method=why,
        config=config,
        sha256=_sha256(path / files.ENCODER),
    )


def _method(path: Path, config: Config, device: torch.device) -> tuple[Method | None, str]:
    """The whole method of a run, as its last checkpoint has it; or why there is none."""
    try:
        found = checkpoint.latest(path / files.CHECKPOINTS)
    except ValueError:  # the encoder is a file of its own
        return None, "all checkpoints of the run are damaged"
    if found is None:
        return None, ""
    _, state = found
    if state.get("own_method"):
        return None, "the run's method was made by a program, and cannot be made anew"
    weights: dict[str, Any] = state["learner"]
    method = build(config).to(device)
    start = "method."
    method.load_state_dict(
        {name.removeprefix(start): w for name, w in weights.items() if name.startswith(start)}
    )
    return method, ""


def _of_file(path: Path, name: str, size: int) -> FrozenModel:
    if path.suffix == ".safetensors" and not name:
        try:
            ours = _of_ours(str(path), path)
        except ValueError as error:
            if "does not say which network" not in str(error):
                raise
        else:
            if size:
                raise ValueError("--size is for weights of others; these know their own")
            return ours
    found = pretrained.with_weights(pretrained.read_weights(path), name, size)
    return replace(_of_others(str(path), found, size), sha256=_sha256(path))


def _of_ours(name: str, path: Path) -> FrozenModel:
    ours = encoder.load(path)
    return FrozenModel(
        name=name,
        network=ours.network,
        size=ours.size,
        side=ours.side,
        antialias=ours.antialias,
        sha256=_sha256(path),
    )


def _of_name(name: str, size: int) -> FrozenModel:
    try:
        return _of_others(name, pretrained.pretrained(name, size), size)
    except ValueError as error:
        raise ValueError(f"no folder or file {name!r} here, and {error}{weights.hint()}") from None


def _of_others(place: str, found: pretrained.Published, size: int) -> FrozenModel:
    return FrozenModel(
        name=place if place == found.name else f"{place} ({found.name})",
        network=found.network,
        size=size or found.size,
        mean=found.mean,
        std=found.std,
        antialias=True,  # as such networks are trained
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Open the model to evaluate: a run, a packaged encoder, or third-party weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressive import networks
from compressive.augment.ops import MEAN, STD, central_share
from compressive.augment.published_crop import PublishedCrop
from compressive.config import FINETUNE_METHOD, Config, Data, Network
from compressive.data.loaders import canvas_side, most_needed
from compressive.data.source import Source, shrunk
from compressive.device import pick_device
from compressive.encoder import Encoder, least, load
from compressive.evaluation.features import Crop, network_fingerprint
from compressive.methods import Method, build
from compressive.pretrained.source import ResolvedWeights, is_third_party, resolve
from compressive.rundir import checkpoint, files, folder
from compressive.rundir.sharded_checkpoint import load_shards

_OTHER_WEIGHTS = (
    f"as the last checkpoint has other weights than {files.ENCODER}; run the training command "
    "again, which writes both"
)


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A frozen backbone and the preprocessing of its images."""

    name: str
    network: nn.Module
    size: int
    settings: Network = field(default_factory=Network)
    side: int = 0  # training shrank longer images to it; 0: unknown
    antialias: bool = False
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    published: PublishedCrop | None = None  # the evaluation crop of third-party weights
    method: Method | None = None  # backbone and heads; only for a run
    why_no_method: str = ""  # the reason if the heads of a run cannot be used
    config: Config | None = None  # only for a run

    @property
    def feature_dim(self) -> int:
        """Length of a feature vector."""
        return networks.feature_dim(self.network)

    @property
    def max_pixels(self) -> int:
        """Limit on the pixels of an image: that of the run, or the default."""
        return (Data() if self.config is None else self.config.data).max_pixels

    def crop(self, share: float | None = None) -> Crop:
        """Return the central crop of evaluation; small images are used whole, as in training."""
        share = share or central_share(self.size)
        return Crop(self.size, share, self.antialias, self.mean, self.std, self.published)

    def shrink_protocol(self) -> dict[str, str]:
        """Describe `shrink` for the protocol of a record."""
        side = min(self.side or math.inf, most_needed(self.size))
        sides = f"longer side to {side}, shorter not below {least(self.size)}"
        return {"larger_images": f"{sides}, antialiased bicubic"}

    def shrink(self, source: Source, needed: int = 0) -> tuple[Source, int]:
        """Shrink images as in training, but not below the crop; return them and their side.

        `needed` is `canvas_side` of the images if it is known.
        """
        needed, shortest = needed or canvas_side(source, self.size), least(self.size)
        side = min(self.side or needed, needed)
        canvas = min(needed, max(side, 2 * shortest))
        return shrunk(source, side, min(shortest, canvas), canvas), canvas


def open_model(
    place: str, device: torch.device, *, network: str = "", size: int = 0
) -> FrozenModel:
    """Open a run folder, a file of weights, a folder of timm, a named model or an `hf-hub:` id.

    A name is looked up among the encoders in the package, then among timm's networks.
    """
    if is_third_party(place):
        model = _third_party(place, resolve(place, network, size))
    elif network or size:
        raise ValueError(f"--network and --size are for third-party weights, not for {place}")
    elif (path := files.local_path(place)).is_dir():
        model = _from_run(path, device)
    else:
        model = _own_file(place, place)
    for part in (model.network, model.method):
        if part is not None:
            part.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            part.eval().requires_grad_(False)
    return model


def load_encoder(
    encoder: str | Path,
    device: str | torch.device = "cpu",
    *,
    network: str | nn.Module | None = None,
    size: int = 0,
) -> Encoder:
    """Load an encoder, frozen and in evaluation mode: everything that `evaluate` reads.

    `encoder` is a run folder, a file of weights (ours, timm's, torchvision's, DINO's, MoCo's and
    others), a Hugging Face folder of timm, an `hf-hub:` id, the name of an encoder that comes with
    the package, or a timm model name with its published weights; see docs/weights.md. `network` is
    a timm model name, needed only for third-party weights whose network cannot be inferred, or a
    custom backbone of a run. `size` is the input size of third-party weights; 0: as trained.
    """
    if isinstance(network, nn.Module):
        return load(encoder, device, network=network)
    if not is_third_party(encoder) and not network and not size:
        return load(encoder, device)
    where = pick_device(str(device), called="device")
    model = open_model(str(encoder), where, network=network or "", size=size)
    return Encoder(
        model.network,
        model.settings,
        model.size,
        model.side or most_needed(model.size),
        antialias=model.antialias,
        mean=model.mean,
        std=model.std,
        crop=model.published,
    )


def _from_run(path: Path, device: torch.device) -> FrozenModel:
    model, config = _own_file(str(path), path, device), folder.read_config(path)
    method, why = _load_method(path, config, device)
    if method is not None:
        both = network_fingerprint(method.encoder), network_fingerprint(model.network)
        if both[0] != both[1]:  # training was killed between the two writes, or one was replaced
            method, why = None, _OTHER_WEIGHTS
    return replace(
        model, antialias=config.views.antialias, method=method, why_no_method=why, config=config
    )


def _load_method(path: Path, config: Config, device: torch.device) -> tuple[Method | None, str]:
    """Load the method of a run from its last checkpoint, or return why that is impossible."""
    try:
        found = checkpoint.latest(path / files.CHECKPOINTS, folder.read_run_id(path))
    except ValueError:  # the encoder can still be evaluated without its heads
        return None, "all checkpoints of the run are damaged or of other runs"
    if found is None:
        return None, ""
    saved, state = found
    if config.method == FINETUNE_METHOD:
        return None, "a fine-tuned network has no projection"
    if state.get("custom_method"):
        return None, "the run used a method from Python code, which cannot be rebuilt"
    try:
        state = load_shards(saved, state, "cpu", sharded=False)
    except checkpoint.Damaged as error:
        return None, str(error)
    learner: dict[str, Any] = state.get("learner", {})
    method, start = build(config).to(device), "method."
    own = {name.removeprefix(start): w for name, w in learner.items() if name.startswith(start)}
    if not networks.fits(method, own):
        return None, "the last checkpoint of the run has the weights of another method"
    method.load_state_dict(own)
    return method, ""


def _own_file(name: str, place: str | Path, device: torch.device | str = "cpu") -> FrozenModel:
    return from_encoder(load(place, device), name)


def from_encoder(encoder: Encoder, name: str) -> FrozenModel:
    """Return the backbone of an encoder with its preprocessing."""
    return FrozenModel(
        name=name,
        network=encoder.network,
        settings=encoder.settings,
        size=encoder.size,
        side=encoder.side,
        antialias=encoder.antialias,
        mean=encoder.mean,
        std=encoder.std,
        published=encoder.crop,
    )


def _third_party(place: str, found: ResolvedWeights) -> FrozenModel:
    name = found.network.name
    return FrozenModel(
        name=place if place == name else f"{place} ({name})",
        network=found.backbone,
        settings=found.network,
        size=found.size,
        antialias=found.antialias,
        mean=found.mean,
        std=found.std,
        published=found.crop,
    )


def mean_direction(method: Method) -> Callable[[Tensor], Tensor]:
    """Return a function that maps normalized images to mu(x), the mean direction of e(z|x).

    It is the projection in SimCLR, and the prediction if there is a predictor (MoCo v3, BYOL,
    SimSiam). Plain methods use the same point without the noise.
    """

    @torch.no_grad()
    def direction(images: Tensor) -> Tensor:
        with evaluation_mode(method):
            return method.embeddings(images).mu

    return direction


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode and restore the mode of every submodule afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training

"""Open the model to evaluate: a run, a packaged encoder, a file of weights or a timm network."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressive import networks, weights
from compressive.augment.ops import MEAN, STD, central_share
from compressive.config import FINETUNE_METHOD, Config, Data, Network
from compressive.data.loaders import canvas_side, most_needed
from compressive.data.source import Source, shrunk
from compressive.device import pick_device
from compressive.encoder import Encoder, UnknownNetwork, least, load
from compressive.evaluation import pretrained
from compressive.evaluation.features import Crop, network_fingerprint
from compressive.methods import Method, build
from compressive.rundir import checkpoint, files, folder

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
    network_name: str = ""  # timm's, of third-party weights
    side: int = 0  # training shrank longer images to it; 0: unknown
    antialias: bool = False
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
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
        return Crop(self.size, share, self.antialias, self.mean, self.std)

    def shrink_protocol(self) -> dict[str, str]:
        """Describe `shrink` for the protocol of a record."""
        side = min(self.side or math.inf, most_needed(self.size))
        sides = f"longer side to {side}, shorter not below {least(self.size)}"
        return {"larger_images": f"{sides}, antialiased bicubic"}

    def shrink(self, source: Source) -> tuple[Source, int]:
        """Shrink images as in training, but not below the crop; return them and their side."""
        needed, shortest = canvas_side(source, self.size), least(self.size)
        side = min(self.side or needed, needed)
        canvas = min(needed, max(side, 2 * shortest))
        return shrunk(source, side, min(shortest, canvas), canvas), canvas


def open_model(
    place: str, device: torch.device, *, network: str = "", size: int = 0
) -> FrozenModel:
    """Open a run folder, a file of weights (our format, timm's or torchvision's), or a named model.

    A name is looked up among the encoders in the package, then among timm's networks.
    """
    path = files.local_path(place)
    if path.is_dir():
        if network or size:
            raise ValueError("--network and --size are for third-party weights; a run has its own")
        model = _from_run(path, device)
    elif path.is_file():
        model = _from_file(path, network, size)
    elif (inside := weights.find(place)) is not None:
        if network or size:
            raise ValueError(f"--network and --size are for third-party weights, not for {place}")
        model = _own_file(place, inside)
    elif "/" in place or path.suffix in (".pth", ".pt", ".safetensors"):
        raise FileNotFoundError(f"{place} does not exist: neither a run folder nor a file")
    else:
        try:
            model = _third_party(place, pretrained.pretrained(place, size), size)
        except ValueError as error:
            hint = weights.hint()
            raise ValueError(f"no folder or file {place!r} here, and {error}{hint}") from None
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

    `encoder` is a run folder, a file of weights (in our, timm's or torchvision's format), the name
    of an encoder that comes with the package, or a timm model name with its published weights.
    `network` is a timm model name, needed only for third-party weights, or a custom backbone of a
    run. `size` is the input size of third-party weights; 0: as trained.
    """
    if isinstance(network, nn.Module):
        return load(encoder, device, network=network)
    path = files.local_path(encoder)
    is_ours = path.is_dir() or path.suffix == ".safetensors" or weights.find(str(encoder))
    if is_ours and not network and not size:
        with suppress(UnknownNetwork):
            return load(encoder, device)
    where = pick_device(str(device), called="device")
    model = open_model(str(encoder), where, network=network or "", size=size)
    return Encoder(
        model.network,
        Network(name=model.network_name),
        model.size,
        model.side or most_needed(model.size),
        antialias=model.antialias,
        mean=model.mean,
        std=model.std,
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
    _, state = found
    if config.method == FINETUNE_METHOD:
        return None, "a fine-tuned network has no projection"
    if state.get("custom_method"):
        return None, "the run used a method from Python code, which cannot be rebuilt"
    learner: dict[str, Any] = state.get("learner", {})
    method, start = build(config).to(device), "method."
    own = {name.removeprefix(start): w for name, w in learner.items() if name.startswith(start)}
    if not networks.fits(method, own):
        return None, "the last checkpoint of the run has the weights of another method"
    method.load_state_dict(own)
    return method, ""


def _from_file(path: Path, name: str, size: int) -> FrozenModel:
    if path.suffix == ".safetensors" and not name:
        with suppress(UnknownNetwork):
            model = _own_file(str(path), path)
            if size:
                raise ValueError(f"--size is for third-party weights, not for {path}")
            return model
    found = pretrained.with_weights(pretrained.read_weights(path), name, size)
    return _third_party(str(path), found, size)


def _own_file(name: str, path: Path, device: torch.device | str = "cpu") -> FrozenModel:
    own = load(path, device)
    return FrozenModel(
        name=name, network=own.network, size=own.size, side=own.side, antialias=own.antialias
    )


def _third_party(place: str, found: pretrained.Published, size: int) -> FrozenModel:
    return FrozenModel(
        name=place if place == found.name else f"{place} ({found.name})",
        network=found.network,
        network_name=found.name.partition(".")[0],
        size=size or found.size,
        mean=found.mean,
        std=found.std,
        antialias=True,  # as in the training of such networks
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

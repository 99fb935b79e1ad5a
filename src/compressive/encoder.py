"""The product of a run: a frozen backbone with its preprocessing, saved and loaded."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import safetensors
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from compressive import weights
from compressive.augment.ops import center_crop, central_share, normalize, planar
from compressive.checks import validates_inputs
from compressive.config import Network, from_dict
from compressive.data.decode import Unreadable, decode, first_line, rgb, shrink
from compressive.networks import build, feature_dim, fits
from compressive.rundir.files import ENCODER, write_bytes

_FACTS = frozenset({"network", "size", "side"})  # what a file of ours says of itself


class UnknownNetwork(ValueError):
    """A safetensors file without our metadata."""


Picture = str | Path | Image.Image | UInt8[Tensor, "3 h w"]


class Encoder(nn.Module):
    """A backbone and how images must be prepared for it.

    `encoder(encoder.preprocess(images))` gives one feature vector per image: the deterministic
    output h of the backbone, without the heads that pretraining put behind it. Its weights are
    frozen; `encoder.requires_grad_(True).train()` fine-tunes them.
    """

    def __init__(
        self,
        network: nn.Module,
        settings: Network,
        size: int,
        side: int,
        *,
        antialias: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.settings = settings
        self.size = size  # of what the network sees
        self.side = side  # of the canvases in training: longer images were shrunk to it first
        self.antialias = antialias  # whether its views were

    @property
    def feature_dim(self) -> int:
        """Length of a feature vector."""
        return feature_dim(self.network)

    @validates_inputs
    def forward(self, images: Float[Tensor, "batch 3 size size"]) -> Float[Tensor, "batch feat"]:
        """Features of prepared images."""
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(
                "an encoder takes a batch that encoder.preprocess has made, got "
                f"{images.dtype} of shape {tuple(images.shape)}"
            )
        return self.network(images)

    @validates_inputs
    def preprocess(
        self, images: Picture | Sequence[Picture] | UInt8[Tensor, "batch 3 h w"]
    ) -> Float[Tensor, "batch 3 size size"]:
        """Images as the encoder saw them in training: shrunk, centered, normalized, on its device.

        Takes paths, PIL images or uint8 tensors, one or many.
        """
        device = next(self.parameters()).device
        if isinstance(images, Tensor) and images.ndim == 4:
            images = planar(images)
            if max(images.shape[2:]) <= self.side:
                return self._seen(images.to(device))
            images = list(images)
        many = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
        if not many:
            raise ValueError("no images were given")
        # Bytes are shrunk on the host: torch has no antialiased resizing of them elsewhere.
        small = [shrink(_pixels(one).cpu(), self.side, least(self.size)) for one in many]
        return torch.cat([self._seen(one[None].to(device)) for one in small])

    def _seen(self, images: UInt8[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch 3 size size"]:
        return normalize(center_crop(images, self.size, antialias=self.antialias))


def least(size: int) -> int:
    """Pixels of the shorter side from which a network that sees `size` has them all."""
    return math.ceil(size / central_share(size))


def save(
    folder: Path,
    network: nn.Module,
    settings: Network,
    size: int,
    side: int,
    *,
    antialias: bool = False,
) -> Path:
    """Write encoder.safetensors: the backbone's weights by their timm names.

    `timm.create_model(name, num_classes=0, checkpoint_path=...)` loads it where timm has the same
    network; with `stem=cifar`, `width` above 1, or `variant=official` of ResNet-18 and -34 only
    `load` does. With `variant=official` of deeper ones timm loads it and computes different
    features.
    """
    views = {"size": str(size), "side": str(side), "antialias": json.dumps(antialias)}
    about = {"network": json.dumps(asdict(settings)), **views, "format": "pt"}
    weights = {name: value.contiguous() for name, value in network.state_dict().items()}
    path = folder / ENCODER
    write_bytes(path, _content(weights, about))
    return path


def pack(place: str | Path, target: Path, about: Mapping[str, str] | None = None) -> Path:
    """Write an encoder again in half the bytes, with facts about it, such as recipe and seed.

    Its matrices and kernels are rounded to float16; what has one axis (biases, batch norms with
    their statistics) and counters are kept as they are. `load` makes float32 of all again.
    """
    path = _file(place)
    kept, weights = _read(path)
    if taken := (_FACTS | {"antialias", "format"}) & (about or {}).keys():
        raise ValueError(f"about must leave {min(taken)!r} to the encoder, which has its own")
    rounded = {name: _rounded(value, f"{name} of {path}") for name, value in weights.items()}
    write_bytes(target, _content(rounded, {**kept, **(about or {})}))
    return target


def _content(weights: dict[str, Tensor], about: dict[str, str]) -> bytes:
    """A safetensors file whose bytes are the same whenever it is written.

    The library writes what is said about the weights in another order each time, and results
    know their encoder by its checksum.
    """
    content = serialize(weights, about)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(about.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def load(
    place: str | Path, device: str | torch.device = "cpu", *, network: nn.Module | None = None
) -> Encoder:
    """The encoder of a run, given its folder or its encoder.safetensors; frozen, not training.

    Or one that comes with the package, by its name (`shipped.names`) where no file has that name.
    `network` takes the weights of a run whose backbone was your own.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise ValueError(f"device {device} cannot be used here: {first_line(error)}") from None
    about, weights = _read(_file(place), device)
    settings = from_dict({"network": json.loads(about["network"])}).network
    size, side = int(about["size"]), int(about["side"])
    network = build(settings, size) if network is None else network
    if not fits(network, weights):
        raise ValueError(
            f"{place} has the weights of another network than {settings.name} or the given one; "
            "the encoder of a run with a backbone of its own: compressive.load(PLACE, network=...)"
        )
    network.load_state_dict(weights)
    antialias = about.get("antialias") == "true"  # older files do not say, and were not
    ours = Encoder(network, settings, size, side, antialias=antialias)
    return ours.to(device).eval().requires_grad_(False)


def _file(place: str | Path) -> Path:
    path = Path(place).expanduser()
    if path.is_dir():
        path = path / ENCODER
    elif isinstance(place, str) and not path.exists():
        path = weights.find(place) or path
    if not path.is_file():
        raise FileNotFoundError(
            f"no encoder at {path}; give the folder of a run that has finished or saved, "
            f"or its {ENCODER}{weights.hint()}"
        )
    return path


def _read(
    path: Path, device: str | torch.device = "cpu"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file of ours says of itself, and its weights."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
        weights = load_file(path, device=str(device))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    if not about.keys() >= _FACTS:
        raise UnknownNetwork(f"{path} does not say which network it is of; timm may load it")
    return about, weights


def _rounded(value: Tensor, name: str) -> Tensor:
    if value.ndim < 2 or not value.is_floating_point():
        return value
    half, exact = value.half(), value.double()
    # Float16 keeps 11 bits, so that half of 2^-10 is lost at most; more only where values are too
    # large for it, or most of them too small. Not "greater": nan must be refused, too.
    if not (half - exact).norm() <= 2**-10 * exact.norm():
        largest = exact.abs().max().item()
        raise ValueError(
            f"{name} does not fit float16, which holds 6e-5 to 65504: "
            f"its largest value is {largest:.3g}; keep the encoder in float32"
        )
    return half


@validates_inputs
def _pixels(picture: Picture) -> UInt8[Tensor, "3 h w"]:
    if isinstance(picture, Tensor):
        return planar(picture[None])[0]
    if not isinstance(picture, str | os.PathLike | Image.Image):
        raise TypeError(
            "an image must be a path, a PIL image or a uint8 tensor of shape (3, h, w), "
            f"got {type(picture).__name__}; PIL.Image.fromarray makes one of an array"
        )
    try:
        return rgb(picture) if isinstance(picture, Image.Image) else decode(_bytes(picture))
    except Unreadable as problem:
        raise ValueError(f"{picture} cannot be read: {problem}") from None


def _bytes(path: str | os.PathLike[str]) -> bytes:
    path = Path(path).expanduser()
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give its images, or use `compressive embed`")
    return path.read_bytes()

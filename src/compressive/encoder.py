"""Save and load the trained encoder: a frozen backbone with its preprocessing."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn

from compressive import weights
from compressive.augment.ops import MEAN, STD, center_crop, central_share, normalize, planar
from compressive.augment.published_crop import PublishedCrop
from compressive.checks import validates_inputs
from compressive.config import Network, from_dict
from compressive.data.decode import Unreadable, decode, first_line, rgb, shrink
from compressive.data.source import read_file
from compressive.device import check_device
from compressive.networks import build, feature_dim, fits
from compressive.platforms.shapes_only import allocate, shapes_only
from compressive.rundir.checksum import CHECKSUM_KEY
from compressive.rundir.files import ENCODER, local_path, write_bytes
from compressive.rundir.folder import check_run_id
from compressive.rundir.tensors_file import read_safetensors, reproducible_bytes, round_weights
from compressive.rundir.versions import FORMAT_KEY, check_format

__all__ = ["Encoder", "ImageInput", "load", "pack", "save"]

_METADATA = frozenset({"network", "size", "side", "antialias"})  # keys of encoder.safetensors
_MAX_SIDE = 2**15  # pixels; a float32 image of that side has 13 GB

ImageInput = str | Path | Image.Image | UInt8[Tensor, "3 h w"]


_USAGE = "features: <code>encoder(encoder.preprocess(images))</code>"


class UnknownNetwork(ValueError):
    """Raised for a safetensors file without the metadata of an encoder."""


class Encoder(nn.Module):
    """A backbone with its preprocessing.

    `encoder(encoder.preprocess(images))` returns one feature vector per image: the deterministic
    output h of the backbone, without the projection heads of pretraining. The weights are frozen;
    call `encoder.requires_grad_(True).train()` to fine-tune them.
    """

    def __init__(
        self,
        network: nn.Module,
        settings: Network,
        size: int,
        side: int,
        *,
        antialias: bool = False,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
        crop: PublishedCrop | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.settings = settings
        self.size = size  # input side of the network, in pixels
        self.side = side  # data.max_side: larger images were shrunk to it before views were taken
        self.antialias = antialias  # whether views were resized with antialiasing
        self.mean: tuple[float, ...] = mean  # of the normalization, by channel
        self.std: tuple[float, ...] = std
        self.crop = crop  # the evaluation crop of third-party weights

    def __repr__(self) -> str:
        count = sum(weight.numel() for weight in self.parameters())
        network = f"{self.settings.name}, {count / 1e6:.1f} million weights"
        device = next(self.parameters()).device
        return f"<Encoder {network}: {self.size} pixels -> {self.feature_dim} features, {device}>"

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code><p>{_USAGE}</p>"

    @property
    def feature_dim(self) -> int:
        """Return the length of a feature vector."""
        return feature_dim(self.network)

    @validates_inputs
    def forward(self, images: Float[Tensor, "batch 3 size size"]) -> Float[Tensor, "batch feat"]:
        """Return features of preprocessed images."""
        if images.ndim != 4 or not images.is_floating_point():
            got = f"{images.dtype} of shape {tuple(images.shape)}"
            raise ValueError(f"an encoder takes the output of encoder.preprocess, got {got}")
        return self.network(images)

    @validates_inputs
    def preprocess(
        self, images: ImageInput | Sequence[ImageInput] | UInt8[Tensor, "batch 3 h w"]
    ) -> Float[Tensor, "batch 3 size size"]:
        """Shrink, crop and normalize one or many images as in training, on the encoder's device."""
        device = next(self.parameters()).device
        if isinstance(images, Tensor) and images.ndim == 4:
            images = planar(images)
            if self.crop is not None or max(images.shape[2:]) <= self.side:
                return self._seen(images.to(device))
            images = list(images)
        many = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
        if not many:
            raise ValueError("no images were given")
        # Shrink on the CPU: torch resizes uint8 with antialiasing only there.
        small = map(_to_uint8, many)
        if self.crop is None:
            small = (shrink(one.cpu(), self.side, least(self.size)) for one in small)
        return torch.cat([self._seen(one[None].to(device)) for one in small])

    def _seen(self, images: UInt8[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch 3 size size"]:
        if self.crop is not None:
            cropped = self.crop(images, self.size)
        else:
            cropped = center_crop(images, self.size, antialias=self.antialias)
        return normalize(cropped, mean=self.mean, std=self.std)


def least(size: int) -> int:
    """Return the shorter side of an image whose central crop has `size` pixels."""
    return math.ceil(size / central_share(size))


def save(
    folder: Path,
    network: nn.Module,
    settings: Network,
    size: int,
    side: int,
    *,
    antialias: bool = False,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
    run_id: str = "",
) -> Path:
    """Write encoder.safetensors: the backbone's weights by their timm names, and metadata.

    `timm.create_model(name, num_classes=0, checkpoint_path=...)` loads it if timm has the same
    network. Only `load` reads networks with `stem=cifar`, `width` above 1, or `variant=official` of
    ResNet-18 and -34. With `variant=official` of deeper ones timm computes different features.
    """
    encoder = Encoder(network, settings, size, side, antialias=antialias, mean=mean, std=std)
    path = folder / ENCODER
    more = {"run_id": run_id} if run_id else {}
    write_bytes(path, reproducible_bytes(network.state_dict(), describe(encoder) | more))
    return path


def describe(encoder: Encoder) -> dict[str, str]:
    """Return the metadata of an encoder's file: the network and the preprocessing."""
    views = {"size": str(encoder.size), "side": str(encoder.side)}
    views["antialias"] = json.dumps(encoder.antialias)
    if (encoder.mean, encoder.std) != (MEAN, STD):
        views |= {"mean": json.dumps(encoder.mean), "std": json.dumps(encoder.std)}
    if encoder.crop is not None:
        views["crop"] = json.dumps(encoder.crop)
    return {"format": "pt", "network": json.dumps(asdict(encoder.settings)), **views}


def pack(
    place: str | Path, target: Path, about: Mapping[str, str] | None = None, *, bits: int = 16
) -> Path:
    """Write an encoder with 16 or 8 bits per weight and more metadata, such as its recipe and seed.

    Matrices and kernels are rounded to float16 or, if they are large, to 8 bits with a scale per
    output channel. Tensors with one axis (biases, batch norms with their statistics) and counters
    are kept. `load` converts all to float32.
    """
    path = _find_file(place)
    kept, weights = _read_file(path)
    if taken := (_METADATA | {"format", FORMAT_KEY, CHECKSUM_KEY}) & (about or {}).keys():
        raise ValueError(f"about must not contain {min(taken)!r}, which the encoder sets itself")
    rounded = round_weights(weights, bits, str(path))
    write_bytes(target, reproducible_bytes(rounded, {**kept, **(about or {})}))
    return target


def load(
    place: str | Path, device: str | torch.device = "cpu", *, network: nn.Module | None = None
) -> Encoder:
    """Load an encoder from a run folder or an encoder.safetensors, frozen and in evaluation mode.

    If there is no such file or folder, `place` may name an encoder of the package
    (`weights.names`). Pass `network` to load the weights of a custom backbone.
    """
    check_device(device)
    path = _find_file(place)
    metadata, weights = _read_file(path)
    check_run_id(place, path, metadata)
    return restore(path, metadata, weights, network).to(device)


def restore(
    path: Path,
    metadata: Mapping[str, str],
    weights: Mapping[str, Tensor],
    network: nn.Module | None = None,
) -> Encoder:
    """Build an encoder from the content of a file, frozen and in evaluation mode, on the CPU."""
    try:
        settings = from_dict({"network": json.loads(metadata["network"])}).network
        size, side = int(metadata["size"]), int(metadata["side"])
        if not (8 <= size <= _MAX_SIDE and 1 <= side <= _MAX_SIDE):
            raise ValueError(f"size {size} and side {side}, but at most {_MAX_SIDE} are allowed")
        mean, std = (_channels(metadata, name) for name in ("mean", "std"))
        crop = PublishedCrop.from_list(json.loads(metadata.get("crop", "null")))
        planned = network
        if network is None:
            with shapes_only():  # allocate nothing: the metadata may be wrong
                planned = build(settings, size)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also RecursionError
        why = first_line(error)
        raise ValueError(f"{path} is damaged: its metadata are invalid ({why})") from None
    if planned is None or not fits(planned, weights):
        raise ValueError(
            f"{path} has the weights of another network than {settings.name} or the given one; "
            "load a custom backbone with compressive.load(PLACE, network=...)"
        )
    if network is None:  # initializing weights that are then replaced takes seconds
        not_stored = dict(planned.named_buffers()).keys() - planned.state_dict().keys()
        network = build(settings, size) if not_stored else allocate(planned)
    network.load_state_dict(weights)
    antialias = metadata["antialias"] == "true"
    views = {"antialias": antialias, "mean": mean, "std": std, "crop": crop}
    encoder = Encoder(network, settings, size, side, **views)
    return encoder.eval().requires_grad_(False)


def _channels(metadata: Mapping[str, str], name: str) -> tuple[float, ...]:
    """Return the mean or standard deviation of the normalization; files of our runs omit it."""
    if name not in metadata:
        return {"mean": MEAN, "std": STD}[name]
    values = json.loads(metadata[name])
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"{name} must have 3 numbers, got {metadata[name]}")
    numbers = tuple(float(value) for value in values)
    if not all(map(math.isfinite, numbers)) or (name == "std" and min(numbers) <= 0):
        raise ValueError(f"{name} must be finite, and a deviation above 0, got {metadata[name]}")
    return numbers


def _find_file(place: str | Path) -> Path:
    path = local_path(place)
    if path.is_dir():
        path = path / ENCODER
    elif isinstance(place, str) and not path.exists():
        path = weights.find(place) or path
    if not path.is_file():
        raise FileNotFoundError(
            f"no encoder at {path}; give the folder of a run that has saved one, "
            f"or its {ENCODER}{weights.hint()}"
        )
    return path


def _read_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and weights of an encoder.safetensors."""
    metadata, tensors = read_safetensors(path)
    if "network" not in metadata:
        raise UnknownNetwork(f"{path} does not say which network it is for; timm may load it")
    if "classes" in metadata:
        hint = f"use the {ENCODER} of its run, or `compressive predict`"
        raise ValueError(f"{path} is a classifier, not an encoder; {hint}")
    return check_metadata(path, metadata), tensors


def check_metadata(path: Path, metadata: dict[str, str]) -> dict[str, str]:
    """Return the metadata of a file; raise ValueError for another format or missing entries."""
    check_format(path, ENCODER, metadata.get(FORMAT_KEY))
    if absent := _METADATA - metadata.keys():
        raise ValueError(f"{path} is damaged: its metadata lack {min(absent)!r}")
    return metadata


@validates_inputs
def _to_uint8(picture: ImageInput) -> UInt8[Tensor, "3 h w"]:
    if isinstance(picture, Tensor):
        return planar(picture[None])[0]
    if not isinstance(picture, str | os.PathLike | Image.Image):
        raise TypeError(
            "an image must be a path, a PIL image or a uint8 tensor of shape (3, h, w), "
            f"got {type(picture).__name__}; convert an array with PIL.Image.fromarray"
        )
    try:
        if isinstance(picture, Image.Image):
            return rgb(picture)
        if (path := local_path(picture)).is_dir():
            raise ValueError(f"{path} is a folder; give its images, or use `compressive embed`")
        return decode(read_file(str(path)))
    except Unreadable as problem:
        raise ValueError(f"{picture} cannot be read: {problem}") from None

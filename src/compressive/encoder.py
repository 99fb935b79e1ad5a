"""Save and load the trained encoder: a frozen backbone with its preprocessing."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import safetensors
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, nn

from compressive import weights
from compressive.augment.ops import MEAN, STD, center_crop, central_share, normalize, planar
from compressive.checks import validates_inputs
from compressive.config import Network, from_dict
from compressive.data.decode import Unreadable, decode, first_line, rgb, shrink
from compressive.data.source import read_file
from compressive.networks import build, feature_dim, fits
from compressive.rundir.checksum import CHECKSUM_KEY, file_checksum
from compressive.rundir.files import ENCODER, local_path, write_bytes
from compressive.rundir.folder import read_run_id
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS, check_format

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
    ) -> None:
        super().__init__()
        self.network = network
        self.settings = settings
        self.size = size  # input side of the network, in pixels
        self.side = side  # data.max_side: larger images were shrunk to it before views were taken
        self.antialias = antialias  # whether views were resized with antialiasing
        self.mean, self.std = mean, std  # of the normalization, by channel

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
            if max(images.shape[2:]) <= self.side:
                return self._seen(images.to(device))
            images = list(images)
        many = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
        if not many:
            raise ValueError("no images were given")
        # Shrink on the CPU: torch resizes uint8 with antialiasing only there.
        small = [shrink(_to_uint8(one).cpu(), self.side, least(self.size)) for one in many]
        return torch.cat([self._seen(one[None].to(device)) for one in small])

    def _seen(self, images: UInt8[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch 3 size size"]:
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
    run_id: str = "",
) -> Path:
    """Write encoder.safetensors: the backbone's weights by their timm names, and metadata.

    `timm.create_model(name, num_classes=0, checkpoint_path=...)` loads it if timm has the same
    network. Only `load` reads networks with `stem=cifar`, `width` above 1, or `variant=official` of
    ResNet-18 and -34. With `variant=official` of deeper ones timm computes different features.
    """
    views = {"size": str(size), "side": str(side), "antialias": json.dumps(antialias)}
    metadata = {"format": "pt", "network": json.dumps(asdict(settings)), **views}
    metadata |= {"run_id": run_id} if run_id else {}
    weights = {name: value.contiguous() for name, value in network.state_dict().items()}
    path = folder / ENCODER
    write_bytes(path, _reproducible_bytes(weights, metadata))
    return path


def pack(place: str | Path, target: Path, about: Mapping[str, str] | None = None) -> Path:
    """Write an encoder with float16 weights and more metadata, such as its recipe and seed.

    Matrices and kernels are rounded to float16. Tensors with one axis (biases, batch norms with
    their statistics) and counters are kept. `load` converts all to float32.
    """
    path = _find_file(place)
    kept, weights = _read_file(path)
    if taken := (_METADATA | {"format", FORMAT_KEY, CHECKSUM_KEY}) & (about or {}).keys():
        raise ValueError(f"about must not contain {min(taken)!r}, which the encoder sets itself")
    rounded = {name: to_float16(value, f"{name} of {path}") for name, value in weights.items()}
    write_bytes(target, _reproducible_bytes(rounded, {**kept, **(about or {})}))
    return target


def _reproducible_bytes(weights: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Serialize with a checksum and sorted metadata: equal content gives equal bytes."""
    metadata = metadata | {FORMAT_KEY: str(FORMAT_VERSIONS[ENCODER])}
    metadata[CHECKSUM_KEY] = file_checksum(metadata, weights)
    # safetensors writes metadata in random order.
    content = serialize(weights, metadata)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def load(
    place: str | Path, device: str | torch.device = "cpu", *, network: nn.Module | None = None
) -> Encoder:
    """Load an encoder from a run folder or an encoder.safetensors, frozen and in evaluation mode.

    If there is no such file or folder, `place` may name an encoder of the package
    (`weights.names`). Pass `network` to load the weights of a custom backbone.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter if torch was built without CUDA
        raise ValueError(f"device {device} cannot be used here: {first_line(error)}") from None
    path = _find_file(place)
    metadata, weights = _read_file(path)
    ids = {metadata.get("run_id", ""), read_run_id(path.parent)} - {""}
    if len(ids) > 1 and Path(place).is_dir():
        hint = f"run the training command again to write it, or give {path} itself"
        raise ValueError(f"{path} is of another run than {place}; {hint}")
    try:
        settings = from_dict({"network": json.loads(metadata["network"])}).network
        size, side = int(metadata["size"]), int(metadata["side"])
        if not (8 <= size <= _MAX_SIDE and 1 <= side <= _MAX_SIDE):
            raise ValueError(f"size {size} and side {side}, but at most {_MAX_SIDE} are allowed")
        planned = network
        if network is None:
            with torch.device("meta"):  # allocate nothing: the metadata may be wrong
                planned = build(settings, size)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:  # also RecursionError
        why = first_line(error)
        raise ValueError(f"{path} is damaged: its metadata are invalid ({why})") from None
    if planned is None or not fits(planned, weights):
        raise ValueError(
            f"{place} has the weights of another network than {settings.name} or the given one; "
            "load a custom backbone with compressive.load(PLACE, network=...)"
        )
    if network is None:  # initializing weights that are then replaced takes seconds
        not_stored = dict(planned.named_buffers()).keys() - planned.state_dict().keys()
        network = build(settings, size) if not_stored else planned.to_empty(device="cpu")
    network.load_state_dict(weights)
    encoder = Encoder(network, settings, size, side, antialias=metadata["antialias"] == "true")
    return encoder.to(device).eval().requires_grad_(False)


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


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and tensors of a file; raise ValueError if its checksum does not fit."""
    path.open("rb").close()  # safetensors reports every error as "No such file"
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        tensors = load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    # Third-party files and files of format 2 have no checksum.
    expected = shipped = weights.known_checksum(path)
    is_ours = not metadata.keys().isdisjoint({"network", CHECKSUM_KEY})
    if is_ours and metadata.get(FORMAT_KEY) == str(FORMAT_VERSIONS[ENCODER]):
        expected = metadata.get(CHECKSUM_KEY, "missing")
    if expected not in (None, file_checksum(metadata, tensors)):
        hint = "restore it from a copy, or run the training command again, which writes it"
        hint = "install the package again" if shipped else hint
        raise ValueError(f"{path} is damaged: its content does not fit its checksum; {hint}")
    return metadata, tensors


def _read_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and weights of an encoder.safetensors."""
    metadata, tensors = read_safetensors(path)
    if "network" not in metadata:
        raise UnknownNetwork(f"{path} does not say which network it is for; timm may load it")
    check_format(path, ENCODER, metadata.get(FORMAT_KEY))
    if absent := _METADATA - metadata.keys():
        raise ValueError(f"{path} is damaged: its metadata lack {min(absent)!r}")
    return metadata, tensors


def to_float16(value: Tensor, name: str) -> Tensor:
    if value.ndim < 2 or not value.is_floating_point():
        return value
    half, exact = value.half(), value.double()
    # Float16 has 11 bits, so rounding loses at most half of 2^-10. The loss is larger only if
    # values are too large for float16, or most are too small. Use `not <=`, so that NaN fails too.
    if not (half - exact).norm() <= 2**-10 * exact.norm():
        largest = exact.abs().max().item()
        raise ValueError(
            f"{name} does not fit float16, which holds 6e-5 to 65504: "
            f"its largest value is {largest:.3g}; keep the encoder in float32"
        )
    return half


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

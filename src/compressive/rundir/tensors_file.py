"""Read and write safetensors files with a checksum."""

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor, from_numpy, int8

from compressive import weights
from compressive.platforms.float64 import to_float64
from compressive.rundir.checksum import CHECKSUM_KEY, file_checksum
from compressive.rundir.eight_bits import SCALE_SUFFIX, from_int8, to_int8
from compressive.rundir.files import ENCODER
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS

WEIGHT_BITS = (32, 16, 8)
# Smaller kernels have at least 16 bits: in a ResNet-18 they are 2 % of the file and cause a third
# of the error.
_LEAST_FOR_INT8 = 2**16
_WITH_CHECKSUM = ("3", "4", str(FORMAT_VERSIONS[ENCODER]))


def reproducible_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Serialize with a checksum and sorted metadata: equal content gives equal bytes."""
    tensors = {name: value.cpu().contiguous() for name, value in tensors.items()}
    metadata = {**metadata, FORMAT_KEY: str(FORMAT_VERSIONS[ENCODER])}
    metadata[CHECKSUM_KEY] = file_checksum(metadata, tensors)
    # safetensors writes metadata in random order.
    content = serialize(tensors, metadata)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


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
    expected = None
    is_ours = not metadata.keys().isdisjoint({"network", CHECKSUM_KEY})
    if is_ours and metadata.get(FORMAT_KEY) in _WITH_CHECKSUM:
        expected = metadata.get(CHECKSUM_KEY, "missing")
    if expected not in (None, file_checksum(metadata, tensors)):
        hint = "restore it from a copy, or run the training command again, which writes it"
        hint = "install the package again" if weights.is_packaged(path) else hint
        raise ValueError(f"{path} is damaged: its content does not fit its checksum; {hint}")
    return metadata, _without_int8(tensors, path) if is_ours else tensors


def _without_int8(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return float32 weights for those with 8 bits, and other tensors as they are."""
    arrays = {name: value.numpy() for name, value in tensors.items() if _is_int8(name, value)}
    scaled = from_int8(arrays, path)
    others = {name: value for name, value in tensors.items() if name not in arrays}
    return others | {name: from_numpy(value) for name, value in scaled.items()}


def _is_int8(name: str, value: Tensor) -> bool:
    return value.dtype == int8 or name.endswith(SCALE_SUFFIX)


def round_weights(weights: Mapping[str, Tensor], bits: int, origin: str) -> dict[str, Tensor]:
    """Return the tensors of a file whose matrices and kernels have 32, 16 or 8 bits per weight.

    With 8 bits, kernels with fewer than 65,536 weights have 16.
    """
    if bits not in WEIGHT_BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, WEIGHT_BITS))}, got {bits!r}")
    if bits == 32:
        return dict(weights)
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        called = f"{name} of {origin}"
        is_large = value.ndim >= 2 and value.numel() >= _LEAST_FOR_INT8
        if bits == 8 and is_large and value.is_floating_point():
            integers, scales = to_int8(value.detach().float().cpu().numpy(), called)
            stored |= {name: from_numpy(integers), name + SCALE_SUFFIX: from_numpy(scales)}
        else:
            stored[name] = to_float16(value, called)
    return stored


def to_float16(value: Tensor, name: str) -> Tensor:
    """Round a matrix or kernel to float16; raise ValueError if its values do not fit."""
    if value.ndim < 2 or not value.is_floating_point():
        return value
    half, exact = value.half(), to_float64(value)
    # Float16 has 11 bits, so rounding loses at most half of 2^-10. The loss is larger only if
    # values are too large for float16, or most are too small. Use `not <=`, so that NaN fails too.
    if not (half.to(exact.device) - exact).norm() <= 2**-10 * exact.norm():
        largest = exact.abs().max().item()
        raise ValueError(
            f"{name} does not fit float16, which holds 6e-5 to 65504: "
            f"its largest value is {largest:.3g}; keep the encoder in float32"
        )
    return half

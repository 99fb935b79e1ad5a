"""What a run leaves on disk to go on from, with no code in it."""

import json
import logging
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressive.rundir.files import PARTIAL, STEP, write_bytes

# Raise it when a reader of the old format would misread the new one.
FORMAT = 1

# As safetensors calls them.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LONGEST_HEADER = 100_000_000  # a limit of safetensors' reader

_log = logging.getLogger(__name__)


class Damaged(ValueError):
    """A file that was cut or changed since it was written, so that an older one must do."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, strings and None.

    The file is a safetensors file: tensors named by their place in the state, which other programs
    can read too, and the rest as JSON in its header. So loading runs no code, whoever wrote the
    file; torch's weights-only unpickler promises the same and broke it once (CVE-2025-32434).
    What comes back is equal bit by bit and shares no memory; strides are not kept.

    The path holds the old file or the new one at any time, whenever the process or the machine
    stops. One process at a time may write to a folder: it clears away what an interrupted one
    left there.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, "state", tensors))
    # Large elements first: then every tensor begins at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    content = {name: _bytes(tensors[name]) for name in order}
    about = {"format": "pt", "compressive": str(FORMAT), "state": text}
    header: dict[str, Any] = {"__metadata__": about | {"crc32": _checksum(text, tensors)}}
    end = 0
    for name, data in content.items():
        begin, end = end, end + len(data)
        header[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _LONGEST_HEADER:
        raise ValueError(
            f"{path} would have a header of {len(encoded) / 1e6:.0f} MB, which no reader takes; "
            "keep long lists of numbers as tensors"
        )
    write_bytes(path, len(encoded).to_bytes(8, "little"), encoded, *content.values())


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state that `save` wrote, its tensors on this device."""
    if not path.is_file():
        names = ", ".join(p.name for p in steps(path.parent)) or "none"
        raise FileNotFoundError(f"there is no checkpoint {path}; the folder has {names}")
    try:
        with safe_open(path, "pt", device="cpu") as file:
            header = file.metadata() or {}
            _require_readable(path, header)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _checksum(header["state"], tensors) != header["crc32"]:
            raise Damaged(_damaged(path, "its checksum does not fit"))
        # Copies, since safetensors maps the file, and hands out what lies in it.
        tensors = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        return _unpacked(json.loads(header["state"]), tensors)
    except SafetensorError as error:
        raise Damaged(_damaged(path, str(error).removeprefix("Error while "))) from None
    except (KeyError, TypeError, RecursionError, json.JSONDecodeError):
        raise Damaged(_damaged(path, "its header is not as we write it")) from None


def save_step(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of a step and remove all but the last two.

    Checkpoints of later steps are removed too: they belong to a continuation that was given up.
    """
    path = folder / f"step_{step:08d}.safetensors"
    for left in folder.glob(f".step_*{PARTIAL}"):  # of a step that will not come again
        left.unlink(missing_ok=True)
    save(path, state)
    earlier = [p for p in steps(folder) if step_of(p) <= step]
    for old in set(steps(folder)) - set(earlier[-2:]):
        old.unlink()
    return path


def latest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The last checkpoint that is whole and its state, or None where there is none at all.

    Reads each in full, from the last one back; damaged ones are named in the log. A folder with
    nothing but damaged ones is an error, lest a long run start again from nothing unasked.
    """
    found = steps(folder)
    for path in reversed(found):
        try:
            return path, load(path)
        except Damaged as error:
            _log.warning("skipped: %s", error)
    if found:
        raise ValueError(
            f"all {len(found)} checkpoints in {folder} are damaged; choose another --out to begin "
            "anew"
        )
    return None


def steps(folder: Path) -> list[Path]:
    """The checkpoints in a folder in the order of their steps; unread."""
    return sorted((p for p in folder.glob("step_*") if STEP.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The number of optimizer steps in the name of a checkpoint."""
    match = STEP.fullmatch(path.name)
    if match is None:
        raise ValueError(f"a checkpoint is called step_NUMBER.safetensors, got {path.name}")
    return int(match[1])


def _packed(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """The state as JSON: what is no number, string or list becomes an object that says what."""
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPES or value.layout != torch.strided:
            raise ValueError(f"{place} must be dense and real, got {value.dtype}, {value.layout}")
        name = _free_name(place.removeprefix("state."), tensors)
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str | int)]:
            raise ValueError(
                f"{place} must have strings or whole numbers as keys, got {strange[0]!r}"
            )
        # Pairs: an object's keys could only be strings, and an optimizer's are numbers.
        items = [[key, _packed(v, f"{place}.{key}", tensors)] for key, v in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        items = [_packed(v, f"{place}.{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, str | int | float):
        return value
    raise ValueError(
        f"{place} must be a tensor, number, string, None, or dicts, lists or tuples of these, "
        f"got {type(value).__name__}"
    )


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpacked(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_unpacked(v, tensors) for v in content)
    return {key: _unpacked(v, tensors) for key, v in content}


def _free_name(name: str, tensors: dict[str, Tensor]) -> str:
    """Keys such as 1 and "1", or with dots inside, can lead to one name."""
    while name in tensors or name == "__metadata__":  # the header's own
        name += "_"
    return name


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """Of all that was saved: safetensors itself sees only a wrong length."""
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(_bytes(tensor), crc)
    return str(crc)


def _require_readable(path: Path, header: dict[str, str]) -> None:
    number = header.get("compressive", "")
    if not number.isdecimal():
        raise ValueError(
            f"{path} is a safetensors file but no checkpoint of a run; "
            "give one from a run's checkpoints folder"
        )
    if int(number) > FORMAT:
        raise ValueError(
            f"{path} has format {number}, this version of compressive reads up to {FORMAT}; "
            "update compressive to the version that wrote it"
        )


def _damaged(path: Path, cause: str) -> str:
    return f"{path} is damaged or no checkpoint ({cause}); delete it and resume from the one before"

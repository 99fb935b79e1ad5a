"""Checkpoints: nested training state in a safetensors file, with a checksum and without code."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from compressive.rundir.checksum import checksum
from compressive.rundir.files import CHECKPOINTS, PARTIAL, STEP, write_bytes
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS, check_format

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
SHARDS = "shards"  # the key of the parts of a sharded checkpoint: see sharded_checkpoint
_MAX_TEXT = 50_000_000  # characters; safetensors reads headers up to 100 MB and escapes quotes

_log = logging.getLogger(__name__)


class Damaged(ValueError):
    """Raised for a file that was truncated or changed after it was written."""


def save(path: Path, state: dict[str, Any]) -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, strings and None, atomically.

    The file is a safetensors file. Its tensors are named by their position in the state, and the
    rest is JSON in the metadata. Loading therefore never runs code, not even from an untrusted
    file. torch's weights-only unpickler promises the same but failed once (CVE-2025-32434). The
    loaded state is bitwise equal; strides and shared memory are not kept.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_packed(state, "state", tensors))
    if len(text) > _MAX_TEXT:
        header = f"a header of {len(text) / 1e6:.0f} MB, which no reader accepts"
        raise ValueError(f"{path} would have {header}; keep long lists of numbers as tensors")
    metadata = {
        "format": "pt",
        FORMAT_KEY: str(FORMAT_VERSIONS[CHECKPOINTS]),
        "crc32": checksum(text, tensors),
        "state": text,
    }
    # Copy tensors that share memory: safetensors rejects them.
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    users = Counter(storages.values())
    unshared = {n: t.clone() if users[storages[n]] > 1 else t for n, t in tensors.items()}
    write_bytes(path, serialize(unshared, metadata))


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the state that `save` wrote, with its tensors on a device."""
    if not path.is_file():
        names = ", ".join(p.name for p in steps(path.parent)) or "none"
        raise FileNotFoundError(f"there is no checkpoint {path}; the folder has {names}")
    path.open("rb").close()  # safetensors reports every error as "No such file"
    try:
        with safe_open(path, "pt", device="cpu") as file:
            header = file.metadata() or {}
            if "crc32" not in header:
                other = f"{path} is a safetensors file but no checkpoint of a run"
                raise ValueError(f"{other}; give one from a run's checkpoints folder")
            check_format(path, CHECKPOINTS, header.get(FORMAT_KEY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if checksum(header["state"], tensors) != header["crc32"]:
            raise Damaged(_damaged(path, "its checksum does not fit"))
        # Copy: tensors of safetensors refer to the memory-mapped file.
        tensors = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        state = _unpacked(json.loads(header["state"]), tensors)
        _check_parts(path, state)
        return state
    except SafetensorError as error:
        raise Damaged(_damaged(path, str(error).removeprefix("Error while "))) from None
    except (KeyError, TypeError, RecursionError, json.JSONDecodeError):
        raise Damaged(_damaged(path, "its header is invalid")) from None


def _check_parts(path: Path, state: dict[str, Any]) -> None:
    """Raise Damaged if a part of a sharded checkpoint is missing or has another size."""
    if SHARDS in state:
        folder = path.parent / state[SHARDS]["folder"]
        for name, size, _ in state[SHARDS]["files"]:
            part = folder / name
            if not part.is_file() or part.stat().st_size != size:
                raise Damaged(_damaged(path, f"its part {part} is missing or truncated"))


def save_step(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of a step; delete all but the last two and those of later steps."""
    # Later ones exist if training restarted from an earlier checkpoint.
    path = folder / f"step_{step:08d}.safetensors"
    for left in folder.glob(f".step_*{PARTIAL}"):  # of an interrupted save
        left.unlink(missing_ok=True)
    save(path, state)
    earlier = [p for p in steps(folder) if step_of(p) <= step]
    for old in set(steps(folder)) - set(earlier[-2:]):
        old.unlink()
    return path


def latest(folder: Path, run_id: str | None = None) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and state of the last intact checkpoint, or None if there are none.

    With `run_id`, skip checkpoints of other runs. A run without an id has the id "".
    """
    # Raise ValueError if all are skipped: a long run must not start over silently.
    found = steps(folder)
    for path in reversed(found):
        if not path.is_file():
            _log.warning("skipped: %s is a folder or a broken link", path)
            continue
        try:
            state = load(path)
            if run_id in (None, state.get("run_id", "")):
                return path, state
            _log.warning("skipped: %s is of another run; move it back to its own folder", path)
        except Damaged as error:
            _log.warning("skipped: %s", error)
    if found:
        none_left = f"all {len(found)} checkpoints in {folder} are damaged or of other runs"
        raise ValueError(f"{none_left}; choose another --out to start over")
    return None


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, sorted by step."""
    return sorted((p for p in folder.glob("step_*") if STEP.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps in the name of a checkpoint."""
    match = STEP.fullmatch(path.name)
    if match is None:
        raise ValueError(f"a checkpoint must be named step_NUMBER.safetensors, got {path.name}")
    return int(match[1])


def _packed(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return the state as JSON: tensors, dicts and tuples become objects that name their type."""
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided:
            raise ValueError(f"{place} must be dense and real, got {value.dtype}, {value.layout}")
        name = place.removeprefix("state.")
        # Keys 1 and "1", or keys with dots, can collide. safetensors reserves "__metadata__".
        while name in tensors or name == "__metadata__":
            name += "_"
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str | int)]:
            raise ValueError(f"{place} must have strings or whole numbers as keys, got {odd[0]!r}")
        # Store pairs: keys of an optimizer's state are numbers, keys of JSON objects are strings.
        items = [[key, _packed(v, f"{place}.{key}", tensors)] for key, v in value.items()]
        return {"dict": items}
    if isinstance(value, list | tuple):
        items = [_packed(v, f"{place}.{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if value is None or isinstance(value, str | int | float):
        return value
    allowed = "a tensor, number, string, None, or dicts, lists or tuples of these"
    raise ValueError(f"{place} must be {allowed}, got {type(value).__name__}")


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


def _damaged(path: Path, cause: str) -> str:
    return f"{path} is damaged or no checkpoint ({cause}); delete it and resume from the one before"

"""Read the tensors of a file safely, and find the backbone among them by its prefix."""

import argparse
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compressive.rundir.tensors_file import read_safetensors

TensorsByName = Mapping[str, Tensor]

# Keys of the weights in files of training scripts. DINO and DINOv2 evaluate the teacher.
_CONTAINERS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "student")
_WRAPPERS = ("module.", "_orig_mod.")
# Names of a backbone that is trained by gradients. Methods with a target evaluate this one.
_ONLINE = ("encoder_q", "base_encoder", "online", "backbone", "encoder", "trunk", "model")
_TARGET_PREFIX = re.compile(r"encoder_k|momentum|target|ema|teacher|student")
_HEAD_NAME = re.compile(
    r"fc|heads?|last_linear|classifier|linear|probe|proj\w*|pred\w*|prototypes?|queue\w*|center|"
    r"mask_token|pre_logits|dino\w*|ibot\w*|loss\w*|temperature|logit_scale|num_batches_tracked"
)


class FoundBackbone(NamedTuple):
    """Tensors of a backbone by the names of its own modules, and the prefix they had."""

    state: dict[str, Tensor]
    prefix: str


def read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file by name and, if they were nested, the key of their container.

    No code in the file is executed.
    """
    path.open("rb").close()  # raise permission errors with their own message
    found: Any
    if path.suffix == ".safetensors":
        metadata, found = read_safetensors(path)
        if "classes" in metadata:
            raise ValueError(f"{path} is a classifier; give the encoder that it was trained from")
    else:
        found = _unpickle(path)
    inside = ""
    while isinstance(found, dict):
        key = next((key for key in _CONTAINERS if isinstance(found.get(key), dict)), "")
        if not key:
            break
        found, inside = found[key], f"{inside}.{key}" if inside else key
    if not isinstance(found, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items()
    ):
        raise ValueError(f"{path} contains no state_dict; save only the network's state_dict")
    if not found:
        raise ValueError(f"{path} contains no tensors; save the network's state_dict")
    return _unwrapped(found), inside


def _unpickle(path: Path) -> Any:
    try:
        # Training scripts store their options. A namespace runs no code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises errors of pickle and of the content
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code or "nsupported" in str(error):
            what = f"would run code when it is read ({code[1]})" if code else "would run code"
            raise ValueError(
                f"{path} contains more than weights: it {what}; save only the network's state_dict"
            ) from None
        kind = type(error).__name__
        raise ValueError(
            f"{path} is damaged or no file of weights ({kind}); download or save it again"
        ) from None


def _unwrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove prefixes that wrappers of modules give to every name."""
    while wrapper := next((w for w in _WRAPPERS if all(k.startswith(w) for k in state)), ""):
        state = {name.removeprefix(wrapper): value for name, value in state.items()}
    return state


def find_backbone(state: TensorsByName, key: str, others: Collection[str]) -> FoundBackbone | None:
    """Return the backbone that has a tensor named `key` and one for each name in `others`.

    `others` distinguishes it from parts of it: every block of a ResNet has a conv1.weight, too.
    Return None if there is none.
    """
    prefixes = [
        name.removesuffix(key)
        for name in state
        if name == key or name.endswith(f".{key}")
        if all(name.removesuffix(key) + other in state for other in others)
    ]
    if not prefixes:
        return None
    prefix = min(prefixes, key=_rank)
    inside = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    return FoundBackbone(inside, prefix)


def _rank(prefix: str) -> tuple[bool, int, int]:
    """Sort the online backbone before targets, and known names before unknown ones."""
    order = [i for i, name in enumerate(_ONLINE) if name in prefix]
    return (
        _TARGET_PREFIX.search(prefix) is not None,
        order[0] if order else len(_ONLINE),
        len(prefix),
    )


def unknown_inside(state: TensorsByName, wanted: Collection[str]) -> list[str]:
    """Return the names of a backbone's tensors that are neither wanted nor of a known head."""
    return [n for n in state if n not in wanted and not _HEAD_NAME.fullmatch(n.partition(".")[0])]


def unknown_outside(state: TensorsByName, prefix: str) -> list[str]:
    """Return the names without the backbone's prefix that are of no known head or target."""
    rest = [name for name in state if not name.startswith(prefix)]
    return [n for n in rest if not any(map(_is_head_or_target, n.split(".")[:2]))]


def _is_head_or_target(part: str) -> bool:
    return bool(_HEAD_NAME.fullmatch(part) or _TARGET_PREFIX.search(part))


def mismatch(wanted: TensorsByName, found: TensorsByName) -> str:
    """Describe missing tensors and tensors of other shapes, or return ""."""
    # Old files lack num_batches_tracked, which nothing reads.
    needed = [name for name in wanted if not name.endswith("num_batches_tracked")]
    missing = [name for name in needed if name not in found]
    others = [n for n in wanted if n in found and found[n].shape != wanted[n].shape]
    words = []
    if missing:
        words.append(f"{len(missing)} of {len(needed)} weights are missing, first {missing[0]}")
    if others:
        first = others[0]
        shapes = f"{_shape(found[first])} instead of {_shape(wanted[first])}"
        words.append(f"{len(others)} have another shape, first {first}: {shapes}")
    return "; ".join(words)


def _shape(value: Tensor) -> str:
    return "x".join(map(str, value.shape)) or "a number"


def check_finite(tensors: Iterable[tuple[str, Tensor]], place: object) -> None:
    """Raise ValueError if a weight is NaN or infinite."""
    odd = [k for k, v in tensors if v.is_floating_point() and not bool(v.isfinite().all())]
    if odd:
        raise ValueError(
            f"{place} has weights that are NaN or infinite: {len(odd)} tensors, first {odd[0]}; "
            "give another checkpoint"
        )

"""Weights that timm loads: by name and tag, from the Hugging Face hub, and from its folders."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import timm.data
from huggingface_hub import constants
from timm.models import get_pretrained_cfg
from torch import nn

from compressive import weights
from compressive.augment.ops import MEAN, STD
from compressive.augment.published_crop import PublishedCrop
from compressive.networks import require_known
from compressive.platforms.shapes_only import shapes_only
from compressive.rundir.files import CONFIG
from compressive.rundir.versions import FORMAT_KEY

_PATIENCE = 2.0  # seconds
_FILES = ("model.safetensors", "pytorch_model.bin", "model.pth", "pytorch_model.pth")
# Arguments of a saved model that do not change its features, or that `size` replaces.
_HARMLESS = {"num_classes", "img_size", "in_chans", "drop_rate", "drop_path_rate", "proj_drop_rate"}


class Preprocessing(NamedTuple):
    """The input that weights were trained for."""

    size: int = 224
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    crop: PublishedCrop = PublishedCrop()


class TimmFolder(NamedTuple):
    """What timm's config.json says about the weights next to it."""

    name: str
    weights: Path
    preprocessing: Preprocessing


def preprocessing(config: Any) -> Preprocessing:
    """Return the preprocessing of timm's pretrained_cfg, a dictionary or a `PretrainedCfg`."""
    known = config if isinstance(config, dict) else config.to_dict()
    found: Any = timm.data.resolve_data_config(pretrained_cfg=known)
    mean, std = (tuple(map(float, found[name])) for name in ("mean", "std"))
    kernel = "bilinear" if found["interpolation"] == "bilinear" else "bicubic"
    crop = PublishedCrop(float(found["crop_pct"]), kernel, found["crop_mode"] == "squash")
    return Preprocessing(int(found["input_size"][-1]), mean, std, crop)


def preprocessing_of(name: str) -> Preprocessing:
    """Return the preprocessing of a timm name with a tag; without one, ImageNet's usual one."""
    config = get_pretrained_cfg(name) if "." in name else None
    return Preprocessing() if config is None else preprocessing(config)


def from_timm(name: str, size: int = 0) -> tuple[str, nn.Module, Preprocessing]:
    """Load a timm network by name or `hf-hub:` id; timm downloads its weights if necessary.

    Return its name without the tag, the network and its preprocessing.
    """
    is_hub, is_online = name.startswith(weights.HUB), _is_online()
    if not is_hub:
        _require_tag(name)
    options = {} if is_hub else _sized(name, size)
    try:
        with _offline(not is_online):
            network: Any = timm.create_model(name, pretrained=True, num_classes=0, **options)
    except Exception as error:  # timm passes on errors of the network, the disk and servers
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = reason if is_online else "no network access"
        plain = "NAME" if is_hub else name
        raise ValueError(
            f"timm has no local weights of {name} and could not download them ({reason}); give a "
            f"file of weights and --network {plain}"
        ) from None
    known = dict(network.pretrained_cfg)
    plain = str(known.get("architecture") or name).partition(".")[0]
    arguments = _hub_arguments(name) if is_hub else {}
    _check_model_arguments(plain, arguments, name)
    return plain, network, _at_size(preprocessing(known), arguments)


def _require_tag(name: str) -> None:
    """Raise ValueError if timm has no such network, or no such tag of its weights."""
    plain, _, tag = name.partition(".")
    require_known(plain)
    try:
        is_known = not tag or get_pretrained_cfg(name, allow_unregistered=False) is not None
    except RuntimeError:  # timm's error for an unknown tag
        is_known = False
    if not is_known:
        tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{plain}.*")]
        known = ", ".join(tags) or "none"
        raise ValueError(f"timm has no weights {tag!r} of {plain}; it has {known}")


def is_published(folder: Path) -> bool:
    """Return whether a folder has the config.json of another library, not that of a run."""
    path = folder / CONFIG
    return path.is_file() and not {FORMAT_KEY, "method"} & _read_json(path).keys()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return config if isinstance(config, dict) else {}


def read_folder(folder: Path) -> TimmFolder:
    """Read timm's config.json in a folder; raise ValueError if it is that of another library."""
    config = _read_json(folder / CONFIG)
    if not isinstance(config.get("architecture"), str):
        kind = config.get("model_type")
        library = f"a transformers model ({kind})" if kind else "not in timm's format"
        hint = "only folders in timm's format can be read, whose config.json names an architecture"
        raise ValueError(f"{folder} is {library}; {hint}")
    name = config["architecture"].partition(".")[0]
    require_known(name)
    arguments = config.get("model_args") or {}
    _check_model_arguments(name, arguments, folder)
    weights = next((folder / each for each in _FILES if (folder / each).is_file()), None)
    if weights is None:
        raise FileNotFoundError(f"{folder} has timm's {CONFIG}, but none of {', '.join(_FILES)}")
    known = config.get("pretrained_cfg", config)
    return TimmFolder(name, weights, _at_size(preprocessing(dict(known)), arguments))


def _at_size(known: Preprocessing, arguments: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing with the image size that a model was built for."""
    size = arguments.get("img_size") or known.size
    return known._replace(size=int(size if isinstance(size, int) else size[-1]))


def _hub_arguments(name: str) -> dict[str, Any]:
    """Return the arguments that a model of the hub was saved with; it is downloaded already."""
    from timm.models import load_model_config_from_hf

    with _offline(True):
        return load_model_config_from_hf(name.partition(":")[2])[2] or {}


def _check_model_arguments(name: str, arguments: Mapping[str, Any], place: object) -> None:
    """Raise ValueError if a model was saved with arguments that its name does not express."""
    odd = {key: value for key, value in arguments.items() if key not in _HARMLESS}
    if odd:
        with shapes_only():
            known: Any = timm.create_model(name, num_classes=0)
        pool = getattr(known, "global_pool", None) or known.head.global_pool
        if odd.get("global_pool") == getattr(pool, "pool_type", pool):
            del odd["global_pool"]
    if odd:
        words = ", ".join(f"{key}={value}" for key, value in odd.items())
        raise ValueError(
            f"{place} was built with timm arguments that {name} does not have ({words}); give "
            "weights of a network that its name describes"
        )


def _sized(name: str, size: int) -> dict[str, Any]:
    """Return the options of a network with a fixed input size."""
    with shapes_only():
        known: Any = timm.create_model(name, num_classes=0)
    fixed = known.pretrained_cfg.get("fixed_input_size")
    return {"img_size": size} if fixed and size else {}


def _is_online() -> bool:
    """Return whether the server of timm's weights answers within two seconds, or is unknown."""
    if getproxies():  # the server is not reached directly
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    answers: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((address.hostname or "", port), timeout=_PATIENCE).close()
            answers.append(True)

    # In a thread: looking up a name may take longer than the timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(answers)


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Use only downloaded weights: without network access the hub retries for a minute."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or wanted
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before

"""Start a run from trained weights: the settings that follow from them, and loading them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from compressive.config import Config, channels_text, flat
from compressive.methods import Method
from compressive.networks import Ema
from compressive.pretrained.source import ResolvedWeights, resolve
from compressive.rundir.files import CONFIG
from compressive.rundir.folder import read_config

_NETWORK_SETTINGS = ("name", "width", "stem", "variant")
# Settings that weights determine.
_FOLLOWING = (
    *(f"network.{name}" for name in _NETWORK_SETTINGS),
    *("views.size", "views.mean", "views.std", "views.antialias"),
)


def following_settings(wanted: Config, given: Sequence[str], out: Path) -> dict[str, Any]:
    """Return the settings that follow from the weights of a run; {} if it starts from scratch.

    `given` names the settings that the user chose. If `out` already holds a run that started from
    these weights, its settings are returned and the weights are not read.
    """
    place = wanted.network.weights
    if not place:
        return {}
    if (out / CONFIG).exists():
        before = flat(read_config(out))
        if before["network.weights"] == place:
            return {name: before[name] for name in _FOLLOWING}
    values = flat(wanted)
    name = wanted.network.name if "network.name" in given else ""
    size = wanted.views.size if "views.size" in given else 0
    found = _settings_of(resolve(place, name, size))
    for setting in _FOLLOWING:
        if setting.startswith("network.") and setting in given:
            _require_equal(setting, values[setting], found[setting], place)
    return found


def _settings_of(weights: ResolvedWeights) -> dict[str, Any]:
    network = asdict(weights.network)
    found = {f"network.{name}": network[name] for name in _NETWORK_SETTINGS}
    mean, std = channels_text(weights.mean), channels_text(weights.std)
    views = {"size": weights.size, "mean": mean, "std": std, "antialias": weights.antialias}
    return found | {f"views.{name}": value for name, value in views.items()}


def start_from_weights(method: Method, config: Config) -> str:
    """Load the backbone, also into an EMA target; return a note, or "" without weights."""
    place, settings = config.network.weights, flat(config)
    if not place:
        return ""
    weights = resolve(place, config.network.name, config.views.size)
    for name, value in _settings_of(weights).items():
        if name.startswith("network."):
            _require_equal(name, settings[name], value, place)
    state: Mapping[str, Any] = weights.backbone.state_dict()
    target = getattr(method, "target", None)
    backbones = [method.encoder]
    if isinstance(target, Ema) and isinstance(target.network, nn.Sequential):
        backbones.append(target.network[0])
    for each in backbones:
        each.load_state_dict(state)
    return f"starting from {weights.found}; heads start from random weights"


def _require_equal(setting: str, value: object, found: object, place: str) -> None:
    if value != found:
        raise ValueError(f"{setting} must be {found} for the weights of {place}, got {value}")

"""Options of `pretrain` that stand for a setting, and how they combine with `--set`."""

from collections.abc import Mapping, Sequence
from typing import Any

from compressive.config import Config, flat, override

OPTIONS: dict[str, str] = {  # option, as an argument in Python -> setting
    "method": "method",
    "backbone": "network.name",
    "weights": "network.weights",
    "image_size": "views.size",
    "batch_size": "train.batch_size",
    "epochs": "train.epochs",
    "steps": "train.steps",
    "lr": "optim.lr",
    "seed": "seed",
    "labels": "data.labels",
    "device": "train.device",
    "precision": "train.precision",
    "workers": "data.workers",
    "track": "train.track",
}


def option_of(setting: str) -> str:
    """Return the option that stands for a setting, or "" if there is none."""
    found = [option for option, name in OPTIONS.items() if name == setting]
    return f"--{found[0].replace('_', '-')}" if found else ""


def as_changes(options: Mapping[str, Any], changes: Sequence[str] = ()) -> list[str]:
    """Return the options that are not None as NAME=VALUE, followed by `changes`.

    Raise ValueError if an option and a change give one setting two values.
    """
    given = {OPTIONS[name]: str(value) for name, value in options.items() if value is not None}
    # Parse each change alone: values such as 0.1 and 1e-1 are equal.
    for change in changes:
        name, _, text = change.partition("=")
        name = name.strip()
        if name in given and _value(name, given[name]) != _value(name, text.strip()):
            option = option_of(name)
            raise ValueError(
                f"{option} {given[name]} and --set {name}={text.strip()} contradict each other; "
                "give one of them"
            )
    return [f"{name}={value}" for name, value in given.items()] + list(changes)


def _value(name: str, text: str) -> Any:
    return flat(override(Config(), f"{name}={text}"))[name]

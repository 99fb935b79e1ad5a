"""Describe, check and parse settings: dataclass fields with a help text and bounds."""

import difflib
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["SettingInfo", "build", "check_fields", "info", "parse", "require_setting", "setting"]
__all__ += ["require_one_of", "similar_settings", "type_hints"]

# What other libraries call a setting -> its name here. Keys are the last part of the name.
_SETTING_ALIASES = {
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr", "peak_lr"), "optim.lr"),
    **dict.fromkeys(("wd", "decay"), "optim.weight_decay"),
    **dict.fromkeys(("optimizer", "optim", "opt"), "optim.name"),
    **dict.fromkeys(("warmup", "lr_warmup"), "optim.warmup_epochs"),
    **dict.fromkeys(("batch", "bs", "batchsize", "per_device_batch_size"), "train.batch_size"),
    **dict.fromkeys(("num_epochs", "max_epochs", "n_epochs"), "train.epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "iterations"), "train.steps"),
    **dict.fromkeys(("gpu", "cuda", "accelerator"), "train.device"),
    **dict.fromkeys(("amp", "fp16", "bf16", "dtype"), "train.precision"),
    **dict.fromkeys(("arch", "model", "backbone", "encoder", "architecture"), "network.name"),
    **dict.fromkeys(("out_dim", "output_dim", "proj_dim"), "network.projection_dim"),
    **dict.fromkeys(("image_size", "img_size", "crop_size", "resolution"), "views.size"),
    **dict.fromkeys(("num_workers", "n_workers", "threads"), "data.workers"),
    **dict.fromkeys(("dataset", "path", "root"), "data.source"),
    **dict.fromkeys(("temperature", "tau"), "bottleneck.kappa_b"),
    **dict.fromkeys(("momentum_teacher", "ema", "tau_base"), "target.ema_decay"),
    **dict.fromkeys(("algorithm", "loss"), "method"),
    **dict.fromkeys(("random_seed",), "seed"),
    **dict.fromkeys(("pretrained", "init_from", "checkpoint"), "network.weights"),
    **dict.fromkeys(("clip_grad", "grad_clip", "max_grad_norm"), "optim.clip_norm"),
}

type_hints = functools.cache(typing.get_type_hints)  # of a dataclass; evaluating them is slow


class SettingInfo(NamedTuple):
    """Metadata of a field that is a setting."""

    help: str
    low: float
    high: float
    open_low: bool  # whether `low` itself is excluded
    choices: Collection[str]
    unused: Callable[[Any], str]  # returns why a config does not read the setting, or ""

    @property
    def bounds(self) -> str:
        """Return the allowed range of a number in words."""
        least = f"above {self.low:g}" if self.open_low else f"{self.low:g} or more"
        return least if math.isinf(self.high) else f"{least} and at most {self.high:.10g}"

    def contains(self, value: float) -> bool:
        """Return whether a number is finite and within the bounds."""
        is_above = value > self.low if self.open_low else value >= self.low
        return bool(is_above and value <= self.high and abs(value) <= sys.float_info.max)


def setting(
    default: Any,
    help: str,
    *,
    low: float = 0,
    high: float = math.inf,
    open_low: bool = False,
    choices: Collection[str] = (),
    unused: Callable[[Any], str] = lambda _: "",
) -> Any:
    """Return a dataclass field with a default, a help text and the allowed values.

    A number must be `low` or more, with `open_low` more than that, and at most `high`.
    `unused` takes the whole config and returns the reason why the setting is not read, or "".
    """
    described = SettingInfo(help, low, high, open_low, choices, unused)
    return field(default=default, metadata={"setting": described})


def info(of: "Field[Any]") -> SettingInfo:
    """Return the metadata of a field made by `setting`."""
    return of.metadata["setting"]


def check_fields(settings: Any, prefix: str = "") -> None:
    """Raise ValueError if a field, also of a section, has the wrong type or violates its bounds."""
    hints = type_hints(type(settings))
    for each in fields(settings):
        value, hint, name = getattr(settings, each.name), hints[each.name], f"{prefix}{each.name}"
        if is_dataclass(hint):
            if type(value) is not hint:
                raise ValueError(f"{name} must be of type {name.title()}, got {value!r}")
            check_fields(value, f"{name}.")
            continue
        _require_type(value, hint, name)
        known = info(each)
        if known.choices:
            require_one_of(name, value, known.choices)
        if isinstance(value, int | float) and not known.contains(value):
            allowed = "finite" if value > sys.float_info.max else known.bounds
            raise ValueError(f"{name} must be {allowed}, got {_shown(value)}")


def build(kind: Any, settings: Any, section: str = "") -> Any:
    """Return a dataclass made from nested dictionaries; unknown names are errors."""
    if not isinstance(settings, dict):
        raise ValueError(f"{section or 'a config'} must be an object of settings, got {settings!r}")
    hints, values = type_hints(kind), {}
    for key, value in settings.items():
        require_setting(key, kind, section)
        hint, name = hints[key], f"{section}.{key}" if section else key
        is_section = is_dataclass(hint)
        values[key] = build(hint, value, name) if is_section else _require_type(value, hint, name)
    return kind(**values)


def parse(text: str, kind: Any, name: str) -> Any:
    """Convert text from a command line to the type of the setting `name`."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return require_one_of(name, text, options)
    if isinstance(kind, types.UnionType):
        if text.lower() in ("none", "null"):
            return None
        kind = options[0]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return int(text) if kind is int else float(text) if kind is float else text
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {what}, got {text!r}") from None


def _shown(value: float) -> str:
    """Return a value as text; shorten a number of hundreds of digits to their count."""
    text = str(value)
    return text if len(text) < 40 else f"a number of {len(text)} digits"


def require_one_of(name: str, value: Any, options: Collection[Any]) -> Any:
    """Return the value, or raise ValueError if it is not one of the options."""
    if value not in options:
        near = difflib.get_close_matches(str(value), map(str, options), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        allowed = ", ".join(map(str, options))
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}{hint}")
    return value


def require_setting(name: str, kind: Any, section: str = "") -> None:
    """Raise ValueError if a dataclass has no field of that name; suggest the nearest."""
    names = [each.name for each in fields(kind)]
    if name in names:
        return
    dot = f"{section}." if section else ""
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {dot}{near[0]}? " if near else ""
    rest = f"{section} has {', '.join(names)}" if section else "`compressive settings` lists all"
    raise ValueError(f"no setting {f'{dot}{name}'!r}; {hint}{rest}")


def similar_settings(name: str, names: Sequence[str]) -> list[str]:
    """Return the settings among `names` that a wrong name may mean, the most likely ones first."""
    section, _, last = name.rpartition(".")
    if section in names:  # method.name
        return [section]
    if near := difflib.get_close_matches(name, names, n=1, cutoff=0.85):
        return near
    last = last.lower().replace("-", "_")
    if same := [other for other in names if other.rpartition(".")[2] == last]:
        return same
    if _SETTING_ALIASES.get(last) in names:
        return [_SETTING_ALIASES[last]]
    return difflib.get_close_matches(name, names, n=1, cutoff=0.5)


def _require_type(value: Any, kind: Any, name: str) -> Any:
    """Return the value, or raise ValueError for a wrong type; convert int to float if needed."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return require_one_of(name, value, options)
    allowed = options or (kind,)
    if float in allowed and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max and value != math.inf and value != -math.inf:
            raise ValueError(f"{name} must be finite, got {_shown(value)}")
        return float(value)  # also for NumPy numbers
    if type(value) not in allowed:
        expected = " or ".join("null" if k is type(None) else k.__name__ for k in allowed)
        raise ValueError(f"{name} must be of type {expected}, got {value!r}")
    return value

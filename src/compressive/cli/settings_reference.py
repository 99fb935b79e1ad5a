"""Reference of all settings: default, allowed values and meaning, from the config's fields."""

import difflib
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple

from compressive.config import Config
from compressive.setting_fields import SettingInfo, info, similar_settings

_HEAD = """\
# Every setting

Made by `compressive settings --markdown` from the fields in `src/compressive/config.py`.
Change a setting with `--set NAME=VALUE`. `compressive recipes NAME` shows the values of a recipe.
"""


class Setting(NamedTuple):
    """One row of the reference."""

    name: str  # dotted
    default: str
    allowed: str
    meaning: str


class Section(NamedTuple):
    """A section of the config."""

    name: str  # "" for settings in no section
    about: str
    settings: tuple[Setting, ...]


def sections() -> list[Section]:
    """Return all settings in the order of the config; first those in no section."""
    hints = typing.get_type_hints(Config)
    groups = [(name, kind) for name, kind in hints.items() if is_dataclass(kind)]
    return [_section(*group) for group in [("", Config), *groups]]


def find(name: str) -> list[Section]:
    """Return the section of that name, or the setting alone in its section; "" returns all."""
    every = sections()
    if not name:
        return every
    if whole := [section for section in every if (section.name or "run") == name]:
        return whole
    for section in every:
        if found := tuple(setting for setting in section.settings if setting.name == name):
            return [section._replace(settings=found)]
    names = [setting.name for section in every for setting in section.settings]
    near = [] if "." in name else difflib.get_close_matches(name, [s.name for s in every], n=1)
    near = near or similar_settings(name, names)
    hint = f"did you mean {' or '.join(near)}?" if near else "`compressive settings` lists all"
    raise ValueError(f"no setting or section {name!r}; {hint}")


def markdown(shown: list[Section]) -> str:
    """Return the sections as a Markdown document with one table each."""
    parts = [_HEAD]
    for name, about, settings in shown:
        rows = [
            f"| `{each.name}` | {each.default and f'`{each.default}`'} | {each.allowed} | "
            f"{each.meaning.replace('|', chr(92) + '|')} |\n"
            for each in settings
        ]
        head = "| setting | default | allowed | meaning |\n|---|---|---|---|\n"
        parts.append(f"## {name or 'run'}\n\n{about}\n\n{head}{''.join(rows)}")
    return "\n".join(parts)


def _section(name: str, kind: Any) -> Section:
    hints = typing.get_type_hints(kind)
    settings = tuple(
        Setting(
            name=f"{name}.{each.name}" if name else each.name,
            default=written(each.default),
            allowed=_allowed(hints[each.name], info(each)),
            meaning=info(each).help,
        )
        for each in fields(kind)
        if not is_dataclass(hints[each.name])
    )
    return Section(name, kind.__doc__ or "", settings)


def _allowed(kind: Any, known: SettingInfo) -> str:
    options = typing.get_args(kind)
    if known.choices or typing.get_origin(kind) is Literal:
        return ", ".join(known.choices or options)
    if isinstance(kind, types.UnionType):
        return f"{_allowed(options[0], known)}; or none"
    if kind in (int, float):
        return f"{'a whole number' if kind is int else 'a number'}, {known.bounds}"
    return "true or false" if kind is bool else "text"


def written(value: Any) -> str:
    """Format a value as `--set` takes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

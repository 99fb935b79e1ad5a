"""Every setting with its default, what it may be and what it means, read from `config` itself."""

import ast
import difflib
import inspect
import io
import math
import tokenize
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, Literal, NamedTuple

from compressive import config

_HEAD = """\
# Every setting

Made by `compressive settings --markdown` from the comments in `src/compressive/config.py`.
Change a setting with `--set NAME=VALUE`. `compressive recipes NAME` shows the values of a recipe.
"""


class Setting(NamedTuple):
    """One setting."""

    name: str  # dotted
    default: str
    allowed: str
    meaning: str  # the comment behind it


class Section(NamedTuple):
    """Settings that belong together."""

    name: str  # empty for those of the run itself
    about: str
    settings: tuple[Setting, ...]


def sections() -> list[Section]:
    """All settings in the order of the config; first those of the run itself."""
    hints = typing.get_type_hints(config.Config)
    parts: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    return [_section("", config.Config), *(_section(*part) for part in parts.items())]


def find(name: str) -> list[Section]:
    """The section of that name, or the setting alone in its section; empty means all."""
    every = sections()
    if not name:
        return every
    if whole := [section for section in every if (section.name or "run") == name]:
        return whole
    for section in every:
        if found := tuple(setting for setting in section.settings if setting.name == name):
            return [section._replace(settings=found)]
    raise ValueError(f"no setting or section {name!r}; {_nearest(name, every)}")


def markdown(of: list[Section]) -> str:
    """The reference: one table a section."""
    parts = [_HEAD]
    for name, about, settings in of:
        rows = [
            f"| `{each.name}` | {_code(each.default)} | {each.allowed} | {_cell(each.meaning)} |\n"
            for each in settings
        ]
        head = "| setting | default | allowed | meaning |\n|---|---|---|---|\n"
        parts.append(f"## {name or 'run'}\n\n{about}\n\n{head}{''.join(rows)}")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _nearest(name: str, every: list[Section]) -> str:
    """What was meant: the same last name in some section, else what is spelled alike."""
    names = [setting.name for section in every for setting in section.settings]
    names += [section.name for section in every if section.name]
    last = name.rpartition(".")[2]
    near = [other for other in names if other.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else "`compressive settings` lists all"


def _section(name: str, kind: type) -> Section:
    source = inspect.getsource(kind)
    meanings, bounds, hints = _comments(source), _bounds(source), typing.get_type_hints(kind)
    own = [each for each in fields(kind) if not is_dataclass(hints[each.name])]
    settings = tuple(
        Setting(
            name=f"{name}.{each.name}" if name else each.name,
            default=written(each.default),
            allowed=_allowed(hints[each.name], bounds.get(each.name, "")),
            meaning=meanings.get(each.name, ""),
        )
        for each in own
    )
    return Section(name, inspect.getdoc(kind) or "", settings)


def _comments(source: str) -> dict[str, str]:
    """The comment behind each field, by the field's name."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    on_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    found = {}
    for node in _class(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = on_line.get(node.end_lineno or 0, "")
    return found


def _bounds(source: str) -> dict[str, str]:
    """What `__post_init__` asks of numbers, in words."""
    found = {}
    for node in ast.walk(_class(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        for keyword in node.keywords if node.func.id in ("_at_least", "_within") else ():
            # Our own source: a number, or a tuple of numbers that may be infinite.
            asked = eval(ast.unparse(keyword.value), {"math": math})
            low, high, is_open = (asked, math.inf, False) if node.func.id == "_at_least" else asked
            least = f"above {low:g}" if is_open else f"{low:g} or more"
            most = "" if math.isinf(high) else f", at most {high:.10g}"
            found[keyword.arg or ""] = least + most
    return found


def _class(source: str) -> ast.ClassDef:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    return node


def _allowed(kind: Any, bounds: str) -> str:
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, options))
    if isinstance(kind, types.UnionType):
        return f"{_allowed(options[0], bounds)}; or none"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    return f"{words}, {bounds}" if bounds else words


def written(value: Any) -> str:
    """As one would write it behind --set."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)

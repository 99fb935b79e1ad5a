"""Command reference as Markdown, from the options and help texts of the typer app."""

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from compressive.cli.app import app


def command_reference() -> str:
    """Return one section per command: usage, description, options by group, examples."""
    program: Any = typer.main.get_command(app)
    return "\n".join(_section(name, command) for name, command in program.commands.items())


def _section(name: str, command: Any) -> str:
    arguments = [each.name.upper() for each in command.params if _is_argument(each)]
    usage = " ".join(["compressive", name, "[OPTIONS]", *arguments])
    parts = [f"## {name}\n", _paragraphs(command.help), f"```text\n{usage}\n```\n"]
    for title, rows in _groups(command).items():
        parts.append(f"**{title}**\n\n| name | default | meaning |\n|---|---|---|")
        parts += [*rows, ""]
    if command.epilog:
        parts.append(_paragraphs(command.epilog))
    return "\n".join(parts) + "\n"


def _groups(command: Any) -> dict[str, list[str]]:
    """Return table rows by the groups that `--help` shows."""
    groups: dict[str, list[str]] = {}
    for option in command.params:
        if getattr(option, "hidden", False):
            continue
        usual = "Arguments" if _is_argument(option) else "Options"
        title = getattr(option, "rich_help_panel", None) or usual
        groups.setdefault(title, []).append(_row(option))
    return groups


def _row(option: Any) -> str:
    is_argument = _is_argument(option)
    names = [option.name.upper()] if is_argument else option.opts + option.secondary_opts
    shown = ", ".join(f"`{name}`" for name in names)
    if option.metavar and not is_argument:
        shown += f" `{option.metavar}`"
    default = "required" if option.required else _default(option.default)
    return f"| {shown} | {default} | {_cell(option.help or '')} |"


def _is_argument(option: Any) -> bool:
    return option.param_type_name == "argument"


def _default(value: Any) -> str:
    if value is None or value is False or value == "" or value == () or callable(value):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(_lines(inspect.cleandoc(text or ""))) + "\n"


def _lines(text: str) -> Iterator[str]:
    """Yield paragraphs; `\\b` keeps line breaks of a paragraph, as click does."""
    for part in text.replace("\f", "").split("\n\n"):
        if part.startswith("\b\n"):
            yield "```text\n" + part.removeprefix("\b\n") + "\n```"
        elif part.strip():
            yield part

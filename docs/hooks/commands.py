"""Command reference as Markdown, from the options and help texts of the typer app."""

import inspect
from itertools import groupby
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
        parts.append(_examples(command.epilog))
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
    return inspect.cleandoc(text or "").replace("\b\n", "").replace("\f", "") + "\n"


def _examples(text: str) -> str:
    """Return the text with its commands as code blocks."""
    lines = [line.strip() for line in _paragraphs(text).splitlines() if line.strip()]
    blocks = []
    for is_command, group in groupby(lines, lambda line: line.startswith("compressive ")):
        inside = "\n".join(group)
        blocks.append(f"```bash\n{inside}\n```" if is_command else inside)
    return "\n\n".join(blocks) + "\n"

"""The `compressive` program: global options and the list of commands."""

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, TextIO, cast

import typer

from compressive.cli import evaluate_commands, info_commands, train_commands
from compressive.cli.terminal import print_warning
from compressive.progress import BrokenPipeSafe

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # wraps paragraphs to the width of the terminal
    pretty_exceptions_enable=False,
    help="Measure and control how much information a visual representation keeps.",
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "quickstart": train_commands.quickstart_command,
    "pretrain": train_commands.pretrain_command,
    "recipes": info_commands.recipes_command,
    "settings": info_commands.settings_command,
    "meter": info_commands.meter_command,
    "evaluate": evaluate_commands.evaluate_command,
    "embed": evaluate_commands.embed_command,
    "compare": evaluate_commands.compare_command,
    "report": evaluate_commands.report_command,
    "sweep": train_commands.sweep_command,
    "watch": info_commands.watch_command,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        print(version("compressive"))
        raise typer.Exit
    return wanted


@app.callback()
def global_options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
) -> None:
    """Measure and control how much information a visual representation keeps."""
    # A closed pipe must not abort the command or change its exit code.
    sys.stdout, sys.stderr = (
        cast(TextIO, BrokenPipeSafe(stream)) for stream in (sys.stdout, sys.stderr)
    )
    warnings.showwarning = print_warning

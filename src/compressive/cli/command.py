"""Commands with examples in their help, and suggestions for unknown options and commands."""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from compressive.cli.terminal import print_error, print_line
from compressive.recipes.options import OPTIONS

# What other programs call an option -> its name here, if the command has it.
_OPTION_ALIASES: dict[str, tuple[str, ...]] = {
    "--backbone": ("--model", "--arch", "--architecture", "--network", "--net", "--encoder"),
    "--batch-size": ("--bs", "--batch", "--batchsize", "--per-gpu-batch-size"),
    "--lr": ("--learning-rate", "--learning_rate", "--base-lr", "--blr"),
    "--image-size": ("--img-size", "--imgsz", "--size", "--resolution", "--crop-size"),
    "--device": ("--gpu", "--gpus", "--cuda", "--cpu", "--accelerator"),
    "--workers": ("--num-workers", "--n-workers", "--threads", "-j"),
    "--out": ("--output", "--output-dir", "--out-dir", "--outdir", "--save-dir", "-o"),
    "--method": ("--loss", "--algorithm", "--objective"),
    "--epochs": ("--num-epochs", "--max-epochs", "--n-epochs"),
    "--steps": ("--num-steps", "--max-steps", "--iterations"),
    "--precision": ("--amp", "--fp16", "--bf16", "--dtype"),
    "--seed": ("--random-seed",),
    "--recipe": ("--config", "--preset"),
    "--set": ("--override", "--opts", "--cfg-options"),
    "--continue-from": ("--resume-from",),
    "--weights": ("--pretrained", "--init-from", "--checkpoint", "--init", "--load"),
    "--data": ("--dataset", "--data-path", "--data-dir", "--images"),
    "--tasks": ("--task", "--only", "--metrics"),
    "--max-images": ("--limit", "--subset", "--num-images"),
    "--benchmark-root": ("--root", "--benchmarks"),
    "--network": ("--model", "--arch", "--backbone"),
    "--size": ("--image-size", "--img-size", "--resolution"),
    "--seeds": ("--seed",),
    "--at-once": ("--parallel", "--num-workers", "--workers"),
}
_UsageError: Any = typer.BadParameter.__bases__[0]  # of click or of typer's copy of it


class Command(TyperCommand):
    """A command that answers an unknown option with one line and the option that is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; exit with code 2 and one line if an option is unknown."""
        with _unknown_options_in_one_line(self, ctx):
            return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then the examples line by line, which typer would join."""
        epilog, self.epilog = self.epilog, None
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
        for line in (epilog or "").splitlines():
            print_line(f" {line}".rstrip())


class Group(TyperGroup):
    """The program; answers an unknown option or command with one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse global options; exit with code 2 and one line if one is unknown."""
        with _unknown_options_in_one_line(self, ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is named first; exit with code 2 if there is none."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError:
            names = self.list_commands(ctx)
            near = difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the commands are: {', '.join(names)}"
            print_error(f"no command {args[0]!r}; {hint}")
            raise typer.Exit(2) from None


@contextmanager
def _unknown_options_in_one_line(command: Any, ctx: Any) -> Iterator[None]:
    """Print one line and exit with code 2 if the arguments have an option that is unknown."""
    try:
        yield
    except _UsageError as error:
        wrong = getattr(error, "option_name", "")
        names = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
        if not wrong or wrong in names:
            raise
        print_error(_unknown_option(wrong, ctx.command_path, names))
        raise typer.Exit(2) from None


def _unknown_option(wrong: str, command: str, names: Sequence[str]) -> str:
    """Return a line that says which option is meant, of those that a command has."""
    there = [name for name in names if name.startswith("--")]
    wrong = wrong.partition("=")[0]
    found = [name for name in there if wrong in _OPTION_ALIASES.get(name, ())]
    usual = {wrong, *(name for name, others in _OPTION_ALIASES.items() if wrong in others)}
    settings = [OPTIONS[n] for name in usual if (n := name[2:].replace("-", "_")) in OPTIONS]
    if not found and settings and "--set" in there:
        return f"no option {wrong}; use --set {settings[0]}=VALUE"
    if not found:
        near = wrong.replace("_", "-")
        found = difflib.get_close_matches(near, there, n=1, cutoff=0.75)
    if found:
        return f"no option {wrong}; did you mean {found[0]}?"
    more = "; or --set NAME=VALUE" if "--set" in there else ""
    return f"no option {wrong}; `{command} --help` lists all{more}"


def examples(*lines: str) -> str:
    """Return the end of a help text: a heading and one example on each line."""
    return "\n".join(("Examples:", *(f"  {line}" for line in lines), ""))

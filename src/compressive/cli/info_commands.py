"""Commands that show recipes, settings, the information meter and the state of a run."""

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compressive import recipes
from compressive.cli import settings_reference
from compressive.cli.completion import complete_recipe, complete_section
from compressive.cli.terminal import (
    one_line_errors,
    path_argument,
    print_line,
    print_next,
    require_at_least,
)
from compressive.config import flat


def recipes_command(
    name: Annotated[
        str,
        typer.Argument(
            help="A recipe, to show all its values, or the beginning of some names: c-byol.",
            autocompletion=complete_recipe,
        ),
    ] = "",
) -> None:
    """List the recipes, or show one with every value and its origin."""
    with one_line_errors():
        if name in recipes.names():
            _print_recipe(recipes.get(name))
            print_line(f"next: compressive pretrain DATA --recipe {name}")
            return
        groups = recipes.grouped(name, has_gpu=_has_gpu())
        if not groups:
            recipes.get(name)  # raises the error with the nearest names
        line = "{:<29} {:<14} {:>6} {:>5}  {}"
        print_line(line.format("recipe", "network", "epochs", "batch", "expected").rstrip())
        for title, group in groups.items():
            print_line(f"{title}:")
            for recipe in group:
                network, train = recipe.config.network, recipe.config.train
                width = f" x{network.width}" if network.width > 1 else ""
                sizes = train.epochs, train.batch_size
                cells = recipe.name, network.name + width, *sizes, recipe.result
                print_line(line.format(*cells).rstrip())
        print_line("Without --recipe, settings are chosen from the images and the machine.")
        first = next(iter(groups.values()))[0].name
        print_next("recipes", first)


def _has_gpu() -> bool:
    """Return whether there is an NVIDIA GPU, without importing torch."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _print_recipe(recipe: recipes.Recipe) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{recipe.name}[/]  {recipe.about}")
    console.print(f"expected: {recipe.expected}\nhardware: {recipe.hardware}")
    table = Table(box=None)
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "setting")
    for setting, value in flat(recipe.config).items():
        table.add_row(setting, settings_reference.written(value), recipe.origins[setting])
    console.print(table)
    if any(" row " in origin for origin in recipe.origins.values()):
        console.print("rows are those of the table in docs/notation.md")
    for variant in recipe.variants:
        changes = " ".join(f"--set {change}" for change in variant.changes)
        top1 = "" if variant.top1 is None else f", top-1 {variant.top1}"
        console.print(f"{changes}  [dim]{variant.what}{top1}[/]")


def settings_command(
    name: Annotated[
        str,
        typer.Argument(
            help="A section or a setting: optim, optim.lr.", autocompletion=complete_section
        ),
    ] = "",
    markdown: Annotated[bool, typer.Option(help="Print a Markdown document.")] = False,
) -> None:
    """Show every setting: its default, allowed values and meaning."""
    with one_line_errors():
        sections = settings_reference.find(name)
        if markdown:
            typer.echo(settings_reference.markdown(sections), nl=False)
            return
        console = Console(highlight=False)
        for section in sections:
            console.print(f"[bold]{section.name or 'run'}[/]  {section.about}")
            table = Table(box=None)
            table.add_column("setting", no_wrap=True)
            for column in ("default", "allowed", "meaning"):
                table.add_column(column, overflow="fold")
            for setting in section.settings:
                table.add_row(*map(escape, setting))
            console.print(table)


def meter_command(
    dim: Annotated[int, typer.Option(help="Dimension of the projections.")] = 256,
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 512,
    kappa_e: Annotated[float, typer.Option(help="Concentration of e(z|x).")] = 1024,
    kappa_b: Annotated[float, typer.Option(help="Concentration of b(z|y): 1 / temperature.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the random directions.")] = 0,
) -> None:
    """Print what C-SimCLR measures on random directions.

    Shows how many nats a sample z of view X keeps that view Y cannot predict, how much of that
    training can still remove, and how much z tells about Y, for views of increasing similarity.
    Explains kappa_e and kappa_b without loading an image.
    """
    with one_line_errors():
        require_at_least(2, dim=dim)
        require_at_least(1, batch=batch)
        require_at_least(0, kappa_e=kappa_e, kappa_b=kappa_b, seed=seed)
        from compressive.cli.meter import meter_table

        Console().print(meter_table(dim, batch, kappa_e, kappa_b, seed))


def watch_command(
    run: Annotated[Path, path_argument(help="Folder of a run, running or finished.")],
    once: Annotated[bool, typer.Option(help="Print the state once and exit.")] = False,
) -> None:
    """Show the state of a run in the terminal until it ends."""
    with one_line_errors():
        from compressive.cli.watch import watch

        watch(run, once)

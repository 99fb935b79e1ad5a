"""The command line; here the commands that make runs, in `commands` those that look at them."""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compressive import config as settings
from compressive import recipes
from compressive.cli import commands
from compressive.cli.terminal import AtHome, note, one_line_errors
from compressive.progress import BrokenPipeSafe
from compressive.rundir.files import ENCODER

if TYPE_CHECKING:
    from compressive.train.loop import Outcome

app = typer.Typer(
    cls=AtHome,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # paragraphs are wrapped anew
    pretty_exceptions_enable=False,
    help="Measure and control how much information a visual representation keeps.",
)


def _say_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        print(version("compressive"))
        raise typer.Exit
    return wanted


@app.callback()
def compressive(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Say which version it is.", callback=_say_version),
    ] = False,
) -> None:
    """Measure and control how much information a visual representation keeps."""
    # What was begun comes to its end, and to its exit code, whoever has stopped listening.
    sys.stdout, sys.stderr = (
        cast(TextIO, BrokenPipeSafe(each)) for each in (sys.stdout, sys.stderr)
    )
    warnings.showwarning = note


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Where the two runs are kept.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Train SimCLR and C-SimCLR on built-in pictures and compare them: no data, no GPU needed.

    Takes two to five minutes on a CPU. Ends with a table of accuracies on test pictures, and a page
    that shows both runs.
    """
    with one_line_errors():  # also where somebody thinks again while this is imported
        from compressive.cli.quickstart import METHODS
        from compressive.cli.quickstart import quickstart as rows
        from compressive.evaluation.tables import verdicts
        from compressive.report.page import write_report

        table = Table(
            title="Built-in pictures, 12 classes",
            caption="accuracy on test pictures; reducible_residual: nats of one view alone",
        )
        for name in ("", "linear", "kNN", "10 % of labels", "reducible_residual"):
            table.add_column(name, justify="right" if name else "left")
        last = None
        for row in rows(out, seed=seed):
            shares = (row.accuracy, row.neighbors, row.few_labels)
            cells = ["" if share is None else f"{share:.1%}" for share in shares]
            table.add_row(
                row.name,
                *cells,
                "" if row.reducible_residual is None else f"{row.reducible_residual:.2f}",
            )
            last = row.outcome
        Console().print(table)
        if last is not None:
            _say_where(last)
            if last.step < last.total:
                raise typer.Exit(130)
        runs = [out / method for method in METHODS]
        page = write_report(runs, out / "report.html", verdicts=verdicts(runs))
        words = f"report: {page}, one page to open in a browser"
        Console(soft_wrap=True).print(words, highlight=False, markup=False)


@app.command()
def pretrain(
    data: Annotated[
        str,
        typer.Argument(
            help="A folder of images or of class folders, parquet or tar shards, "
            "torchvision:NAME, or builtin."
        ),
    ],
    recipe: Annotated[
        str, typer.Option(help="Settings to begin with; `compressive recipes` lists them.")
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change one of `compressive settings`; may be repeated.",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Short for --set train.epochs=N.")] = None,
    steps: Annotated[int | None, typer.Option(help="Short for --set train.steps=N.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=N.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; else runs/RECIPE-DATA-seedN.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on with the run in that folder, or refuse it.")
    ] = True,
) -> None:
    """Train an encoder on images without labels.

    Without a recipe, settings that fit are made from the number of images, their size and the
    machine. Where labels exist they are used to watch (a linear probe and nearest neighbors on
    labels held out of the training split), never to learn.

    Stops and saves on Ctrl-C; the same command goes on. Under torchrun all processes train
    together.
    """
    with one_line_errors():
        from compressive import distributed
        from compressive.train.images import settings_for
        from compressive.train.loop import pretrain as train

    short = {"train.epochs": epochs, "train.steps": steps, "seed": seed}
    given = [f"{name}={value}" for name, value in short.items() if value is not None]
    distributed.start()
    try:
        with one_line_errors():
            given += changes or ()
            chosen = settings_for(data, recipe, epochs, given)
            chosen = settings.with_data(chosen, data, *given)
            if distributed.rank() == 0:
                _say_what_is_idle(chosen, given)
            outcome = train(chosen, out or _default_out(chosen, data), resume=resume)
        if distributed.rank() == 0:
            _say_where(outcome)
    finally:
        distributed.stop()
    if outcome.step < outcome.total:
        raise typer.Exit(130)


def _say_what_is_idle(chosen: settings.Config, changes: list[str]) -> None:
    """A line for each setting that someone changed in vain."""
    reasons = settings.unused_settings(chosen)
    for name in dict.fromkeys(change.split("=")[0].strip() for change in changes):
        if name in reasons:
            print(f"note: {name} changes nothing here: {reasons[name]}")


def _default_out(config: settings.Config, data: str) -> Path:
    name = config.recipe.replace("/", "-") or config.method
    place = Path(data.rpartition(":")[2]).name or "images"
    return Path("runs") / f"{name}-{place}-seed{config.seed}"


def _say_where(outcome: "Outcome") -> None:
    console = Console(soft_wrap=True)
    if outcome.step < outcome.total:
        where = f"{outcome.step:,} of {outcome.total:,}"
        stopped = f"stopped and saved at step {where} in {outcome.folder}"
        if outcome.saved < outcome.step:
            stopped = f"stopped at step {where}, where the run seemed ill: {outcome.folder} is as "
            stopped += f"it was at step {outcome.saved:,}"
        console.print(f"{stopped}; the same command goes on", highlight=False, markup=False)
        return
    if outcome.accuracy is not None:
        console.print(
            f"labels held out: nearest neighbors {outcome.accuracy.neighbors:.1%}, "
            f"linear probe {outcome.accuracy.probe:.1%} of {outcome.accuracy.count:,}",
            highlight=False,
        )
    console.print(
        f'encoder: {outcome.folder / ENCODER}\nin Python: compressive.load("{outcome.folder}")',
        highlight=False,
        markup=False,
    )


@app.command(name="recipes")
def show_recipes(
    name: Annotated[str, typer.Argument(help="Show this one with every value.")] = "",
) -> None:
    """List the recipes, or show one with every value and where it comes from."""
    from compressive.cli import settings_reference as reference

    with one_line_errors():
        console = Console(soft_wrap=True)
        if not name:
            table = Table(title="Recipes", box=None)
            table.add_column("name", no_wrap=True)
            for column in ("about", "expected"):
                table.add_column(column, overflow="fold")
            for each in recipes.names():
                recipe = recipes.get(each)
                table.add_row(each, recipe.about, recipe.expected)
            console.print(table)
            return
        recipe = recipes.get(name)
        console.print(f"[bold]{recipe.name}[/]  {recipe.about}", highlight=False)
        console.print(f"expected: {recipe.expected}\nhardware: {recipe.hardware}", highlight=False)
        table = Table(box=None)
        for column in ("setting", "value", "from"):
            table.add_column(column, overflow="fold")
        for setting, value in settings.flat(recipe.config).items():
            table.add_row(setting, reference.written(value), recipe.origins[setting])
        console.print(table)
        if any(" row " in origin for origin in recipe.origins.values()):
            console.print("rows are those of the table in docs/notation.md", highlight=False)
        for variant in recipe.variants:
            changes = " ".join(f"--set {change}" for change in variant.changes)
            top1 = "" if variant.top1 is None else f", top-1 {variant.top1}"
            console.print(f"{changes}  [dim]{variant.what}{top1}[/]", highlight=False)


@app.command(name="settings")
def show_settings(
    name: Annotated[str, typer.Argument(help="A section or a setting: optim, optim.lr.")] = "",
    markdown: Annotated[bool, typer.Option(help="All of them as a document.")] = False,
) -> None:
    """Every setting: its default, what it may be, and what it means."""
    from compressive.cli import settings_reference as reference

    with one_line_errors():
        found = reference.find(name)
        if markdown:
            typer.echo(reference.markdown(found), nl=False)
            return
        console = Console()
        for section in found:
            console.print(f"[bold]{section.name or 'run'}[/]  {section.about}", highlight=False)
            table = Table(box=None)
            table.add_column("setting", no_wrap=True)
            for column in ("default", "allowed", "meaning"):
                table.add_column(column, overflow="fold")
            for setting in section.settings:
                table.add_row(*map(escape, setting))
            console.print(table, highlight=False)


@app.command()
def meter(
    dim: Annotated[int, typer.Option(help="Dimension of the projections.")] = 256,
    batch: Annotated[int, typer.Option(help="Images in a batch.")] = 512,
    kappa_e: Annotated[
        float, typer.Option(help="Sharpness of e(z|x): the channel's width.")
    ] = 1024,
    kappa_b: Annotated[float, typer.Option(help="Sharpness of b(z|y): 1 / temperature.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the random directions.")] = 0,
) -> None:
    """Read the information meter of C-SimCLR on random directions.

    Shows, for views that agree more and more, how many nats a sample z of view X keeps that view
    Y cannot predict, how much of that training can still remove, and how much it tells about Y:
    what kappa_e and kappa_b mean before a single image is loaded.
    """
    from compressive.cli.meter import meter_table

    with one_line_errors():
        Console().print(meter_table(dim, batch, kappa_e, kappa_b, seed))


for command in (
    commands.evaluate,
    commands.embed,
    commands.compare,
    commands.report,
    commands.sweep,
    commands.watch,
):
    app.command()(command)

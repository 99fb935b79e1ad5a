"""Commands that train: quickstart, pretrain, sweep."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compressive import recipes
from compressive.cli.terminal import (
    SafeTable,
    one_line_errors,
    path_argument,
    path_option,
    print_error,
    print_line,
    require_at_least,
)
from compressive.config import Config, unused_settings, with_data
from compressive.metric_info import ONE_SEED
from compressive.rundir.files import CONFIG, ENCODER
from compressive.sweep.plan import check_evaluation, plan_runs

if TYPE_CHECKING:
    from compressive.train.loop import Outcome

_SOURCE_HELP = (
    "A folder of images or of class folders, parquet or tar shards, torchvision:NAME, or builtin."
)
_SET_HELP = "Change one of `compressive settings`; may be repeated."
_VARY_HELP = "A setting to vary; may be repeated."
_PRESET_HELP = "An ablation of the paper: beta, kappa-e, kappa-b, crop-area, loss-weight."
_SWEEP_SUITE_HELP = "Tasks to evaluate: quick, standard, paper, or none to only train."
_SWEEP_IMAGES_HELP = "Evaluate on at most this many images of a split; 0: all."
_SWEEP_HELD_OUT_HELP = "Evaluate on a fifth of the training images; reads no test image."
_RUN_HELP = "Folder of the run; default: runs/RECIPE-DATA-seedN."
_RESUME_HELP = "Resume the run in that folder, or refuse the folder."
DataSource = Annotated[str, path_argument(help=_SOURCE_HELP)]
RecipeName = Annotated[str, typer.Option(help="Base settings; `compressive recipes` lists them.")]
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help=_SET_HELP)]
Axes = Annotated[
    list[str] | None, typer.Option("--vary", metavar="NAME=VALUE,VALUE,...", help=_VARY_HELP)
]
RandomSeed = Annotated[int, typer.Option(help="Seed of everything random.")]


def quickstart_command(
    out: Annotated[Path, path_option(help="Folder of the two runs.")] = Path("runs/quickstart"),
    seed: RandomSeed = 0,
) -> None:
    """Train SimCLR and C-SimCLR on built-in images and compare them: no data, no GPU needed.

    Takes three to five minutes on a CPU. Prints a table of test accuracies and writes a report of
    both runs.
    """
    with one_line_errors():  # also for Ctrl-C during the imports
        require_at_least(0, seed=seed)
        from compressive.cli.quickstart import QUICKSTART_METHODS, run_quickstart
        from compressive.evaluation.tables import verdicts
        from compressive.report.page import write_report

        table = Table(
            title="Built-in images, 12 classes",
            caption="test accuracy; reducible_residual: nats that only one view contains; "
            "Lipschitz: response to changes of color, lower is smoother; "
            f"{ONE_SEED}",
        )
        for name in ("", "linear", "kNN", "10 % labels", "reducible_residual", "Lipschitz"):
            table.add_column(name, justify="right" if name else "left")
        outcome = None
        for row in run_quickstart(out, seed=seed):
            shares = (row.accuracy, row.neighbors, row.few_labels)
            cells = ["" if share is None else f"{share:.1%}" for share in shares]
            numbers = (row.reducible_residual, row.lipschitz)
            cells += ["" if number is None else f"{number:.2f}" for number in numbers]
            table.add_row(row.name, *cells)
            outcome = row.outcome
        Console().print(table)
        if outcome is not None:
            print_outcome(outcome)
            if outcome.step < outcome.total:
                raise typer.Exit(130)
        runs = [out / method for method in QUICKSTART_METHODS]
        page = write_report(runs, out / "report.html", verdicts=verdicts(runs))
        print_line(f"report: {page}, one page to open in a browser")


def pretrain_command(
    data: DataSource,
    recipe: RecipeName = "",
    changes: Changes = None,
    epochs: Annotated[int | None, typer.Option(help="Short for --set train.epochs=N.")] = None,
    steps: Annotated[int | None, typer.Option(help="Short for --set train.steps=N.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=N.")] = None,
    out: Annotated[Path | None, path_option(help=_RUN_HELP)] = None,
    resume: Annotated[bool, typer.Option(help=_RESUME_HELP)] = True,
) -> None:
    """Train an encoder on images without labels.

    Without a recipe, settings are chosen from the number of images, their size and the machine. If
    there are labels, a linear probe and kNN report accuracy on held-out training images; the
    encoder never learns from labels.

    Stops and saves on Ctrl-C; run the same command to resume. Under torchrun all processes train
    together.
    """
    with one_line_errors():
        short = {"train.epochs": epochs, "train.steps": steps, "seed": seed}
        given = [f"{name}={value}" for name, value in short.items() if value is not None]
        given += changes or ()
        # Check recipe and settings before torch is imported, which takes seconds.
        config = with_data(recipes.get(recipe).config if recipe else Config(), data, *given)
        from compressive import distributed
        from compressive.train.auto_config import auto_config
        from compressive.train.loop import pretrain

        distributed.start()
    try:
        with one_line_errors():
            if not recipe:
                config = with_data(auto_config(data, given), data, *given)
            if distributed.rank() == 0:
                _print_unused(config, given)
            name = config.recipe.replace("/", "-") or config.method
            images = Path(data.rpartition(":")[2]).name or "images"
            default = Path("runs") / f"{name}-{images}-seed{config.seed}"
            outcome = pretrain(config, out or default, resume=resume)
        if distributed.rank() == 0:
            print_outcome(outcome)
    finally:
        distributed.stop()
    if outcome.step < outcome.total:
        raise typer.Exit(130)


def _print_unused(config: Config, changes: list[str]) -> None:
    """Print a line for each changed setting that the run does not read."""
    reasons = unused_settings(config)
    for name in dict.fromkeys(change.split("=")[0].strip() for change in changes):
        if name in reasons:
            print(f"note: {name} has no effect here: {reasons[name]}")


def print_outcome(outcome: "Outcome") -> None:
    """Print the final accuracy and the encoder, or where the run stopped and how to resume."""
    if outcome.step < outcome.total:
        step = f"{outcome.step:,} of {outcome.total:,}"
        stopped = f"stopped and saved at step {step} in {outcome.folder}"
        if outcome.saved < outcome.step:
            stopped = (
                f"stopped at step {step}, where the run seemed to fail; the last checkpoint in "
                f"{outcome.folder} is of step {outcome.saved:,}"
            )
        print_line(f"{stopped}; run the same command to resume")
        return
    if outcome.accuracy is not None:
        print_line(
            f"held-out labels: kNN {outcome.accuracy.neighbors:.1%}, "
            f"linear probe {outcome.accuracy.probe:.1%} of {outcome.accuracy.count:,} images"
        )
    print_line(f"encoder: {outcome.folder / ENCODER}")
    print_line(f'in Python: compressive.load("{outcome.folder}")')


def sweep_command(
    data: DataSource,
    recipe: RecipeName = "",
    vary: Axes = None,
    preset: Annotated[str, typer.Option(help=_PRESET_HELP)] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of each setting, with commas.")] = "0",
    changes: Changes = None,
    suite: Annotated[str, typer.Option(help=_SWEEP_SUITE_HELP)] = "quick",
    tasks: Annotated[
        str, typer.Option("--tasks", metavar="TASKS", help="Some tasks, with commas.")
    ] = "",
    max_images: Annotated[int, typer.Option(help=_SWEEP_IMAGES_HELP)] = 0,
    held_out: Annotated[bool, typer.Option("--held-out", help=_SWEEP_HELD_OUT_HELP)] = False,
    jobs: Annotated[int, typer.Option(help="Runs at the same time.")] = 1,
    out: Annotated[Path, path_option(help="Folder of the sweep.")] = Path("sweeps/sweep"),
) -> None:
    """Train and evaluate every combination of some settings, and compare them in one table.

    The same command resumes a sweep and skips finished runs. A failed run does not end the others.
    Prints a table and writes a report.
    """
    with one_line_errors():
        if not (vary or preset or "," in seeds):
            raise ValueError("nothing is varied; give --vary, --preset or several --seeds")
        base: dict[str, Any] = {"recipe": recipe, "preset": preset, "seeds": seeds}
        base |= {"vary": vary or (), "changes": changes or ()}
        # Check settings and tasks before NumPy and torch are imported.
        plan_runs(data, **base)
        check_evaluation(suite, tasks, max_images, held_out)
        from compressive.sweep.runner import sweep
        from compressive.sweep.table import legend, sweep_table

        asked = {"suite": suite, "tasks": tasks, "max_images": max_images, "held_out": held_out}
        result = sweep(data, out, **base, **asked, at_once=jobs)
        Console().print(SafeTable(sweep_table(str(out), result.rows)))
        print_line(legend(result.rows))
        if runs := runs_of_sweep(out):
            from compressive.evaluation.tables import verdicts
            from compressive.report.page import write_report

            found = verdicts(runs, held_out=held_out)
            page = write_report(runs, out / "report.html", held_out=held_out, verdicts=found)
            print_line(f"report: {page}")
    for log in result.failed:
        print_error(f"a run failed; its output is in {log}")
    if result.interrupted:
        print_error("stopped; run the same command to resume")
        raise typer.Exit(130)
    if result.failed:
        raise typer.Exit(1)


def runs_of_sweep(out: Path) -> list[Path]:
    """Return the folders of the runs that a sweep has started."""
    return sorted(path.parent for path in out.glob(f"*/{CONFIG}"))

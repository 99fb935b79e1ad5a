"""The command that trains many runs: sweep."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compressive.cli.completion import (
    complete_preset,
    complete_setting,
    complete_suite,
    complete_tasks,
)
from compressive.cli.engine_options import CpusPerTask, EngineName, GpusPerTask
from compressive.cli.terminal import (
    SafeTable,
    one_line_errors,
    path_option,
    print_error,
    print_line,
)
from compressive.cli.train_commands import (
    Changes,
    DataSources,
    RecipeName,
    TrackerNames,
    panel_option,
)
from compressive.data.location import check_exists
from compressive.engine.choice import LOCAL, parse_engine
from compressive.engine.opening import open_engine
from compressive.evaluation.tasks import SUITES
from compressive.rundir.places import join_places
from compressive.sweep.packing import AUTOMATIC, parse_at_once
from compressive.sweep.plan import PRESETS, check_evaluation, plan_runs
from compressive.tracking import check_trackers

_VARY_HELP = "A setting to vary; may be repeated."
_PRESET_HELP = f"An ablation of the paper: {', '.join(PRESETS)}."
_SWEEP_SUITE_HELP = f"Tasks to evaluate: {', '.join(SUITES)}, or none to only train."
_SWEEP_TASKS_HELP = "Evaluate these tasks instead of a suite, with commas."
_SWEEP_IMAGES_HELP = "Evaluate on at most this many images of a split; 0: all."
_SWEEP_HELD_OUT_HELP = "Evaluate on a fifth of the training images; reads no test image."
_AT_ONCE_HELP = "Runs at the same time; auto: as many as a GPU gains from, 1 on a CPU."
_EVALUATION = "Evaluation"
Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        metavar="NAME=VALUE,VALUE,...",
        help=_VARY_HELP,
        autocompletion=complete_setting,
    ),
]


def sweep_command(
    data: DataSources,
    recipe: RecipeName = "",
    vary: Axes = None,
    preset: Annotated[str, typer.Option(help=_PRESET_HELP, autocompletion=complete_preset)] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of each setting, with commas.")] = "0",
    changes: Changes = None,
    suite: Annotated[
        str, panel_option(_EVALUATION, _SWEEP_SUITE_HELP, autocompletion=complete_suite)
    ] = "quick",
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="TASKS",
            help=_SWEEP_TASKS_HELP,
            autocompletion=complete_tasks,
            rich_help_panel=_EVALUATION,
        ),
    ] = "",
    max_images: Annotated[int, panel_option(_EVALUATION, _SWEEP_IMAGES_HELP)] = 0,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help=_SWEEP_HELD_OUT_HELP, rich_help_panel=_EVALUATION),
    ] = False,
    at_once: Annotated[
        str, typer.Option("--at-once", "--jobs", metavar="auto|N", help=_AT_ONCE_HELP)
    ] = AUTOMATIC,
    track: TrackerNames = None,
    engine: EngineName = LOCAL,
    gpus_per_task: GpusPerTask = None,
    cpus_per_task: CpusPerTask = 0,
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
        # Check settings, path and tasks before NumPy and torch are imported.
        place = join_places(data)
        plan_runs(place, **base)
        check_exists(place)
        check_evaluation(suite, tasks, max_images, held_out)
        check_trackers(track or "")
        parse_at_once(at_once)
        choice = parse_engine(engine, gpus_per_task, cpus_per_task)
        from compressive.evaluation.runs import report_runs, runs_of_sweep
        from compressive.sweep.runner import sweep
        from compressive.sweep.table import legend, sweep_table

        asked = {"suite": suite, "tasks": tasks, "max_images": max_images, "held_out": held_out}
        options: dict[str, Any] = {"at_once": at_once, "track": track or ""}
        # The runs choose their devices: reserve GPUs if the cluster has some.
        with open_engine(choice, "auto") as opened:
            result = sweep(place, out, **base, **asked, **options, engine=opened)
        if has_rows := any(row.done or row.failed for row in result.rows):
            Console().print(SafeTable(sweep_table(str(out), result.rows)))
            print_line(legend(result.rows))
        else:
            print_line(f"no run of {out} has finished, so there is no table yet")
        if has_rows and (runs := runs_of_sweep(out)):
            page = report_runs(*runs, out=out / "report.html", held_out=held_out)
            print_line(f"report: {page}, one page to open in a browser")
    for log in result.failed:
        print_error(f"a run failed; its output is in {log}")
    if result.interrupted:
        print_error("stopped; run the same command to resume")
        raise typer.Exit(130)
    if result.failed:
        raise typer.Exit(1)

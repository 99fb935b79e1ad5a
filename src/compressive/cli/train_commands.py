"""Commands that train: quickstart, pretrain, sweep."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compressive import recipes
from compressive.cli.completion import (
    complete_data,
    complete_method,
    complete_preset,
    complete_recipe,
    complete_setting,
    complete_suite,
    complete_tasks,
    complete_trackers,
)
from compressive.cli.outcome import print_outcome
from compressive.cli.terminal import (
    SafeTable,
    one_line_errors,
    path_argument,
    path_option,
    print_error,
    print_line,
    print_next,
    require_at_least,
)
from compressive.config import DEVICE_NAMES, METHODS, Config, with_data
from compressive.data.location import check_exists
from compressive.evaluation.tasks import SUITES
from compressive.metric_info import ONE_SEED
from compressive.recipes.options import as_changes
from compressive.rundir.folder import read_config
from compressive.rundir.places import join_places
from compressive.storage.address import is_remote
from compressive.sweep.plan import PRESETS, check_evaluation, plan_runs
from compressive.tracking import check_trackers

if TYPE_CHECKING:
    pass

_SOURCE_HELP = (
    "A folder of images or of class folders, parquet or tar shards, also on s3://, gs:// or hf://, "
    "a zip or tar.gz archive, a list of paths, a folder of save_to_disk, torchvision:NAME, or "
    "builtin."
)
_SOURCES_HELP = f"{_SOURCE_HELP} Several sources are one data set."
_SET_HELP = "Change one of `compressive settings`; may be repeated."
_VARY_HELP = "A setting to vary; may be repeated."
_PRESET_HELP = f"An ablation of the paper: {', '.join(PRESETS)}."
_SWEEP_SUITE_HELP = f"Tasks to evaluate: {', '.join(SUITES)}, or none to only train."
_SWEEP_TASKS_HELP = "Evaluate these tasks instead of a suite, with commas."
_SWEEP_IMAGES_HELP = "Evaluate on at most this many images of a split; 0: all."
_SWEEP_HELD_OUT_HELP = "Evaluate on a fifth of the training images; reads no test image."
_RUN_HELP = "Folder of the run, also s3:// or gs://; default: runs/NAME-DATA-seedN."
_RESUME_HELP = "Resume the run in that folder, or refuse the folder."
_CONTINUE_HELP = (
    "Start a new run from the last checkpoint of this one, with its settings and optimizer state. "
    "--epochs counts its epochs, too; the learning rate follows the longer schedule."
)
_WEIGHTS_HELP = "Trained weights to start from: a run, a file, a timm name, an hf-hub: id."
_METHOD_HELP = f"{', '.join(METHODS)}; c- is the compressed method."
_LR_HELP = "Peak learning rate for 256 images; scaled with the batch size."
_LABELS_HELP = "folder: use class folders and labels, only to measure accuracy; none: ignore them."
_MODEL, _TRAINING, _MACHINE = "Method and network", "Training", "Machine"
_OUTPUT, _OTHER = "Output and resuming", "Any other setting"
_EVALUATION = "Evaluation"
_TRACK_HELP = "Also log to these trackers, with commas: wandb, mlflow, trackio."
DataSource = Annotated[str, path_argument(help=_SOURCE_HELP, autocompletion=complete_data)]
DataSources = Annotated[list[str], path_argument(help=_SOURCES_HELP, autocompletion=complete_data)]
RecipeName = Annotated[
    str,
    typer.Option(
        help="Base settings; `compressive recipes` lists them.", autocompletion=complete_recipe
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help=_SET_HELP,
        autocompletion=complete_setting,
        rich_help_panel=_OTHER,
    ),
]
Axes = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        metavar="NAME=VALUE,VALUE,...",
        help=_VARY_HELP,
        autocompletion=complete_setting,
    ),
]
TrackerNames = Annotated[
    str | None,
    typer.Option(
        "--track",
        metavar="NAMES",
        help=_TRACK_HELP,
        autocompletion=complete_trackers,
        rich_help_panel=_OUTPUT,
    ),
]
RandomSeed = Annotated[int, typer.Option(help="Seed of everything random.")]


def _option(panel: str, text: str, **more: Any) -> Any:
    return typer.Option(rich_help_panel=panel, help=text, **more)


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
        from compressive.evaluation.runs import report_runs

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
        page = report_runs(*runs, out=out / "report.html")
        print_line(f"report: {page}, one page to open in a browser")
        print_next("compare", *runs)


def pretrain_command(
    data: DataSources,
    recipe: Annotated[
        str,
        _option(
            _MODEL,
            "Base settings; `compressive recipes` lists them.",
            autocompletion=complete_recipe,
        ),
    ] = "",
    method: Annotated[
        str | None, _option(_MODEL, _METHOD_HELP, autocompletion=complete_method)
    ] = None,
    backbone: Annotated[str | None, _option(_MODEL, "timm model name, such as resnet50.")] = None,
    weights: Annotated[str | None, _option(_MODEL, _WEIGHTS_HELP)] = None,
    image_size: Annotated[int | None, _option(_MODEL, "Side of a view in pixels.")] = None,
    epochs: Annotated[int | None, _option(_TRAINING, "Passes over the images.")] = None,
    steps: Annotated[
        int | None, _option(_TRAINING, "Train for this many steps instead of epochs.")
    ] = None,
    batch_size: Annotated[
        int | None, _option(_TRAINING, "Images per step over all processes.")
    ] = None,
    lr: Annotated[float | None, _option(_TRAINING, _LR_HELP)] = None,
    seed: Annotated[int | None, _option(_TRAINING, "Seed of everything random.")] = None,
    labels: Annotated[str | None, _option(_TRAINING, _LABELS_HELP)] = None,
    device: Annotated[str | None, _option(_MACHINE, f"{DEVICE_NAMES}.")] = None,
    precision: Annotated[str | None, _option(_MACHINE, "auto, bf16 or float32.")] = None,
    workers: Annotated[
        int | None, _option(_MACHINE, "Threads that decode images; 0: one per core.")
    ] = None,
    out: Annotated[str | None, path_option(help=_RUN_HELP, rich_help_panel=_OUTPUT)] = None,
    resume: Annotated[bool, _option(_OUTPUT, _RESUME_HELP)] = True,
    continue_from: Annotated[
        Path | None, path_option(help=_CONTINUE_HELP, rich_help_panel=_OUTPUT)
    ] = None,
    track: TrackerNames = None,
    changes: Changes = None,
) -> None:
    """Train an encoder on images without labels.

    Without a recipe, settings are chosen from the number of images, their size and the machine. If
    there are labels, a linear probe and kNN report accuracy on held-out training images; the
    encoder never learns from labels.

    Stops and saves on Ctrl-C; run the same command to resume. Under torchrun all processes train
    together.
    """
    with one_line_errors():
        options: dict[str, Any] = {
            **{"method": method, "backbone": backbone, "image_size": image_size, "epochs": epochs},
            **{"steps": steps, "batch_size": batch_size, "lr": lr, "seed": seed, "labels": labels},
            **{"device": device, "precision": precision, "workers": workers, "weights": weights},
            "track": track,
        }
        given = as_changes(options, changes or ())
        # Check recipe, settings and path before torch is imported, which takes seconds.
        base = recipes.get(recipe).config if recipe else Config()
        place = join_places(data)
        config = with_data(read_config(continue_from) if continue_from else base, place, *given)
        check_trackers(config.train.track)
        check_exists(place)
        _check_out(out)
        from compressive import distributed
        from compressive.train.start import pretrain

        options |= {"resume": resume, "continue_from": continue_from}
        distributed.start()
    try:
        with one_line_errors():
            outcome = pretrain(place, out, recipe=recipe, settings=changes or (), **options)
        if distributed.rank() == 0:
            print_outcome(outcome)
            if out is not None and is_remote(out):
                print_line(f"on storage: {out}")
    finally:
        distributed.stop()
    if outcome.step < outcome.total:
        raise typer.Exit(130)


def _check_out(out: str | None) -> None:
    """Raise an error if a run cannot be written to object storage, in one process."""
    if out is not None and is_remote(out) and os.environ.get("RANK", "0") == "0":
        from compressive.storage.mirror import check_writable

        check_writable(out)


def sweep_command(
    data: DataSource,
    recipe: RecipeName = "",
    vary: Axes = None,
    preset: Annotated[str, typer.Option(help=_PRESET_HELP, autocompletion=complete_preset)] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of each setting, with commas.")] = "0",
    changes: Changes = None,
    suite: Annotated[
        str, _option(_EVALUATION, _SWEEP_SUITE_HELP, autocompletion=complete_suite)
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
    max_images: Annotated[int, _option(_EVALUATION, _SWEEP_IMAGES_HELP)] = 0,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help=_SWEEP_HELD_OUT_HELP, rich_help_panel=_EVALUATION),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Runs at the same time.")] = 1,
    track: TrackerNames = None,
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
        plan_runs(data, **base)
        check_exists(data)
        check_evaluation(suite, tasks, max_images, held_out)
        check_trackers(track or "")
        from compressive.evaluation.runs import report_runs, runs_of_sweep
        from compressive.sweep.runner import sweep
        from compressive.sweep.table import legend, sweep_table

        asked = {"suite": suite, "tasks": tasks, "max_images": max_images, "held_out": held_out}
        result = sweep(data, out, **base, **asked, at_once=jobs, track=track or "")
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

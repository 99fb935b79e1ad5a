"""Commands that train one run or two: quickstart, pretrain."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compressive import recipes
from compressive.cli.completion import (
    complete_data,
    complete_method,
    complete_recipe,
    complete_setting,
    complete_trackers,
)
from compressive.cli.outcome import print_outcome
from compressive.cli.remote_output import check_remote_folder, print_stored
from compressive.cli.second_process import QUICKSTART_METHODS, second_process
from compressive.cli.terminal import (
    one_line_errors,
    path_argument,
    path_option,
    print_line,
    print_next,
    require_at_least,
)
from compressive.config import DEVICE_NAMES, METHODS, Config, with_data
from compressive.data.location import check_exists
from compressive.metric_info import ONE_SEED
from compressive.platforms.compile_process import start_early
from compressive.platforms.garbage import collect_rarely
from compressive.recipes.options import as_changes
from compressive.rundir.compile_marks import may_need_compiling
from compressive.rundir.folder import read_config
from compressive.rundir.places import join_places
from compressive.tracking import check_trackers

_SOURCE_HELP = (
    "A folder of images or of class folders, parquet or tar shards, also on s3://, gs:// or hf://, "
    "a zip or tar.gz archive, a list of paths, a folder of save_to_disk, torchvision:NAME, or "
    "builtin."
)
_SOURCES_HELP = f"{_SOURCE_HELP} Several sources are one data set."
_SET_HELP = "Change one of `compressive settings`; may be repeated."
_RUN_HELP = "Folder of the run, also s3:// or gs://; default: runs/NAME-DATA-seedN."
_RESUME_HELP = (
    "Resume the run in an existing folder; with --no-resume, an existing run is an error."
)
_CONTINUE_HELP = (
    "Start a new run from the last checkpoint of this one, with its settings and optimizer state. "
    "--epochs is the total with those of that run; the learning rate follows the longer schedule."
)
_BACKBONE_HELP = "timm model name, such as resnet50."
_WEIGHTS_HELP = "Trained weights to start from: a run, a file, a timm name, an hf-hub: id."
_METHOD_HELP = (
    f"{', '.join(METHODS)}; c- adds compression. Default: c-simclr, or the method of the recipe."
)
_LR_HELP = "Peak learning rate for 256 images; scaled with the batch size."
_LABELS_HELP = "folder: use class folders and labels, only to measure accuracy; none: ignore them."
_MODEL, _TRAINING, _MACHINE = "Method and network", "Training", "Machine"
_OUTPUT, _OTHER = "Output and resuming", "Any other setting"
_TRACK_HELP = "Also log to these trackers, with commas: wandb, mlflow, trackio."
_COLUMN_HELP = (
    "linear: logistic regression with all labels; 10 % labels: with a tenth of them",
    "kNN: accuracy of the 20 nearest neighbors",
    "corrupted: mean accuracy over 14 types of corruption of {images} images",
    "nats: information kept of one view that the other cannot predict, only what training reduces",
    "Lipschitz: response of the projection to changes of color; lower is smoother",
    f"{ONE_SEED}; the README has ranges over five seeds",
)
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
RandomSeed = Annotated[int, typer.Option(help="Random seed.")]


def panel_option(panel: str, text: str, **more: Any) -> Any:
    """Return an option in a panel of the help."""
    return typer.Option(rich_help_panel=panel, help=text, **more)


def quickstart_command(
    out: Annotated[Path, path_option(help="Folder of the two runs.")] = Path("runs/quickstart"),
    seed: RandomSeed = 0,
) -> None:
    """Train SimCLR and C-SimCLR on built-in images and compare them: no data, no GPU needed.

    Takes about a minute and a half on two x86 cores. Prints a table of test results and writes a
    report of both runs.
    """
    with one_line_errors():
        require_at_least(0, seed=seed)
    with one_line_errors(), second_process(out, seed) as process:  # also for Ctrl-C in the imports
        from compressive.cli.quickstart import CORRUPTED_IMAGES, run_quickstart
        from compressive.evaluation.runs import report_runs

        table = Table(title="Built-in images, 12 classes, results on test images")
        measures = ("linear", "kNN", "10 % labels", "corrupted", "nats", "Lipschitz")
        for name in ("", *measures):
            table.add_column(name, justify="right" if name else "left")
        outcome = None
        for row in run_quickstart(out, seed=seed, process=process):
            shares = (row.accuracy, row.neighbors, row.few_labels, row.corrupted)
            cells = ["" if share is None else f"{share:.1%}" for share in shares]
            numbers = (row.reducible_residual, row.lipschitz)
            cells += ["" if number is None else f"{number:.2f}" for number in numbers]
            table.add_row(row.name, *cells)
            outcome = row.outcome
        Console().print(table)
        if outcome is not None and outcome.step < outcome.total:
            print_outcome(outcome)
            raise typer.Exit(130)
        for line in _COLUMN_HELP:
            print_line(line.format(images=CORRUPTED_IMAGES))
        runs = [out / method for method in QUICKSTART_METHODS]
        page = report_runs(*runs, out=out / "report.html")
        print_line(f"report: {page}, one page to open in a browser")
        print_line(f'in Python: compressive.load("{runs[-1]}")')
        print_next("compare", *runs)


def pretrain_command(
    data: DataSources,
    recipe: Annotated[
        str,
        panel_option(
            _MODEL,
            "Base settings; `compressive recipes` lists them.",
            autocompletion=complete_recipe,
        ),
    ] = "",
    method: Annotated[
        str | None, panel_option(_MODEL, _METHOD_HELP, autocompletion=complete_method)
    ] = None,
    backbone: Annotated[str | None, panel_option(_MODEL, _BACKBONE_HELP)] = None,
    weights: Annotated[str | None, panel_option(_MODEL, _WEIGHTS_HELP)] = None,
    image_size: Annotated[int | None, panel_option(_MODEL, "Side of a view in pixels.")] = None,
    epochs: Annotated[int | None, panel_option(_TRAINING, "Passes over the images.")] = None,
    steps: Annotated[
        int | None, panel_option(_TRAINING, "Train for this many steps instead of epochs.")
    ] = None,
    batch_size: Annotated[
        int | None, panel_option(_TRAINING, "Images per step over all processes.")
    ] = None,
    lr: Annotated[float | None, panel_option(_TRAINING, _LR_HELP)] = None,
    seed: Annotated[int | None, panel_option(_TRAINING, "Random seed.")] = None,
    labels: Annotated[str | None, panel_option(_TRAINING, _LABELS_HELP)] = None,
    device: Annotated[str | None, panel_option(_MACHINE, f"{DEVICE_NAMES}.")] = None,
    precision: Annotated[str | None, panel_option(_MACHINE, "auto, bf16 or float32.")] = None,
    workers: Annotated[
        int | None, panel_option(_MACHINE, "Threads that decode images; 0: automatic.")
    ] = None,
    out: Annotated[str | None, path_option(help=_RUN_HELP, rich_help_panel=_OUTPUT)] = None,
    resume: Annotated[bool, panel_option(_OUTPUT, _RESUME_HELP)] = True,
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
        check_remote_folder(out)
        collect_rarely()  # until the first step
        if may_need_compiling(config, is_complete=bool(recipe)):
            start_early()
        from compressive import distributed
        from compressive.train.start import pretrain

        options |= {"resume": resume, "continue_from": continue_from}
        is_fixed = recipe or continue_from or any(c.startswith("train.batch_size=") for c in given)
        batch_size = config.train.batch_size if is_fixed else 0
        distributed.start(batch_size, config.train.grad_accum_steps)
        if distributed.is_spare():
            distributed.wait_as_spare()
            raise typer.Exit
        if distributed.rank() == 0 and (note := distributed.spare_note()):
            print_line(note)
    try:
        with one_line_errors():
            outcome = pretrain(place, out, recipe=recipe, settings=changes or (), **options)
        if distributed.rank() == 0:
            print_outcome(outcome)
            print_stored(out)
    finally:
        distributed.stop()
    if outcome.step < outcome.total:
        raise typer.Exit(130)

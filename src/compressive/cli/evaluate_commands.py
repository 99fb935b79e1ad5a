"""Commands on trained encoders: evaluate, embed, compare, report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from compressive.cli.completion import complete_encoder, complete_suite, complete_tasks
from compressive.cli.engine_options import CpusPerTask, EngineName, GpusPerTask
from compressive.cli.remote_output import check_remote_folder, print_stored
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
from compressive.config import DEVICE_NAMES, check_device_name
from compressive.data.location import check_exists
from compressive.engine.choice import LOCAL, parse_engine
from compressive.engine.opening import open_engine
from compressive.evaluation.tasks import SUITES, TASKS, select_tasks, split_names
from compressive.platforms.garbage import collect_as_usual, collect_rarely
from compressive.progress import printable
from compressive.rundir.files import CONFIG, EVALUATION, HELD_OUT, RESULTS
from compressive.rundir.places import join_places
from compressive.weights import require_path

if TYPE_CHECKING:
    from compressive.evaluation.many import Evaluated

_ENCODER_HELP = (
    "A run folder, a checkpoint (in our, timm's or torchvision's format), the name of an encoder "
    "that comes with the package, or a timm model name with its published weights."
)
_NETWORK_HELP = "timm model name; needed only for third-party checkpoints."
_SIZE_HELP = "Side of the input of a third-party checkpoint in pixels; 0: as trained."
_OUT_HELP = "Folder of results.json, also s3:// or gs://; default: RUN/evaluation or RUN/held-out."
_HELD_OUT_HELP = "Evaluate on a fifth of the training images, for tuning; reads no test image."
_BENCHMARK_HELP = "Folder of transfer and robustness sets, and of SimCLR's 1percent.txt."
_FROST_HELP = "Folder with ImageNet-C's six photographs of frost; without it, frost is skipped."
_SUITE_HELP = f"{', '.join(SUITES)}; paper includes transfer and robustness."
_TASKS_HELP = f"Run these instead of a suite, with commas: {', '.join((*TASKS, 'calibration'))}."
_EPOCHS_HELP = "Epochs of the linear evaluation; 0: chosen by the number of images."
_MAX_IMAGES_HELP = (
    "Use at most this many images of a split; 0: all. Results do not replace those of more images."
)
_DATA_HELP = "Labeled images, as for pretrain; default: the run's; may be repeated."
_EVALUATION_LABELS_HELP = "folder: use labels; none: ignore them; default: as the run."
_FEATURES_HELP = "File to write: .parquet, .npz or .csv; also on s3:// or gs://."
_PAGE_HELP = "The page to write; default: report.html in the run, or here if there are several."
_RUNS_HELP = "Folders of runs or sweeps, or results.json files."
_WHAT, _IMAGES, _OTHERS = "What to measure", "Images", "Third-party weights"
_EVALUATION_MACHINE, _EVALUATION_OUTPUT = "Machine", "Output"
EncoderName = Annotated[str, path_argument(help=_ENCODER_HELP, autocompletion=complete_encoder)]
EncoderNames = Annotated[
    list[str],
    path_argument(metavar="ENCODER...", help=_ENCODER_HELP, autocompletion=complete_encoder),
]
TimmName = Annotated[str, typer.Option(help=_NETWORK_HELP, rich_help_panel=_OTHERS)]
InputSize = Annotated[int, typer.Option(help=_SIZE_HELP, rich_help_panel=_OTHERS)]
DeviceName = Annotated[
    str, typer.Option(help=f"{DEVICE_NAMES}.", rich_help_panel=_EVALUATION_MACHINE)
]
RunFolders = Annotated[list[Path], path_argument(help=_RUNS_HELP)]


_READERS = {  # how to read the features in Python
    ".parquet": 'pandas.read_parquet("{}")',
    ".npz": 'numpy.load("{}")["features"]',
    ".csv": 'pandas.read_csv("{}")',
}


def evaluate_command(
    encoders: EncoderNames,
    suite: Annotated[
        str,
        typer.Option(help=_SUITE_HELP, autocompletion=complete_suite, rich_help_panel=_WHAT),
    ] = "standard",
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks",
            metavar="TASKS",
            help=_TASKS_HELP,
            autocompletion=complete_tasks,
            rich_help_panel=_WHAT,
        ),
    ] = "",
    epochs: Annotated[int, typer.Option(help=_EPOCHS_HELP, rich_help_panel=_WHAT)] = 0,
    seed: Annotated[int, typer.Option(help="Random seed.", rich_help_panel=_WHAT)] = 0,
    data: Annotated[list[str] | None, path_option(help=_DATA_HELP, rich_help_panel=_IMAGES)] = None,
    labels: Annotated[
        str, typer.Option(help=_EVALUATION_LABELS_HELP, rich_help_panel=_IMAGES)
    ] = "",
    max_images: Annotated[int, typer.Option(help=_MAX_IMAGES_HELP, rich_help_panel=_IMAGES)] = 0,
    held_out: Annotated[
        bool, typer.Option("--held-out", help=_HELD_OUT_HELP, rich_help_panel=_IMAGES)
    ] = False,
    benchmark_root: Annotated[
        Path | None, path_option(help=_BENCHMARK_HELP, rich_help_panel=_IMAGES)
    ] = None,
    frost: Annotated[Path | None, path_option(help=_FROST_HELP, rich_help_panel=_IMAGES)] = None,
    network: TimmName = "",
    size: InputSize = 0,
    device: DeviceName = "auto",
    engine: EngineName = LOCAL,
    gpus_per_task: GpusPerTask = None,
    cpus_per_task: CpusPerTask = 0,
    out: Annotated[
        str | None, path_option(help=_OUT_HELP, rich_help_panel=_EVALUATION_OUTPUT)
    ] = None,
) -> None:
    """Measure encoders: accuracy, few labels, calibration, robustness, smoothness, information.

    No hyperparameter is tuned on test images. Features are cached next to the results. Tasks that
    cannot run are skipped and listed at the end. Several encoders are evaluated in turn, or at the
    same time with --engine ray; then --out has a folder for each.
    """
    with one_line_errors():  # also for Ctrl-C during the imports
        # Check options before torch is imported, which takes seconds.
        select_tasks(suite, split_names(tasks))
        check_device_name(device, "--device")
        require_at_least(0, seed=seed, size=size, max_images=max_images, epochs=epochs)
        choice = parse_engine(engine, gpus_per_task, cpus_per_task)
        for each in encoders:
            require_path(each)
        place = join_places(data) if data else ""
        if place:
            check_exists(place)
        check_remote_folder(out)
        collect_rarely()  # during the imports
        from compressive import distributed
        from compressive.evaluation.many import evaluate_many

        collect_as_usual()
        if len(encoders) > 1 and distributed.launched("WORLD_SIZE", 1) > 1:
            raise ValueError("torchrun evaluates one encoder at a time; give one, or --engine ray")
        distributed.start()
    is_first = distributed.rank() == 0
    failed = 0
    try:
        with one_line_errors(), open_engine(choice, device) as opened:
            for encoder, found in evaluate_many(
                encoders,
                opened,
                out=out,
                suite=suite,
                tasks=tasks,
                data=place,
                labels=labels,
                seed=seed,
                device=device,
                network=network,
                size=size,
                max_images=max_images,
                epochs=epochs,
                held_out=held_out,
                benchmark_root=benchmark_root,
                frost=frost,
            ):
                failed += bool(found.error)
                if is_first:
                    _print_evaluated(encoder, found, out, is_single=len(encoders) == 1)
    finally:
        distributed.stop()
    if is_first and len(encoders) > 1 and failed < len(encoders):
        print_stored(out)
        if not failed and out is None:
            print_next("compare", *encoders)
    if failed:
        raise typer.Exit(2)


def _print_evaluated(encoder: str, found: "Evaluated", out: str | None, *, is_single: bool) -> None:
    """Print the table of an encoder, or why there is none."""
    from compressive.evaluation.results_table import results_table

    if found.results is None:
        print_error(found.error if is_single else f"{encoder}: {found.error}")
        return
    Console().print(SafeTable(results_table(found.results)))
    for text in found.results.skipped:
        print_line(f"skipped: {text}")
    for text in found.results.notes:
        print_line(f"note: {text}")
    _warn_if_unfinished(encoder)
    print_line(f"results: {found.folder / RESULTS}")
    if is_single:
        print_stored(out)
        # Other commands find the results of a run only in its own folder.
        folder = found.folder
        is_main = folder.parent == Path(encoder) and folder.name in (EVALUATION, HELD_OUT)
        print_next("report", encoder if is_main else folder)


def _warn_if_unfinished(encoder: str) -> None:
    """Print a line if the encoder is that of a run that has not finished."""
    from compressive.rundir.reader import unfinished

    if (Path(encoder) / CONFIG).is_file() and (reason := unfinished(Path(encoder))):
        print_line(f"{encoder}: {reason}", stderr=True)


def embed_command(
    encoder: EncoderName,
    images: Annotated[list[str], path_argument(help="Images, as for pretrain; need no labels.")],
    out: Annotated[str, path_option(help=_FEATURES_HELP)] = "features.parquet",
    split: Annotated[str, typer.Option(help="Split of the images.")] = "train",
    network: TimmName = "",
    size: InputSize = 0,
    device: DeviceName = "auto",
    engine: EngineName = LOCAL,
    gpus_per_task: GpusPerTask = None,
    cpus_per_task: CpusPerTask = 0,
) -> None:
    """Write the features of images: one vector each, with the image's name and label."""
    with one_line_errors():
        check_device_name(device, "--device")
        require_at_least(0, size=size)
        choice = parse_engine(engine, gpus_per_task, cpus_per_task)
        require_path(encoder)
        place = join_places(images)
        check_exists(place)
        from compressive.distributed import launched
        from compressive.evaluation.embed import embed

        if launched("WORLD_SIZE", 1) > 1:
            raise ValueError("embed runs in one process; start it without torchrun")
        from compressive.rundir.stored_output import uploaded_files

        options = {"split": split, "network": network, "size": size, "device": device}
        with open_engine(choice, device) as opened, uploaded_files(out) as (path,):
            found = embed(encoder, place, path, **options, engine=opened)
    for origin, reason in found.unreadable:
        print_line(f"skipped: {origin}: {reason}")
    print_line(f"features: {out}, {found.count:,} images, {found.dim:,} numbers each")
    print_line(f"in Python: {_READERS[found.path.suffix.lower()].format(out)}")
    _warn_if_unfinished(encoder)
    print_next("evaluate", encoder, *(word for each in images for word in ("--data", each)))


def compare_command(
    runs: RunFolders,
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
) -> None:
    """Compare runs: their values, the difference with a confidence interval, and a verdict.

    Compares the first run with each of the others. Runs that differ only in their seed form one
    group; then the interval is over seeds, otherwise over test images, paired.
    """
    with one_line_errors():
        from compressive.evaluation.results import read
        from compressive.evaluation.runs import compare_runs, expand_sweeps, results_folder
        from compressive.rundir.reader import of_other_weights

        console = Console()
        for each in compare_runs(*runs):
            if markdown:
                lines = each.markdown().split("\n")
                print(*map(printable, lines), sep="\n", end="\n\n")
            else:
                console.print(SafeTable(each.table(width=console.width)))
        for run in expand_sweeps(runs):
            _warn_if_unfinished(str(run))
            if older := of_other_weights(run, read(results_folder(run)).about):
                print_line(f"{run}: {older}", stderr=True)
        if not markdown:
            print_next("report", *runs)


def report_command(
    runs: RunFolders,
    out: Annotated[Path | None, path_option(help=_PAGE_HELP)] = None,
) -> None:
    """Write one page about one run or several: curves, tables, robustness, smoothness, images.

    The HTML file loads nothing from elsewhere. Parts for which a run has no data are left out.
    """
    with one_line_errors():
        from compressive.evaluation.runs import report_runs

        path = report_runs(*runs, out=out)
    print_line(f"report: {path}, one page to open in a browser")

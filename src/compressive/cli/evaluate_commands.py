"""Commands on trained encoders: evaluate, embed, compare, report."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compressive.cli.terminal import (
    SafeTable,
    one_line_errors,
    path_argument,
    path_option,
    print_line,
    require_at_least,
)
from compressive.cli.train_commands import RandomSeed, runs_of_sweep
from compressive.config import check_device_name
from compressive.evaluation.tasks import select_tasks
from compressive.progress import printable
from compressive.rundir.files import CONFIG, RESULTS, SWEEP

_ENCODER_HELP = (
    "A run folder, a checkpoint (in our, timm's or torchvision's format), the name of an encoder "
    "that comes with the package, or a timm model name with its published weights."
)
_NETWORK_HELP = "timm model name; needed only for third-party checkpoints."
_SIZE_HELP = "Input pixels of a third-party checkpoint; 0: as trained."
_OUT_HELP = "Folder of results.json; default: RUN/evaluation or RUN/held-out."
_HELD_OUT_HELP = "Evaluate on a fifth of the training images, for tuning; reads no test image."
_BENCHMARK_HELP = "Folder of transfer and robustness sets, and of SimCLR's 1percent.txt."
_FROST_HELP = "Folder of the six photographs of frost."
_SUITE_HELP = "quick, standard, or paper (with transfer and robustness)."
_TASKS_HELP = "Some tasks, with commas: linear,few-label,..."
_EPOCHS_HELP = "Epochs of the linear evaluation; 0: chosen by the number of images."
_MAX_IMAGES_HELP = "Use at most this many images of a split; 0: all."
_DATA_HELP = "Labeled images, as for pretrain; default: the run's."
_RUNS_HELP = "Folders of runs or sweeps, or results.json files."
EncoderName = Annotated[str, path_argument(help=_ENCODER_HELP)]
TimmName = Annotated[str, typer.Option(help=_NETWORK_HELP)]
InputSize = Annotated[int, typer.Option(help=_SIZE_HELP)]
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RunFolders = Annotated[list[Path], path_argument(help=_RUNS_HELP)]


def evaluate_command(
    encoder: EncoderName,
    suite: Annotated[str, typer.Option(help=_SUITE_HELP)] = "standard",
    tasks: Annotated[str, typer.Option("--tasks", metavar="TASKS", help=_TASKS_HELP)] = "",
    data: Annotated[str, path_option(help=_DATA_HELP)] = "",
    out: Annotated[Path | None, path_option(help=_OUT_HELP)] = None,
    seed: RandomSeed = 0,
    network: TimmName = "",
    size: InputSize = 0,
    max_images: Annotated[int, typer.Option(help=_MAX_IMAGES_HELP)] = 0,
    epochs: Annotated[int, typer.Option(help=_EPOCHS_HELP)] = 0,
    held_out: Annotated[bool, typer.Option("--held-out", help=_HELD_OUT_HELP)] = False,
    benchmark_root: Annotated[Path | None, path_option(help=_BENCHMARK_HELP)] = None,
    frost: Annotated[Path | None, path_option(help=_FROST_HELP)] = None,
    device: DeviceName = "auto",
) -> None:
    """Measure an encoder: accuracy, few labels, calibration, robustness, smoothness, information.

    No hyperparameter is tuned on test images. Features are cached next to the results. Tasks that
    cannot run are skipped and listed at the end.
    """
    with one_line_errors():  # also for Ctrl-C during the imports
        names = [name.strip() for name in tasks.split(",")] if tasks else []
        # Check options before torch is imported, which takes seconds.
        select_tasks(suite, names)
        check_device_name(device, "--device")
        require_at_least(0, seed=seed, size=size, max_images=max_images, epochs=epochs)
        from compressive import distributed
        from compressive.evaluation import tables
        from compressive.evaluation.suite import evaluate

        distributed.start()
    is_first = distributed.rank() == 0
    try:
        with one_line_errors():
            results, folder = evaluate(
                encoder,
                suite=suite,
                tasks=names,
                data=data,
                out=out,
                seed=seed,
                device=device,
                network=network,
                size=size,
                max_images=max_images,
                epochs=epochs,
                held_out=held_out,
                benchmark_root=benchmark_root,
                frost=frost,
            )
    finally:
        distributed.stop()
    if not is_first:
        return
    Console().print(SafeTable(tables.results_table(results)))
    for text in results.skipped:
        print_line(f"skipped: {text}")
    for text in tables.notes(results):
        print_line(f"note: {text}")
    _warn_if_unfinished(encoder)
    print_line(f"results: {folder / RESULTS}")


def _warn_if_unfinished(encoder: str) -> None:
    """Print a line if the encoder is that of a run that has not finished."""
    from compressive.rundir.reader import unfinished

    if (Path(encoder) / CONFIG).is_file() and (reason := unfinished(Path(encoder))):
        print_line(f"{encoder}: {reason}", stderr=True)


def embed_command(
    encoder: EncoderName,
    images: Annotated[str, path_argument(help="Images, as for pretrain; need no labels.")],
    out: Annotated[Path, path_option(help="File to write: .parquet or .npz.")] = Path(
        "features.parquet"
    ),
    split: Annotated[str, typer.Option(help="Split of the images.")] = "train",
    network: TimmName = "",
    size: InputSize = 0,
    device: DeviceName = "auto",
) -> None:
    """Write the features of images: one vector each, with the image's name and label."""
    with one_line_errors():
        check_device_name(device, "--device")
        require_at_least(0, size=size)
        from compressive.distributed import launched
        from compressive.evaluation.embed import embed

        if launched("WORLD_SIZE", 1) > 1:
            raise ValueError("embed runs in one process; start it without torchrun")
        found = embed(encoder, images, out, split=split, network=network, size=size, device=device)
    for origin, reason in found.unreadable:
        print_line(f"skipped: {origin}: {reason}")
    print_line(f"features: {found.path}, {found.count:,} images, {found.dim:,} numbers each")
    _warn_if_unfinished(encoder)


def compare_command(
    runs: RunFolders,
    markdown: Annotated[bool, typer.Option(help="Print the table as Markdown.")] = False,
) -> None:
    """Compare runs: their values, the difference with a confidence interval, and a verdict.

    Compares the first run with each of the others. Runs that differ only in their seed form one
    group; then the interval is over seeds, otherwise over test images, paired.
    """
    with one_line_errors():
        from compressive.evaluation.compare import compare, open_groups
        from compressive.evaluation.results import read
        from compressive.evaluation.tables import differences_markdown, differences_table
        from compressive.rundir.reader import of_other_weights

        runs = _expand_sweeps(runs)
        first, *others = open_groups([str(_results_folder(run)) for run in runs])
        if not others:
            hint = "`compressive report` shows runs of one experiment side by side"
            raise ValueError(f"compare needs two runs that differ in more than their seed; {hint}")
        console = Console()
        for other in others:
            found = compare(first, other)
            if not found:
                raise ValueError(f"{first.name} and {other.name} have no metric in common")
            if markdown:
                lines = differences_markdown(first, other, found).split("\n")
                print(*map(printable, lines), sep="\n", end="\n\n")
            else:
                table = differences_table(first, other, found, width=console.width)
                console.print(SafeTable(table))
        for run in runs:
            _warn_if_unfinished(str(run))
            if older := of_other_weights(run, read(_results_folder(run)).about):
                print_line(f"{run}: {older}", stderr=True)


def _expand_sweeps(runs: list[Path]) -> list[Path]:
    """Replace the folder of a sweep by its runs."""
    found = [runs_of_sweep(run) if (run / SWEEP).is_file() else [run] for run in runs]
    return list(chain.from_iterable(found))


def _results_folder(run: Path) -> Path:
    from compressive.rundir.reader import results_of

    inside = results_of(run)
    return inside if inside.is_dir() else run


def report_command(
    runs: RunFolders,
    out: Annotated[Path, path_option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one page about one run or several: curves, tables, robustness, smoothness, images.

    The HTML file loads nothing from elsewhere. Parts for which a run has no data are left out.
    """
    with one_line_errors():
        from compressive.report.page import write_report

        verdicts, runs = None, _expand_sweeps(runs)
        if sum((_results_folder(run) / RESULTS).is_file() for run in runs) > 1:
            from compressive.evaluation import tables

            verdicts = tables.verdicts(runs)
        path = write_report(runs, out, verdicts=verdicts)
    print_line(f"report: {path}")

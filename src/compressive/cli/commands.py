"""Commands on runs: evaluate, embed, compare, report, sweep, watch.

Longer than 300 lines, many of them options with their help.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compressive.cli.terminal import one_line_errors, print_error
from compressive.rundir.files import CONFIG, RESULTS, SWEEP


def evaluate(
    encoder: Annotated[
        str,
        typer.Argument(
            help="The folder of a run, a file of weights (ours, timm's or torchvision's format), "
            "the name of an encoder that comes with the package, or of a timm network with its "
            "published weights."
        ),
    ],
    suite: Annotated[
        str, typer.Option(help="quick, standard, or paper (with transfer and robustness).")
    ] = "standard",
    tasks: Annotated[
        str, typer.Option(help="Some tasks, with commas: linear,few-label,...", metavar="TASKS")
    ] = "",
    data: Annotated[
        str, typer.Option(help="Images with labels, as for pretrain; else the run's.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Where results.json goes; else RUN/evaluation, or RUN/held-out."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    network: Annotated[
        str, typer.Option(help="timm's name of the network, for a file of weights of others.")
    ] = "",
    size: Annotated[
        int, typer.Option(help="Pixels that it sees, for weights of others; 0: as trained.")
    ] = 0,
    max_images: Annotated[int, typer.Option(help="At most so many of a split; 0: all.")] = 0,
    epochs: Annotated[int, typer.Option(help="Of the linear evaluation; 0: to fit.")] = 0,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Judge by a fifth of the training images, to choose by; opens no test image.",
        ),
    ] = False,
    benchmark_root: Annotated[
        Path | None,
        typer.Option(help="Folder of transfer and robustness sets, and of SimCLR's 1percent.txt."),
    ] = None,
    frost: Annotated[
        Path | None, typer.Option(help="Folder of the six photographs of frost.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Measure an encoder: accuracy, few labels, calibration, robustness, smoothness, information.

    Nothing is chosen on test images. Features are kept beside the results, so that a second call
    is quick. What cannot be done here is left out and listed at the end.
    """
    with one_line_errors():  # also where somebody thinks again while this is imported
        from compressive import distributed
        from compressive.evaluation.suite import evaluate as judge
        from compressive.evaluation.tables import notes, results_table

    names = [name.strip() for name in tasks.split(",")] if tasks else []
    distributed.start()
    is_first = distributed.rank() == 0
    try:
        with one_line_errors():
            results, place = judge(
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
    console = Console(soft_wrap=True)
    Console().print(results_table(results))
    for text in results.skipped:
        console.print(f"left out: {text}", highlight=False, markup=False)
    for text in notes(results):
        console.print(f"note: {text}", highlight=False, markup=False)
    _say_if_unfinished(encoder)
    console.print(f"results: {place / RESULTS}", highlight=False, markup=False)


def _say_if_unfinished(encoder: str) -> None:
    """A line where an encoder is that of a run which has not come to its end."""
    from compressive.rundir.reader import unfinished

    if (Path(encoder) / CONFIG).is_file() and (words := unfinished(Path(encoder))):
        Console(stderr=True, soft_wrap=True).print(f"{encoder}: {words}", markup=False)


def embed(
    encoder: Annotated[
        str,
        typer.Argument(
            help="A run, a file of weights, the name of an encoder that comes with the package, "
            "or a timm name."
        ),
    ],
    images: Annotated[str, typer.Argument(help="Images, as for pretrain; labels are not needed.")],
    out: Annotated[Path, typer.Option(help="A file to write: .parquet or .npz.")] = Path(
        "features.parquet"
    ),
    split: Annotated[str, typer.Option(help="Which part of the images.")] = "train",
    network: Annotated[
        str, typer.Option(help="timm's name of the network, for a file of weights of others.")
    ] = "",
    size: Annotated[
        int, typer.Option(help="Pixels that it sees, for weights of others; 0: as trained.")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Write the features of images: one vector each, with the image's name and label."""
    from compressive.evaluation.embed import embed as write

    with one_line_errors():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("embed is for one process; start it without torchrun")
        found = write(encoder, images, out, split=split, network=network, size=size, device=device)
    console = Console(soft_wrap=True)
    for origin, reason in found.unreadable:
        console.print(f"left out: {origin}: {reason}", highlight=False, markup=False)
    words = f"features: {found.path}, {found.count:,} images, {found.dim:,} numbers each"
    console.print(words, highlight=False, markup=False)
    _say_if_unfinished(encoder)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Evaluated runs, or their results.json; or sweeps."),
    ],
    markdown: Annotated[bool, typer.Option(help="The table as Markdown, for a page.")] = False,
) -> None:
    """Runs side by side: figures, their difference with an interval, and a verdict.

    The first is compared with each of the others. Runs that differ in their seed alone are taken
    together; then the interval is over seeds, otherwise over test images, paired.
    """
    from compressive.evaluation.compare import compare as differences
    from compressive.evaluation.compare import open_groups
    from compressive.evaluation.results import read
    from compressive.evaluation.tables import differences_markdown, differences_table
    from compressive.rundir.reader import of_other_weights

    with one_line_errors():
        runs = _all(runs)
        first, *others = open_groups([str(_evaluated(run)) for run in runs])
        if not others:
            raise ValueError(
                "compare needs two runs that differ in more than their seed: those that do not are "
                "taken as one; `compressive report` shows them side by side"
            )
        console = Console()
        for other in others:
            found = differences(first, other)
            if not found:
                raise ValueError(f"{first.name} and {other.name} have no figure in common")
            if markdown:
                print(differences_markdown(first, other, found), end="\n\n")
            else:
                console.print(differences_table(first, other, found, width=console.width))
        for run in runs:
            _say_if_unfinished(str(run))
            if older := of_other_weights(run, read(_evaluated(run)).about):
                Console(stderr=True, soft_wrap=True).print(f"{run}: {older}", markup=False)


def _all(runs: list[Path]) -> list[Path]:
    """These runs, and those of a sweep where its folder was given."""
    return [one for run in runs for one in (_of_sweep(run) if (run / SWEEP).is_file() else [run])]


def _of_sweep(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob(f"*/{CONFIG}"))


def _evaluated(run: Path) -> Path:
    """Where the results of a run are."""
    from compressive.rundir.reader import results_of

    inside = results_of(run)
    return inside if inside.is_dir() else run


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs or sweeps, evaluated or not.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """One page about one run or several: curves, tables, robustness, smoothness, pictures.

    A single HTML file that asks for nothing from elsewhere. What a run has no data for is absent.
    """
    from compressive.report.page import write_report

    with one_line_errors():
        judged, runs = None, _all(runs)
        if len(runs) > 1:  # it takes seconds to have torch, and one run has no need of it
            from compressive.evaluation.tables import verdicts

            judged = verdicts(runs)
        path = write_report(runs, out, verdicts=judged)
    Console(soft_wrap=True).print(f"report: {path}", highlight=False, markup=False)


def sweep(
    data: Annotated[str, typer.Argument(help="Images, as for pretrain.")],
    recipe: Annotated[str, typer.Option(help="Settings to begin with.")] = "",
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE,VALUE,...", help="A setting to vary; may be repeated."),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(help="The paper's: beta, kappa-e, kappa-b, crop-area, loss-weight."),
    ] = "",
    seeds: Annotated[str, typer.Option(help="Seeds of each setting, with commas.")] = "0",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting for all; may be repeated."),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(help="What is measured: quick, standard, paper; none opens no test image."),
    ] = "quick",
    tasks: Annotated[str, typer.Option(help="Some tasks, with commas.", metavar="TASKS")] = "",
    max_images: Annotated[
        int, typer.Option(help="At most so many of a split to evaluate on; 0: all.")
    ] = 0,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="Evaluate on a fifth of the training images; opens no test image."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option(help="Runs at the same time.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the sweep.")] = Path("sweeps/sweep"),
) -> None:
    """Train and evaluate every combination of some settings, and compare them in one table.

    Finished runs are not repeated when the command is given again; one that fails does not end the
    others. Ends with a table and a report.
    """
    with one_line_errors():
        from compressive.evaluation.tables import verdicts
        from compressive.report.page import write_report
        from compressive.sweep.runner import summary_table
        from compressive.sweep.runner import sweep as run_all
        from compressive.sweep.table import LEGEND

        if not (vary or preset or "," in seeds):
            raise ValueError("nothing is varied; give --vary, --preset or several --seeds")
        found = run_all(
            data,
            out,
            recipe=recipe,
            vary=vary or (),
            preset=preset,
            seeds=seeds,
            changes=changes or (),
            suite=suite,
            tasks=tasks,
            max_images=max_images,
            held_out=held_out,
            at_once=jobs,
        )
        Console().print(summary_table(found))
        console = Console(soft_wrap=True)
        console.print(LEGEND, highlight=False, markup=False)
        done = _of_sweep(out)
        if done:
            judged = verdicts(done, held_out=held_out)
            page = write_report(done, out / "report.html", held_out=held_out, verdicts=judged)
            console.print(f"report: {page}", highlight=False, markup=False)
    for log in found.failed:
        print_error(f"a run failed; its last words are in {log}")
    if found.interrupted:
        print_error("stopped; the same command goes on")
        raise typer.Exit(130)
    if found.failed:
        raise typer.Exit(1)


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, running or finished.")],
    once: Annotated[bool, typer.Option(help="Draw it once and end.")] = False,
) -> None:
    """Draw the state of a run in the terminal until it is over."""
    from compressive.cli.watch import watch as draw

    with one_line_errors():
        draw(run, once)

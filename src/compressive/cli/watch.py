"""Draw the state of a run in the terminal, from its files; the run may be on another machine."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from compressive.cli.terminal import SafeTable
from compressive.progress import duration
from compressive.rundir.files import CONFIG, METRICS
from compressive.rundir.metrics_log import REQUESTED, STOPPED
from compressive.rundir.reader import TrainingFiles, read_training

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # characters of a curve
_EVERY = 2.0  # seconds between two frames
_SILENCE = 120.0  # seconds without a line after which a failed run counts as ended
# Curves: metric, title, format of the last value.
_CURVES = (
    ("loss", "loss", "{:.3f}"),
    ("knn_accuracy", "kNN", "{:.1%}"),
    ("probe_accuracy", "probe", "{:.1%}"),
    ("residual", "residual", "{:.1f} nats"),
    ("predictive", "predictive", "{:.2f} nats"),
)
_READINGS = "positive_cosine", "nll", "reducible_residual", "beta", "effective_beta"
_READINGS += "effective_beta_p10", "effective_beta_p50", "effective_beta_p90"
_READINGS += "embedding_std", "participation_ratio", "lr"


def watch(
    run: Path,
    once: bool = False,
    console: Console | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Draw a run every two seconds until it ends or Ctrl-C; draw once if there is no terminal."""
    console = console or Console()
    if once or not console.is_terminal:
        console.print(frame(run))
        return
    files, age = _read_state(run)
    lines, written_at = len(files.metrics), clock() - (age or 0.0)
    with Live(_panel(files, age), console=console, auto_refresh=False) as live:
        try:
            while not (files.is_over or files.is_stopped):
                is_failed = (files.health or "").startswith(("collapse", "nan"))
                if is_failed and age is not None and age > _SILENCE:
                    return
                sleep(_EVERY)
                files, age = _read_state(run)
                if len(files.metrics) != lines:
                    lines, written_at = len(files.metrics), clock()
                # The time of day may jump, and that of the file is of another machine.
                age = None if age is None else clock() - written_at
                live.update(_panel(files, age), refresh=True)
        except KeyboardInterrupt:
            return


def frame(run: Path) -> RenderableType:
    """Return the present state of a run, running or finished."""
    return _panel(*_read_state(run))


def _read_state(run: Path) -> tuple[TrainingFiles, float | None]:
    """Return settings and metrics of a run, and the seconds since its last line."""
    if not run.exists():
        raise FileNotFoundError(f"{run} does not exist; give a run folder")
    if not (run / CONFIG).is_file():
        raise FileNotFoundError(f"{run} is not a run folder: it has no config.json")
    files = read_training(run)
    batch = files.settings.get("train.batch_size")
    if type(batch) is not int or batch < 1 or "method" not in files.settings:
        raise ValueError(f"{run / CONFIG} is damaged: train.batch_size is {batch!r}")
    written = (run / METRICS).stat().st_mtime if files.metrics else None
    return files, None if written is None else max(0.0, time.time() - written)


def _panel(files: TrainingFiles, age: float | None) -> SafeTable:
    settings = files.settings
    parts: list[RenderableType] = [_progress(files, age)]
    curves = Table.grid(padding=(0, 2))
    for name, title, form in _CURVES:
        if values := _values(files, name):
            curves.add_row(title, Text(sparkline(values), style="cyan"), form.format(values[-1]))
    last = {name: values[-1] for name in _READINGS if (values := _values(files, name))}
    if files.metrics:
        words = "  ".join(f"{name} {value:.4g}" for name, value in last.items())
        parts += [curves, Text(words, style="dim")]
    if health := files.health:
        parts.append(Text(health, style="green" if health.startswith("ok") else "bold red"))
    title = Text(f"{settings['method']} on {settings.get('data.source', '')}  ({files.path})")
    return SafeTable(Panel(Group(*parts), title=title, title_align="left", width=92))


def _progress(files: TrainingFiles, age: float | None) -> RenderableType:
    """Return step, throughput, and the time since the last line."""
    step, total = files.step, files.total
    words = [f"step {step:,}" + ("" if total is None else f" of {total:,}")]
    if rates := _values(files, "images_per_second"):
        words.append(f"{rates[-1]:,.0f} images/s")
        if total is not None and step < total and rates[-1] > 0 and not files.is_stopped:
            left = (total - step) * files.settings["train.batch_size"] / rates[-1]
            words.append(f"{duration(left)} left")
    if files.is_over:
        words.append("finished")
    elif files.is_stopped:
        why = files.metrics[-1][STOPPED]
        asked = why == REQUESTED
        words.append("stopped; run the same command to resume" if asked else f"given up: {why}")
    words.append("no metrics yet" if age is None else f"last update {duration(age)} ago")
    text = Text("   ".join(words))
    if total is None:
        return text
    bar = Table.grid(padding=(0, 2))  # a progress bar alone does not end its line
    bar.add_row(ProgressBar(total=total, completed=step, width=_WIDTH), f"{step / total:.0%}")
    return Group(bar, text)


def _values(files: TrainingFiles, name: str) -> list[float]:
    """Return all finite numbers of a metric."""
    return [value for _, value in files.series(name)]


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Return blocks scaled from the minimum to the maximum, each the mean of its share."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)

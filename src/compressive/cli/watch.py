"""A run as it stands, in the terminal: read from its files, so that it may run elsewhere."""

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from compressive.rundir.files import CONFIG, METRICS
from compressive.rundir.reader import journal, number, total_steps

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # blocks of a curve
_EVERY = 2.0  # seconds between two frames
_SILENCE = 120.0  # seconds after which a run that was ill is taken for ended
# Curves: reading, what it is called, how its last value is written.
_CURVES = (
    ("loss", "loss", "{:.3f}"),
    ("knn_accuracy", "kNN", "{:.1%}"),
    ("probe_accuracy", "probe", "{:.1%}"),
    ("residual", "residual", "{:.1f} nats"),
    ("predictive", "predictive", "{:.2f} nats"),
)
_READINGS = (
    "positive_cosine",
    "nll",
    "reducible_residual",
    "beta",
    "embedding_std",
    "participation_ratio",
    "lr",
)


class _Standing(NamedTuple):
    """What the files of a run say."""

    config: dict[str, Any]
    lines: list[dict[str, Any]]
    step: int
    total: int | None  # None until the first checkpoint tells how many images there are
    age: float | None  # seconds since the last line

    @property
    def health(self) -> str:
        found = (line.get("health") for line in reversed(self.lines))
        return next((text for text in found if isinstance(text, str) and text), "")

    @property
    def is_over(self) -> bool:
        return self.total is not None and self.step >= self.total and not self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Asked to, or ill too often: its last line says so, and a run that goes on has others."""
        return bool(self.lines) and "stopped" in self.lines[-1]

    @property
    def has_given_up(self) -> bool:
        """It was ill when it was last heard of, and that was long ago."""
        is_ill = self.health.startswith(("collapse", "nan"))
        return is_ill and self.age is not None and self.age > _SILENCE


def watch(run: Path, once: bool = False, console: Console | None = None) -> None:
    """Draw a run every two seconds until it is over or Ctrl-C; once where there is no terminal."""
    console = console or Console()
    if once or not console.is_terminal:
        console.print(frame(run))
        return
    standing = _read(run)
    with Live(_draw(run, standing), console=console, auto_refresh=False) as live:
        try:
            while not (standing.is_over or standing.is_stopped or standing.has_given_up):
                time.sleep(_EVERY)
                standing = _read(run)
                live.update(_draw(run, standing), refresh=True)
        except KeyboardInterrupt:
            return


def frame(run: Path) -> RenderableType:
    """The present state of a run, running or finished."""
    return _draw(run, _read(run))


def _read(run: Path) -> _Standing:
    path = run / CONFIG
    if not run.exists():
        raise FileNotFoundError(f"{run} is not there; give the folder of a run")
    if not path.is_file():
        raise FileNotFoundError(f"{run} is no folder of a run: it has no config.json")
    try:
        config = json.loads(path.read_text())
        batch = config["train"]["batch_size"]
        if type(batch) is not int or batch < 1:
            raise ValueError(f"train.batch_size is {batch!r}")
        str(config["method"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from None
    lines, _ = journal(run / METRICS)
    age = max(0.0, time.time() - (run / METRICS).stat().st_mtime) if lines else None
    step = lines[-1]["step"] if lines else 0
    return _Standing(config, lines, step, total_steps(run, config), age)


def _draw(run: Path, standing: _Standing) -> Panel:
    config, lines = standing.config, standing.lines
    data = config.get("data")
    source = data.get("source", "") if isinstance(data, dict) else ""
    parts: list[RenderableType] = [_progress(standing)]
    curves = Table.grid(padding=(0, 2))
    for name, title, form in _CURVES:
        if values := _values(lines, name):
            curves.add_row(title, Text(sparkline(values), style="cyan"), form.format(values[-1]))
    last = {name: values[-1] for name in _READINGS if (values := _values(lines, name))}
    if lines:
        words = "  ".join(f"{name} {value:.4g}" for name, value in last.items())
        parts += [curves, Text(words, style="dim")]
    health = standing.health
    if health:
        parts.append(Text(health, style="green" if health.startswith("ok") else "bold red"))
    title = Text(f"{config['method']} on {source}  ({run})")
    return Panel(Group(*parts), title=title, title_align="left", width=92)


def _progress(standing: _Standing) -> RenderableType:
    """Step, speed, and when the run was last heard of."""
    step, total = standing.step, standing.total
    words = [f"step {step:,}" + ("" if total is None else f" of {total:,}")]
    if rates := _values(standing.lines, "images_per_second"):
        words.append(f"{rates[-1]:,.0f} images/s")
        if total is not None and step < total and rates[-1] > 0 and not standing.is_stopped:
            left = (total - step) * standing.config["train"]["batch_size"] / rates[-1]
            words.append(f"{_duration(left)} left")
    if standing.is_over:
        words.append("finished")
    elif standing.is_stopped:
        why = standing.lines[-1]["stopped"]
        asked = why == "asked to"
        words.append("stopped; the same command goes on" if asked else f"given up: {why}")
    if standing.age is None:
        words.append("not heard of yet")
    else:
        words.append(f"last heard of {_duration(standing.age)} ago")
    text = Text("   ".join(words))
    if total is None:
        return text
    bar = Table.grid(padding=(0, 2))  # alone, it does not end its line
    bar.add_row(ProgressBar(total=total, completed=step, width=_WIDTH), f"{step / total:.0%}")
    return Group(bar, text)


def _values(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    """All numbers of that name; what was not finite was written as null."""
    return [value for line in lines if (value := number(line.get(name))) is not None]


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Blocks from the least value to the greatest; each stands for the mean of its share."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _duration(seconds: float) -> str:
    """Two units at most: 12 s, 3 min, 2 h 5 min, 4 d 3 h."""
    minutes = int(seconds) // 60
    if seconds < 60:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes // 60 % 24} h"

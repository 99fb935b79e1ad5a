"""Show progress: one updating line on a terminal or in a notebook, plain lines elsewhere."""

import re
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_WIDE = 100  # smallest width of a terminal that has room for a bar
_NOTEBOOK_EVERY = 0.25  # seconds between two updates of a line
# Control characters, line breaks, changes of text direction, and invalid bytes.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control sequences, line breaks and invalid bytes, for example in file names."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def duration(seconds: float) -> str:
    """Format with at most two units: 12 s, 3 min, 2 h 5 min, 4 d 3 h."""
    minutes = int(seconds) // 60
    if seconds < 60:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes // 60 % 24} h"


class Display:
    """Show progress with metrics and remaining time in one updating line.

    Without a terminal or notebook, print a line at most every `every` seconds.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        every: float = 10,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console: Console = console or Console()
        self.console.file = cast(IO[str], BrokenPipeSafe(self.console.file))
        self._quiet, self._every, self._clock = quiet, every, clock
        self._last_line, self._open = -1e9, ""
        self._is_notebook = self.console.is_jupyter
        self._line = ""  # the updating line of a notebook
        self._began = (0.0, 0.0, 0.0)  # time, progress at that time, and total of the current task
        # On a narrow terminal only the metrics are cut off.
        fixed, rest = Column(no_wrap=True), Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._bar = Progress(
            TextColumn("{task.description}", table_column=fixed),
            *([BarColumn(bar_width=20)] if self.console.width >= _WIDE else []),
            TextColumn("{task.percentage:>3.0f}%", table_column=fixed.copy()),
            TimeRemainingColumn(compact=True, table_column=fixed.copy()),
            TextColumn("{task.fields[readings]}", style="cyan", table_column=rest),
            expand=True,
            console=self.console,
            transient=True,
            disable=quiet or self._is_notebook or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, readings="")

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        self._end_line()

    def begin(self, title: str) -> None:
        """Show the name of the next work on a terminal, before its progress is known."""
        self._bar.reset(self._task, description=title, total=None, readings="")

    def progress(
        self,
        title: str,
        done: float,
        total: float,
        readings: Mapping[str, str] | None = None,
        *,
        unit: str = "",
    ) -> None:
        """Update the progress; `readings` are formatted metrics by name.

        With a `unit`, such as images, also show how many are done per second.
        """
        now = self._clock()
        rate = self._rate(now, done, total)
        words = [f"{name} {value}".strip() for name, value in (readings or {}).items()]
        words = [f"{rate:,.0f} {unit}/s", *words] if unit and rate else words
        text = "  ".join(words)
        self._bar.update(self._task, description=title, completed=done, total=total, readings=text)
        if rate and done < total:
            text = f"{duration((total - done) / rate)} left  {text}"
        line = f"{title}  {100 * done / total:.0f}%  {text}".rstrip()
        if self._is_notebook and not self._quiet:
            self._update_line(line, now, is_end=done >= total)
            return
        is_end = done >= total and title == self._open  # print the end if the start was printed
        is_due = is_end or now - self._last_line >= self._every
        if is_due and self._bar.disable and not self._quiet:
            self._last_line, self._open = now, "" if done >= total else title
            self.say(line)

    def _rate(self, now: float, done: float, total: float) -> float:
        """Return the work per second since the present work began, or 0 if it is unknown."""
        began, before, of = self._began
        if total != of or done < before:  # other work, or a restart
            self._began = (now, done, total)
            return 0.0
        return (done - before) / (now - began) if now - began > 1 else 0.0

    def _update_line(self, line: str, now: float, *, is_end: bool) -> None:
        """Overwrite the line in a notebook, a few times per second."""
        if is_end or now - self._last_line >= _NOTEBOOK_EVERY:
            self._last_line = now
            line = printable(line)[:_WIDE]
            sys.stdout.write(f"\r{line.ljust(len(self._line))}")
            sys.stdout.flush()
            self._line = line

    def _end_line(self) -> None:
        if self._line:
            sys.stdout.write("\n")
            self._line = ""

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if not self._quiet:
            self._end_line()
            self.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


class BrokenPipeSafe:
    """Text stream that ignores write errors, so that a closed terminal or pipe stops no run."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write the text, or drop it if the stream is closed."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it is open."""
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

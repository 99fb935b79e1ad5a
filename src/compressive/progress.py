"""Show progress: one updating line on a terminal, plain lines elsewhere."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_WIDE = 100  # smallest width of a terminal that has room for a bar
# Control characters, line breaks, changes of text direction, and invalid bytes.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control sequences, line breaks and invalid bytes, for example in file names."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Display:
    """Progress with metrics and remaining time; one line per `every` seconds without a terminal."""

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
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, readings="")

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def progress(
        self, title: str, done: float, total: float, readings: Mapping[str, str] | None = None
    ) -> None:
        """Update the progress; `readings` are formatted metrics by name."""
        text = "  ".join(f"{name} {value}".strip() for name, value in (readings or {}).items())
        self._bar.update(self._task, description=title, completed=done, total=total, readings=text)
        now = self._clock()
        is_end = done >= total and title == self._open  # print the end if the start was printed
        is_due = is_end or now - self._last_line >= self._every
        if is_due and self._bar.disable and not self._quiet:
            self._last_line, self._open = now, "" if done >= total else title
            self.say(f"{title}  {100 * done / total:.0f}%  {text}".rstrip())

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if not self._quiet:
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

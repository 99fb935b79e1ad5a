"""What a person sees of a run: a line of progress on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

_WIDE = 100  # columns of a terminal that has room for a bar


class Display:
    """Progress of one run: epoch, readings, and the time left.

    On a terminal one line that moves; otherwise (a log file, another process) a line at most
    every `every` seconds.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False, every: float = 10):
        self.console: Console = console or Console()
        self.console.file = cast(IO[str], BrokenPipeSafe(self.console.file))
        self._quiet, self._every, self._said, self._open = quiet, every, -1e9, ""
        # In a narrow terminal readings are cut, and nothing else.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def progress(
        self, title: str, done: float, total: float, readings: Mapping[str, str] | None = None
    ) -> None:
        """Where the run is; readings as short texts by name."""
        text = "  ".join(f"{name} {value}".strip() for name, value in (readings or {}).items())
        self._bar.update(self._task, description=title, completed=done, total=total, readings=text)
        now = time.monotonic()
        is_end = done >= total and title == self._open  # what was begun here ends here
        if self._bar.disable and not self._quiet and (is_end or now - self._said >= self._every):
            self._said, self._open = now, "" if done >= total else title
            self.say(f"{title}  {100 * done / total:.0f}%  {text}".rstrip())

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class BrokenPipeSafe:
    """A file that loses what cannot be written: a run outlives a terminal, and a pipe."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write; what the file refuses is lost."""
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, where the file can."""
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

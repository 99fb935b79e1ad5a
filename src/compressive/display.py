"""What a person sees of a run: a line of progress on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Progress of one run: epoch, readings, and the time left.

    On a terminal one line that moves; otherwise (a log file, another process) a line at most
    every `every` seconds.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False, every: float = 10):
        self.console = console or Console()
        self._quiet, self._every, self._said = quiet, every, -1e9
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[readings]}", style="cyan"),
            TimeRemainingColumn(compact=True),
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
        text = "  ".join(f"{name} {value}" for name, value in (readings or {}).items())
        self._bar.update(self._task, description=title, completed=done, total=total, readings=text)
        now = time.monotonic()
        if self._bar.disable and not self._quiet and now - self._said >= self._every:
            self._said = now
            self.say(f"{title}  {100 * done / total:.0f}%  {text}")

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

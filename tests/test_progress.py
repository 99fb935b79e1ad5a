"""Progress: one updating line on a terminal, few lines in a log, nothing when quiet."""

import errno
import io
import time

import pytest
from rich.console import Console

from compressive.progress import Display


def shown(*, terminal: bool, quiet: bool = False, every: float = 10) -> tuple[Display, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=200, color_system=None)
    return Display(console, quiet=quiet, every=every), text


def test_log_gets_lines_at_the_given_interval() -> None:
    text, now = io.StringIO(), [0.0]
    with Display(Console(file=text, width=200), every=10, clock=lambda: now[0]) as display:
        for step in range(1, 4):
            now[0] += 3
            display.progress("c-simclr epoch 0.1", step, 40, {"loss": "3.142", "wait": "1%"})
        now[0] += 4
        display.progress("c-simclr epoch 2.0", 20, 40, {"loss": "2.718"})
    assert text.getvalue().splitlines() == [
        "c-simclr epoch 0.1  2%  loss 3.142  wait 1%",
        "c-simclr epoch 2.0  50%  10 s left  loss 2.718",
    ]


def test_line_has_rate_and_remaining_time_of_the_present_work() -> None:
    text, now = io.StringIO(), [0.0]
    display = Display(Console(file=text, width=200), every=10, clock=lambda: now[0])
    for title, done, total in (("a", 0, 100), ("a", 40, 100), ("b", 10, 3000), ("b", 110, 3000)):
        display.progress(title, done, total, unit="images")
        now[0] += 20
    assert text.getvalue().splitlines() == [
        "a  0%",
        "a  40%  30 s left  2 images/s",
        "b  0%",
        "b  4%  9 min left  5 images/s",
    ]


def test_notebook_shows_one_updating_line(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    display = Display(Console(force_jupyter=True, quiet=True), clock=lambda: now[0])
    with display:
        for done in (10, 50, 100):
            display.progress("decoding", done, 100)
            now[0] += 1
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert [part.split()[1] for part in output.strip().split("\r")] == ["10%", "50%", "100%"]


def test_terminal_shows_a_transient_bar() -> None:
    display, text = shown(terminal=True)
    with display:
        display.progress("byol epoch 3.0", 30, 40, {"loss": "2.718", "kNN": "41.0%"})
        display._bar.refresh()
        display.say("going on from step 3")
    output = text.getvalue()
    for part in ("byol epoch 3.0", "75%", "loss 2.718  kNN 41.0%", "going on from step 3\n"):
        assert part in output
    assert output.endswith("\x1b[2K") or "\x1b[2K" in output.split("going on")[1]


class Closing(io.StringIO):
    """A terminal that is closed."""

    is_closed = False

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)

    def flush(self) -> None:
        if self.is_closed:
            raise BrokenPipeError


@pytest.mark.parametrize("terminal", [True, False])
def test_closed_terminal_raises_nothing(terminal: bool) -> None:
    file = Closing()
    display = Display(Console(file=file, force_terminal=terminal, width=80), every=0)
    with display:
        display.say("one")
        file.is_closed = True
        display.progress("byol epoch 3.0", 30, 40, {"loss": "2.718"})
        display.say("two")
        time.sleep(0.25)  # the bar is drawn ten times a second
        display.say("three")
    assert "one" in file.getvalue()
    assert "two" not in file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 130])
def test_narrow_terminal_truncates_only_metrics(width: int) -> None:
    file = io.StringIO()
    display = Display(Console(file=file, force_terminal=True, width=width, color_system=None))
    display.progress("c-simclr epoch 12.5", 0, 100)
    display._bar.tasks[0].start_time = time.monotonic() - 60
    with display:
        readings = {
            "loss": "37.711",
            "residual": "190.7 nats",
            "reducible_residual": "2.00",
            "wait": "0%",
        }
        display.progress("c-simclr epoch 12.5", 40, 100, readings)
        time.sleep(0.02)
        display.progress("c-simclr epoch 12.7", 41, 100, readings)
        file.truncate(0)
        display._bar.refresh()
    line = file.getvalue()
    for part in ("c-simclr epoch 12.7", "41%", "loss 37.711", ":"):
        assert part in line
    assert ("wait 0%" in line) == (width == 130)
    assert ("\u2501" in line) == (width == 130)


def test_log_shows_the_end_of_every_started_task() -> None:
    display, text = shown(terminal=False, every=60)
    for done in (1, 2, 3):
        display.progress("decoding", done, 3)
    display.progress("embedding", 3, 3)  # too soon, and no line shows its start
    assert text.getvalue().splitlines() == ["decoding  33%", "decoding  100%"]


def test_quiet_display_prints_nothing() -> None:
    for terminal in (True, False):
        display, text = shown(terminal=terminal, quiet=True, every=0)
        with display:
            display.progress("byol", 1, 2)
            display.say("hello")
        assert text.getvalue().strip("\x1b[?25lh") == ""


def test_text_is_printed_unchanged() -> None:
    """Brackets are not markup, and long lines are not wrapped, so that paths can be copied."""
    display, text = shown(terminal=False)
    words = "runs/[bold]a[/bold] [/x] " + "long " * 60 + "end"
    display.say(words)
    assert text.getvalue() == words + "\n"


def test_one_display_can_show_two_runs() -> None:
    display, text = shown(terminal=True)
    for name in ("simclr", "c-simclr"):
        with display:
            display.progress(name, 1, 2)
            display._bar.refresh()
    assert "c-simclr" in text.getvalue()


def test_error_stops_the_bar() -> None:
    display, _ = shown(terminal=True)
    with pytest.raises(ZeroDivisionError), display:
        raise ZeroDivisionError
    assert not display._bar.live.is_started

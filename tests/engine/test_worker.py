"""What a process of a cluster does before and after the function of a unit."""

import os
import sys
from pathlib import Path

import pytest

from compressive.engine.ray_worker import Failure, run_unit, this_process
from compressive.storage.backend import WAITS, attempt


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what `run_unit` changes in a process of a cluster."""
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(WAITS, "quick", WAITS["quick"])


def test_a_unit_runs_in_the_folder_and_with_the_command_line_of_its_sender(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kept"])
    sender = this_process()._replace(folder="/", words=("compressive", "pack"))
    assert run_unit(lambda k: (k, os.getcwd(), sys.argv), 1, sender) == (
        1,
        "/",
        ["compressive", "pack"],
    )
    # The folder of the sender may not exist here: the unit still runs.
    missing = sender._replace(folder=str(tmp_path / "missing"))
    assert run_unit(lambda _: os.getcwd(), 1, missing) == "/"


def test_errors_are_returned_in_one_line_with_their_kind(tmp_path: Path) -> None:
    def wrong(_: int) -> None:
        raise ValueError("wrong value")

    def missing(_: int) -> None:
        raise OSError(5, "no answer")

    sender = this_process()
    assert run_unit(wrong, 0, sender) == Failure(True, "wrong value")
    assert run_unit(missing, 0, sender) == Failure(False, "no answer")
    gone = str(tmp_path / "gone")
    named = run_unit(lambda _: Path(gone).read_bytes(), 0, sender)
    assert not named.is_value
    assert gone in named.message
    other = run_unit(wrong, 0, sender._replace(version="0.0.0"))
    assert other.is_value
    assert "0.0.0 where the command was started; install the same version" in other.message


def test_a_unit_retries_requests_as_within_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender has opened the address, so an error is an outage and not a wrong address."""
    monkeypatch.setitem(WAITS, "quick", (0.0,))
    monkeypatch.setitem(WAITS, "patient", (0.0,) * 4)
    calls: list[int] = []

    def fail_three_times(unit: int) -> int:
        def once() -> int:
            calls.append(unit)
            if len(calls) < 4:
                raise OSError("Connection closed")
            return unit

        return attempt(once, "s3://bucket/shards", "quick")

    assert run_unit(fail_three_times, 7, this_process()) == 7
    assert len(calls) == 4

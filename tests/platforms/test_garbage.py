"""Reference cycles are searched rarely during startup, and as usual afterwards."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import silent, tiny

from compressive.platforms.garbage import (
    collect_as_usual,
    collect_rarely,
    skip_existing_objects,
)
from compressive.train import loop
from compressive.train.loop import pretrain


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()  # what conftest.py froze
    yield
    collect_as_usual()
    gc.enable()
    gc.set_threshold(*before)
    gc.freeze()


def test_thresholds_are_restored() -> None:
    gc.set_threshold(701, 11, 12)
    collect_rarely()
    collect_rarely()
    assert gc.get_threshold()[0] > 10_000
    collect_as_usual()
    assert gc.get_threshold() == (701, 11, 12)
    collect_as_usual()
    assert gc.get_threshold() == (701, 11, 12)


def test_choices_of_the_user_are_kept() -> None:
    collect_rarely()
    gc.set_threshold(702, 11, 12)
    collect_as_usual()
    assert gc.get_threshold() == (702, 11, 12)
    gc.disable()
    collect_rarely()
    assert gc.get_threshold() == (702, 11, 12)


def test_existing_objects_are_skipped_until_the_first_step() -> None:
    skip_existing_objects()  # not during startup
    assert gc.get_freeze_count() == 0
    collect_rarely()
    skip_existing_objects()
    assert gc.get_freeze_count() > 0
    collect_as_usual()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # the user's choice
    collect_rarely()
    skip_existing_objects()
    collect_as_usual()
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_run_collects_rarely_until_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.set_threshold(703, 11, 12)
    seen: list[tuple[int, ...]] = []
    train_step = loop.train_step

    def watched(*given: Any) -> Any:
        seen.append(gc.get_threshold())
        return train_step(*given)

    monkeypatch.setattr(loop, "train_step", watched)
    pretrain(tiny(), tmp_path / "run", display=silent())
    assert seen[0][0] > 10_000
    assert set(seen[1:]) == {(703, 11, 12)}
    with pytest.raises(ValueError, match="2 or more"):
        pretrain(tiny("data.limit=1"), tmp_path / "other", display=silent())
    assert gc.get_threshold() == (703, 11, 12)


EXIT_PROGRAM = """
import gc, sys, atexit
from compressive.cli.app import app
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))  # runs after the command's own
{before}
app(["--version"], standalone_mode=False)
app(["recipes"], standalone_mode=False)
"""


@pytest.mark.parametrize(
    ("before", "expected"), [("", "True"), ("sys.modules['triton'] = 1", "False")]
)
def test_commands_end_without_a_search(before: str, expected: str) -> None:
    """With triton, which reports objects that are left at the exit, Python searches as usual."""
    code = EXIT_PROGRAM.replace("{before}", before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"frozen {expected}"

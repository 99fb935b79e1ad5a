"""One process writes to a folder; a second is refused, and nothing is mixed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import silent, tiny

from compressive.lock import hold
from compressive.train import pretrain


def test_a_folder_is_one_processs_until_it_ends_even_by_force(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "a"
    code = "import sys, time, pathlib; from compressive.lock import hold\n"
    code += "hold(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code, str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=f"another process is writing to {out}"):
                hold(out)
        finally:
            other.kill()
    os.close(hold(out))
    os.close(hold(out))
    assert list(out.iterdir()) == []


def test_a_run_that_another_process_trains_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "a"
    pretrain(tiny("train.steps=2"), out, display=silent())
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    held = hold(out)  # another description of the folder, as another process would have
    try:
        with pytest.raises(ValueError, match="another process is writing to"):
            pretrain(tiny("train.steps=2"), out, display=silent())
        with pytest.raises(ValueError, match="another process is writing to"):
            pretrain(tiny("train.steps=2"), out, display=silent())
    finally:
        os.close(held)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    pretrain(tiny("train.steps=2"), out, display=silent())

"""The test summary shows which tests were deselected or skipped, and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
@pytest.mark.parametrize("i", range(3))
def test_slow(i): pass

@pytest.mark.stress
@pytest.mark.parametrize("i", range(2))
def test_stress(i): pass

@pytest.mark.shared
def test_shared(): pass

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs CUDA")
def test_gpu(): pass
"""
INI = "[pytest]\nmarkers =\n  slow\n  stress\n  shared\n  gpu\n"


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "2"])
def test_summary_has_markers_counts_and_reasons(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "conftest.py").write_text("from marker_summary import *\n")
    selected = "not slow and not shared and not stress"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", processes, "-m", selected],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert "deselected: 1 shared (" in run.stdout, run.stdout + run.stderr
    assert "3 slow (run with -m slow)" in run.stdout
    assert "2 stress (take minutes; run with -m stress)" in run.stdout
    assert "skipped: 1 gpu (needs CUDA)" in run.stdout

"""A run whose GPU memory is taken by another process gives a one-line error and resumes later."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny import CHANGES, last, sorted_photos

# Allocate all but 200 MB, print a line, and hold the memory until stdin is closed.
HOG = """
import sys, torch
torch.cuda.init()
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(free - 200 * 2**20, dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""
BATCH = ["train.device=cuda", "train.steps=20", "train.batch_size=4096", "views.size=64"]


@pytest.mark.gpu
@pytest.mark.skipif(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
    reason="takes all memory of the GPU, so other tests would fail: run it with -n 0",
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_exhausted_gpu_memory_gives_a_one_line_error_and_the_run_resumes(tmp_path: Path) -> None:
    changes = [c for c in CHANGES if not c.startswith(("train.device", "train.steps"))]
    changes = [c for c in changes if not c.startswith(("train.batch", "views.size"))] + BATCH
    words = [sys.executable, "-m", "compressive", "pretrain", str(sorted_photos())]
    words += [word for change in changes for word in ("--set", change)]
    words += ["--out", str(tmp_path / "run")]
    with subprocess.Popen(
        [sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as hog:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "taken\n"
        run = subprocess.run(words, capture_output=True, text=True)
        hog.communicate()
    assert run.returncode == 1, run.stderr
    (line,) = [text for text in run.stderr.splitlines() if text.startswith("error: ")]
    assert line.startswith("error: not enough memory")
    assert "lower train.batch_size" in line
    assert "Traceback" not in run.stderr
    time.sleep(1)  # wait until the driver has freed the memory
    again = subprocess.run(words, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert last(tmp_path / "run")["step"] == 20

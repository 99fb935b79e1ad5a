"""Resources stay constant over many steps; benchmarks/soak.py measures 10,000."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.stress
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_threads_and_files_stay_constant_over_1000_steps() -> None:
    """Allow 2 % more memory, because the allocator itself varies by 1 % over a run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SCRIPT), "--steps", "1000"]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    early, late = found["resident_kib"]
    assert late < 1.02 * early
    for name in ("running_threads", "open_files"):
        early, late = found[name]
        assert late <= early, name
    sizes = [size for name, size in found["files"].items() if name.startswith("checkpoints/")]
    assert len(sizes) == 2
    assert max(sizes) - min(sizes) < 100  # the step number has more digits in the later file

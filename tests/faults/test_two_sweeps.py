"""If two sweeps start in one folder at the same time, one runs and the other is rejected."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import sorted_photos

ROUNDS = 10
# Read a folder from each line, start a sweep there and print its exit code. A run of the sweep only
# sleeps.
PROGRAM = """
import sys
from compressive.cli.app import app
from compressive.data.sources import open_source
from compressive.sweep import runner
runner.sweep.__kwdefaults__["program"] = ("sh", "-c", "sleep 0.5")
options = ["--recipe", "c-simclr/quickstart", "--suite", "none", "--seeds", sys.argv[2]]
print("ready", file=sys.__stdout__, flush=True)
for line in sys.stdin:
    words = ["sweep", sys.argv[1], *options, "--out", line.strip()]
    code = app(words, standalone_mode=False)
    print("exit code", code or 0, file=sys.__stdout__, flush=True)
"""


@pytest.mark.stress
def test_one_of_two_sweeps_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    seeds = ("0,1", "2,3")
    jobs: list[subprocess.Popen[str]] = []
    for i, values in enumerate(seeds):
        words = [sys.executable, "-c", PROGRAM, str(sorted_photos()), values]
        with (tmp_path / f"stderr{i}").open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            jobs.append(subprocess.Popen(words, text=True, **pipes))
    try:
        for job in jobs:
            read_until(job, "ready")
        for i in range(ROUNDS):
            out, expected = tmp_path / f"sweep{i}", [""] * 2
            before = [(tmp_path / f"stderr{k}").read_text() for k in range(2)]
            for job in jobs:
                assert job.stdin is not None
                job.stdin.write(f"{out}\n")
                job.stdin.flush()
            codes = [int(read_until(job, "exit code").split()[-1]) for job in jobs]
            assert sorted(codes) == [0, 2]
            loser = codes.index(2)
            hint = "wait until it ends, or choose another --out"
            expected[loser] = f"error: another process is writing to {out}; {hint}\n"
            after = [(tmp_path / f"stderr{k}").read_text() for k in range(2)]
            assert [b.removeprefix(a) for a, b in zip(before, after, strict=True)] == expected
            names = [f"seed{seed}" for seed in seeds[1 - loser].split(",")]
            assert json.loads((out / "sweep.json").read_text())["runs"].keys() == set(names)
            assert sorted(path.name for path in out.iterdir()) == ["logs", "sweep.json"]
            assert sorted(path.stem for path in (out / "logs").iterdir()) == names
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def read_until(job: subprocess.Popen[str], start: str) -> str:
    """Return the next line of the output that starts with `start`."""
    assert job.stdout is not None
    return next(line for line in job.stdout if line.startswith(start))

"""Time a sweep of small runs, one at a time and packed onto the device.

    python benchmarks/packing.py /cifar                          # ResNet-18, 4 runs of 600 steps
    python benchmarks/packing.py DATA --device cpu --at-once 1 2 --steps 4
    python benchmarks/packing.py builtin --at-once 4 1 --steps 150 --seconds 115 --repeat \
        --set train.compile=no

Prints one JSON line after each sweep: its seconds, the images per second of each run, and the
largest difference of a weight from the same run of the sweep before (0: equal). The last line has
the speedups relative to `--at-once 1`. A run of one step fills the compiler's cache before. With
`--repeat` it is a complete run alone: its difference from the next sweep shows whether the device
repeats its own results. After `--seconds` the current sweep is stopped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SOURCE = str(Path(__file__).parent.parent / "src")
sys.path.insert(0, SOURCE)
from compressive.rundir.reader import read_training


def main() -> None:
    """Read the command line, run the sweeps and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--recipe", default="c-simclr/cifar10-r18-200")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--at-once", nargs="+", default=["1", "auto"])
    parser.add_argument("--suite", default="none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=3600, help="time for everything")
    parser.add_argument("--repeat", action="store_true", help="repeat the first run alone")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        first = Path(name) / "first"
        steps = given.steps if given.repeat else 1
        row = {"at_once": "first", **run_sweep(given, first, "1", "0", steps, deadline)}
        print(json.dumps(row), flush=True)
        before = first if given.repeat else None
        for at_once in given.at_once:
            out, seeds = Path(name) / f"at-once-{at_once}", ",".join(map(str, range(given.runs)))
            row = run_sweep(given, out, at_once, seeds, given.steps, deadline)
            if before is not None:
                row["largest_difference"] = differences(before, out)
            found[at_once], before = row, out
            print(json.dumps({"at_once": at_once, **row}), flush=True)
    done = {key: row["seconds"] for key, row in found.items() if len(row["runs"]) == given.runs}
    speedups = {key: round(done["1"] / done[key], 3) for key in done} if "1" in done else {}
    from timing import environment

    about = environment("cuda" if given.device.startswith("cuda") else "cpu", "torchvision", "timm")
    print(json.dumps({"speedup": speedups, "steps": given.steps, "set": given.set, **about}))


def run_sweep(
    given: argparse.Namespace, out: Path, at_once: str, seeds: str, steps: int, deadline: float
) -> dict[str, Any]:
    """Run a sweep over seeds; return its seconds, and the images per second of finished runs."""
    words = [sys.executable, "-m", "compressive", "sweep", given.data, "--recipe", given.recipe]
    words += ["--seeds", seeds, "--suite", given.suite, "--at-once", at_once, "--out", str(out)]
    words += ["--vary", "health.max_restarts=3"]  # a sweep over one seed needs a setting
    changes = [f"train.steps={steps}", f"train.device={given.device}", "train.log_every=20"]
    changes += ["train.tensorboard=false", "probe.every_epochs=100000", *given.set]
    words += [word for change in changes for word in ("--set", change)]
    paths = filter(None, [os.environ.get("PYTHONPATH")])
    begin, log = time.monotonic(), out.with_suffix(".log")
    with log.open("w") as file:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, *paths])}
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
        is_stopped = not _ends_before(process, deadline)
    seconds, text = time.monotonic() - begin, log.read_text()
    if process.returncode and not is_stopped:
        ends = [path.read_text()[-2000:] for path in sorted(out.glob("logs/*.log"))]
        raise RuntimeError("\n".join([text, *ends]))
    rates = {}
    for path in sorted(out.glob("*/encoder.safetensors")):
        speeds = [each.get("images_per_second") for each in read_training(path.parent).metrics]
        known = [speed for speed in speeds[1:] if speed]  # the first includes the start
        rates[path.parent.name] = round(statistics.median(known)) if known else None
    said = [line.strip() for line in text.splitlines() if "at a time" in line]
    row = {"seconds": round(seconds, 1), "runs": rates, "packing": said}
    return row | ({"stopped": True} if is_stopped else {})


def _ends_before(process: "subprocess.Popen[bytes]", deadline: float) -> bool:
    """Wait for a sweep; stop it at the deadline, and its runs with it, and return False."""
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
        return True
    except subprocess.TimeoutExpired:
        pass
    for _ in range(3):  # the third request kills the runs
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)
    process.kill()
    process.wait()
    return False


def differences(before: Path, after: Path) -> dict[str, float]:
    """Return the largest difference of a weight of each run that both sweeps have."""
    from safetensors.torch import load_file

    found: dict[str, float] = {}
    for path in sorted(after.glob("*/encoder.safetensors")):
        if (same := before / path.relative_to(after)).is_file():
            one, other = load_file(same), load_file(path)
            gaps = ((one[k].double() - other[k].double()).abs().max() for k in other)
            found[path.parent.name] = max(gap.item() for gap in gaps)
    return found


if __name__ == "__main__":
    main()

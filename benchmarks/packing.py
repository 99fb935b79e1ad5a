"""Time a sweep of small runs, one at a time and packed onto the device.

    python benchmarks/packing.py /cifar                          # ResNet-18, 4 runs of 600 steps
    python benchmarks/packing.py DATA --device cpu --at-once 1 2 --steps 4

Prints one JSON line: the seconds of each sweep in turn, relative to the first, and whether every
run has the weights that it has alone. A run of one step fills the compiler's cache before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from compressive.rundir.fingerprint import file_fingerprint


def main() -> None:
    """Read the command line, run the sweeps and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--recipe", default="c-simclr/cifar10-r18-200")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--at-once", nargs="+", default=["1", "auto"])
    parser.add_argument("--suite", default="none")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    weights: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        run_sweep(given, Path(name) / "first", "1", "0", steps=1)
        for at_once in given.at_once:
            out, begin = Path(name) / f"at-once-{at_once}", time.time()
            seeds = ",".join(map(str, range(given.runs)))
            text = run_sweep(given, out, at_once, seeds, steps=given.steps)
            said = [line for line in text.splitlines() if "at a time" in line]
            found[at_once] = {"seconds": round(time.time() - begin, 1), "packing": said}
            files = [out / f"seed{seed}" / "encoder.safetensors" for seed in range(given.runs)]
            weights[at_once] = [file_fingerprint(path) for path in files]
            print(at_once, found[at_once], file=sys.stderr, flush=True)
    first = found[given.at_once[0]]["seconds"]
    for each in found.values():
        each["speedup"] = round(first / each["seconds"], 3)
    same = all(each == weights[given.at_once[0]] for each in weights.values())
    from timing import environment

    about = environment("cuda" if given.device.startswith("cuda") else "cpu", "torchvision", "timm")
    print(json.dumps({"packing": found, "runs": given.runs, "equal_weights": same, **about}))


def run_sweep(given: argparse.Namespace, out: Path, at_once: str, seeds: str, *, steps: int) -> str:
    """Run a sweep over seeds and return what it printed."""
    words = [sys.executable, "-m", "compressive", "sweep", given.data, "--recipe", given.recipe]
    words += ["--seeds", seeds, "--suite", given.suite, "--at-once", at_once, "--out", str(out)]
    if "," not in seeds:
        words += ["--vary", "health.max_restarts=3"]
    changes = [f"train.steps={steps}", f"train.device={given.device}", "train.log_every=20"]
    changes += ["train.tensorboard=false", "probe.every_epochs=100000", *given.set]
    words += [word for change in changes for word in ("--set", change)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()

"""Time `compressive evaluate` with the standard suite, from the start of Python to its end.

    python benchmarks/evaluation.py /cifar --run /tmp/run
    python benchmarks/evaluation.py /cifar --run /tmp/run --before ../old/src --rounds 2
    python benchmarks/evaluation.py builtin --run /tmp/run --max-images 200 --device cpu

`--run` is a run or an encoder's file; a run that does not exist is trained for a few steps. Prints
one JSON line: the seconds of each evaluation and of its tasks, and the largest difference of any
value between the two versions, relative to the larger one. `--before` names the `src` folder of
another version; versions run in turn, each evaluation in its own folder, so that no features are
cached.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src"


def main() -> None:
    """Read the command line; evaluate with each version in turn and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--recipe", default="c-simclr/cifar10-r18-200")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--suite", default="standard")
    parser.add_argument("--max-images", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--before", type=Path, help="src folder of another version")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    versions = {"before": given.before} if given.before else {}
    versions["now"] = SOURCE
    if not given.run.is_file() and not (given.run / "encoder.safetensors").exists():
        words = ["pretrain", given.data, "--recipe", given.recipe, "--steps", str(given.steps)]
        changes = [f"train.device={given.device}", "train.tensorboard=false", *given.set]
        words += [word for change in changes for word in ("--set", change)]
        command([*words, "--out", str(given.run)], SOURCE)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in versions}
    values: dict[str, dict[str, float]] = {}
    for _ in range(given.rounds):
        for name, source in versions.items():
            took, values[name] = evaluated(given, source)
            found[name].append(took)
            print(name, took, file=sys.stderr, flush=True)
    least = {name: min(each["seconds"] for each in all_) for name, all_ in found.items()}
    from timing import environment

    about = environment("cuda" if given.device.startswith("cuda") else "cpu", "torchvision", "timm")
    result = {"seconds": least, "differences": differences(values), "evaluations": found}
    print(json.dumps({"evaluation": result, **about}))


def evaluated(given: argparse.Namespace, source: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Evaluate the run in a new process; return the seconds of its parts and all values."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["evaluate", str(given.run), "--suite", given.suite, "--device", given.device]
        words += ["--data", given.data, "--max-images", str(given.max_images)]
        begin = time.time()
        text = command([*words, "--out", f"{folder}/out"], source)
        seconds = time.time() - begin
        written = json.loads(Path(folder, "out", "results.json").read_text())
    tasks = {name: float(value) for name, value in re.findall(r"(\S+) took ([\d.]+) s", text)}
    tasks |= written["about"].get("seconds", {})
    parts = {"seconds": round(seconds, 2), "tasks": tasks}
    keys = ("task", "dataset", "metric")
    return parts, {" ".join(r[k] for k in keys): r["value"] for r in written["records"]}


def differences(values: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the largest relative differences of values between two versions, by metric."""
    if len(values) < 2:
        return {}
    first, second = values["before"], values["now"]
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    apart = {
        name: abs(a - second[name]) / max(abs(a), abs(second[name]), 1e-12)
        for name, a in first.items()
    }
    return dict(sorted(apart.items(), key=lambda pair: -pair[1])[:5])


def command(words: list[str], source: Path) -> str:
    """Run `compressive` of a version and return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(source)}
    full = [sys.executable, "-m", "compressive", *words]
    done = subprocess.run(full, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()

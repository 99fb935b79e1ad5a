"""Run the quick start with several seeds and collect the columns of its table.

    python benchmarks/quickstart_seeds.py --seeds 0,1,2,3,4 --out quickstart.json
    python benchmarks/quickstart_seeds.py --table quickstart.json  # print it as Markdown

Measures wall time and processor time of each command, too. Writes one JSON file, whose `runs` have
the format of docs/results/2026-11-17-quickstart/test-x86.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment

METHODS = ("simclr", "c-simclr")
COLUMNS = {  # task and metric of each column
    ("logistic", "top-1"): "linear",
    ("kNN 20", "top-1"): "kNN",
    ("few labels 1%", "top-1"): "1 % of labels",
    ("few labels 10%", "top-1"): "10 % of labels",
    ("corruptions", "top-1"): "corrupted",
    ("information", "reducible_residual"): "reducible information",
    ("smoothness", "lipschitz"): "Lipschitz",
}


def columns(path: Path) -> dict[str, float]:
    """Return the values of a results.json by column; records of training images do not count."""
    records = [
        each
        for each in json.loads(path.read_text())["records"]
        if not each["dataset"].endswith(" train")
    ]
    return {
        COLUMNS[each["task"], each["metric"]]: each["value"]
        for each in records
        if (each["task"], each["metric"]) in COLUMNS
    }


def run_seed(seed: int, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the values of both methods, and the seconds of the command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = ["quickstart", "--out", str(folder), "--seed", str(seed)]
    subprocess.run([sys.executable, "-m", "compressive", *words], check=True, stdout=sys.stderr)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    runs = [
        {
            "method": method,
            "seed": seed,
            "values": columns(folder / method / "evaluation" / "results.json"),
        }
        for method in METHODS
    ]
    return runs, {"seed": seed, "wall": wall, "processor": used}


def table(runs: list[dict[str, Any]]) -> str:
    """Return mean and range over seeds of every column as a Markdown table; accuracies in %."""
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---" + "|--:" * len(COLUMNS) + "|"]
    for method in METHODS:
        cells = []
        for (_, metric), name in COLUMNS.items():
            found = [run["values"].get(name) for run in runs if run["method"] == method]
            scale, digits = (100, 1) if metric == "top-1" else (1, 2)
            known = [scale * value for value in found if value is not None]
            shown = [f"{part(known):.{digits}f}" for part in (mean, min, max)] if known else []
            cells.append("{} ({} to {})".format(*shown) if shown else "")
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write the file after every seed, or print the table of a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2,3,4")
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, help="file to write")
    wanted.add_argument("--table", type=Path, help="print the table of this file instead")
    asked = parser.parse_args()
    if asked.table:
        print(table(json.loads(asked.table.read_text())["runs"]))
        return
    found: dict[str, Any] = {"environment": environment("cpu"), "seconds": [], "runs": []}
    for seed in map(int, asked.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            runs, seconds = run_seed(seed, Path(folder) / "quickstart")
        found["runs"] += runs
        found["seconds"].append(seconds)
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

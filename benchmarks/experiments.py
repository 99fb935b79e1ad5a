"""Train and evaluate a list of runs on one machine, several at a time.

    python benchmarks/experiments.py queue.jsonl --out results --at-once 5

Each line of the queue is a JSON object: `name`; `data`; then either `finetune`, an encoder, or
nothing; `options`, keyword arguments of `compressive.pretrain` or `compressive.finetune`; `set`,
settings by dotted name; `evaluate`, a list of task groups such as ["knn,few-label", "logistic"];
`held_out` to evaluate on training images; and `light`, true for a short run that does not count.
A line with `encoder` instead only evaluates. Each run writes NAME.json with its settings, seconds,
last metrics, scores, skipped tasks, notes on how the data was split and the checksum of the
encoder. A run that has its file is skipped, so the command can be repeated.
"""

import argparse
import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from compressive.sweep.packing import Packing, gpu_sharing
from compressive.sweep.processes import Processes, Slot
from compressive.train.signals import handle_stop_signals

TRAINED = ".trained"  # ending of the file that a run writes before its evaluation


def main() -> None:
    """Read the command line and run the queue, or one entry of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("queue", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--at-once", type=int, default=5, help="runs that train at the same time")
    parser.add_argument("--only", help="the name of one run, in this process")
    args = parser.parse_args()
    entries = [json.loads(line) for line in args.queue.read_text().splitlines() if line.strip()]
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        run_one(next(entry for entry in entries if entry["name"] == args.only), args.out)
    else:
        run_all(entries, args)


def run_all(entries: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Start the entries in order; Ctrl-C stops all. Short ones have slots of their own."""
    left = [entry for entry in entries if not (args.out / f"{entry['name']}.json").exists()]
    light = [entry for entry in left if entry.get("light")]
    heavy = [entry for entry in left if not entry.get("light")]
    with gpu_sharing(print) as environment, ThreadPoolExecutor() as pool:
        queues = [(heavy, args.at_once), (light, 2)]
        started = [(Processes(Packing(count, len(few)), environment), few) for few, count in queues]

        def stop(_: int) -> None:
            for processes, _few in started:
                processes.stop()

        with handle_stop_signals(stop):
            for processes, few in started:
                pool.submit(processes.run_all, few, partial(start, args, processes))
            pool.shutdown()


def start(
    args: argparse.Namespace, processes: Processes, entry: dict[str, Any], slot: Slot
) -> None:
    """Run one entry in a process of its own and release its slot when training has ended."""
    name = entry["name"]
    words = [sys.executable, __file__, str(args.queue), "--out", str(args.out), "--only", name]
    log = args.out / f"{name}.log"
    print(f"{time.strftime('%H:%M:%S')} start {name}", flush=True)

    def poll() -> None:
        if (args.out / f"{name}{TRAINED}").exists():
            slot.release()  # one that evaluates no longer counts

    code = processes.call(words, log, poll, seconds=0.5)
    print(f"{time.strftime('%H:%M:%S')} {'end' if code == 0 else 'FAILED'} {name}", flush=True)


def run_one(entry: dict[str, Any], out: Path) -> None:
    """Train and evaluate, and write the file of the run after each step."""
    import torch
    from timing import environment

    import compressive

    device = "cuda" if torch.cuda.is_available() else "cpu"
    versions = environment(device, "torchvision", "timm")
    folder, began = out / entry["name"], time.monotonic()
    found: dict[str, Any] = {**entry, "seconds": {}, "scores": {}}
    settings = [f"{name}={value}" for name, value in entry.get("set", {}).items()]
    options = {**entry.get("options", {}), "settings": settings}
    results: list[Any] = []
    if "finetune" in entry:
        tuned = compressive.finetune(entry["finetune"], entry["data"], folder, **options)
        found["chosen"] = json.loads((tuned.folder / "finetune.json").read_text())
        results += [tuned.test] if tuned.test else []
    elif "encoder" not in entry:
        compressive.pretrain(entry["data"], folder, **options)
        found["last_metrics"] = last_metrics(folder)
        found["encoder_sha256"] = sha256(folder / "encoder.safetensors")
    found["seconds"]["train"] = round(time.monotonic() - began, 1)
    (out / f"{entry['name']}{TRAINED}").touch()
    for tasks in entry.get("evaluate", []):
        began = time.monotonic()
        what = entry.get("encoder", folder)
        where = {"data": entry["data"], "out": folder} if "encoder" in entry else {}
        held_out = entry.get("held_out", False)
        measured, _ = compressive.evaluate(what, tasks=tasks, held_out=held_out, **where)
        results.append(measured)
        found["seconds"][tasks] = round(time.monotonic() - began, 1)
        write(out, found, results, versions)
    write(out, found, results, versions)


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the last value of every metric of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found: dict[str, Any] = {}
    for line in lines[-20:]:
        found |= json.loads(line)
    return found


def write(out: Path, found: dict[str, Any], results: list[Any], versions: dict[str, Any]) -> None:
    """Write the file of a run at once, so that it is never half-written."""
    for measured in results:
        for record in measured.records:
            key = f"{record.task} {record.metric}"
            if record.task in ("corruption", "extra corruption"):
                key = f"{record.task} {record.dataset} {record.metric}"
            value = {"value": record.value, "low": record.low, "high": record.high, "n": record.n}
            found["scores"][key] = value
    found["notes"] = sorted({note for measured in results for note in measured.notes})
    found["skipped"] = sorted({text for measured in results for text in measured.skipped})
    path = out / f"{found['name']}.json"
    path.with_suffix(".tmp").write_text(json.dumps({**found, "versions": versions}, indent=1))
    path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()

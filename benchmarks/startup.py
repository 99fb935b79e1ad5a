"""Time the start of training up to the first step, with empty and with filled compiler caches.

    python benchmarks/startup.py resnet18                  # CIFAR-10's size, batch 512
    python benchmarks/startup.py resnet50                  # 224 pixels, batch 256
    python benchmarks/startup.py resnet18 --before ../old/src
    python benchmarks/startup.py resnet18 --device cpu     # small batches

Prints one JSON line. A start is a new Python process that imports torch and the package, builds a
C-SimCLR run and makes two steps, as `compressive pretrain` does. `cold` has an empty cache folder,
`second` the one that `cold` filled. `--before` names the `src` folder of another version; both
versions are timed in turn.

`breakdown` has the seconds of imports, of building the run with its first checkpoint, of compiling
and of a step. `seconds` are those since the start of Python, `parts` are differences between them,
and `compiler` is torch's own account of what it did (nested, so they do not add up). `caches`
counts hits and misses of torch's caches. `ahead` has the exit code and the messages of the
process that compiles the network (COMPRESSIVE_COMPILE_AHEAD), `rebuilt` names
kernels that were not loaded from the cache. `later_steps_ms` has the milliseconds of later steps
(median and minimum), which show whether kernels were chosen well.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src"
RECIPES = {"resnet18": "c-simclr/cifar10-r18-200", "resnet50": "c-simclr/imagenet-r50-300"}
QUIET = ("train.save_every=1000", "train.tensorboard=false", "train.compile=yes")
SMALL = {"resnet18": ("train.batch_size=8",), "resnet50": ("train.batch_size=4", "views.size=64")}
LEAST = 0.2  # seconds; faster functions of torch's compiler are not listed


def main() -> None:
    """Read the command line; time the starts in turn and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=RECIPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--before", type=Path, help="src folder of another version")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], help="changes of settings")
    parser.add_argument("--child", nargs=2, metavar=("BEGIN", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        begin, place = given.child
        return start(given.network, given.device, given.set, float(begin), Path(place))
    versions = {"before": given.before} if given.before else {}
    versions["now"] = SOURCE
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        if given.network == "resnet50":
            write_images(Path(name) / "photos")
        for number in range(given.rounds):
            for kind in ("cold", "second"):
                for version, source in versions.items():
                    cache = Path(name) / f"cache-{version}-{number}"
                    started = launch(given, source, Path(name), cache)
                    found.setdefault(f"{version}, {kind}", []).append(started)
                    print(version, kind, started["seconds"], file=sys.stderr, flush=True)
        device = "cuda" if given.device.startswith("cuda") else "cpu"
        from timing import environment

        about = environment(device, "torchvision", "timm", "triton")
    best = {
        key: min(all_, key=lambda each: each["breakdown"]["all"]) for key, all_ in found.items()
    }
    breakdown = {key: each["breakdown"] for key, each in best.items()}
    print(json.dumps({"startup": given.network, "breakdown": breakdown, "starts": found, **about}))
    return None


def launch(given: argparse.Namespace, source: Path, place: Path, cache: Path) -> dict[str, Any]:
    """Make one start in a new process and return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(source), "COMPRESSIVE_COMPILE_CACHE": str(cache)}
    # Versions without a cache of their own use torch's default folder.
    env["TMPDIR"] = str(place)
    # Like a user's machine: later starts find the bytecode of the package.
    removed = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_LOGS")
    for name in (*removed, "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    if source != SOURCE:
        env["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    words = [sys.executable, __file__, given.network, "--device", given.device]
    words += [word for change in given.set for word in ("--set", change)]
    words += ["--child", str(time.time()), str(place)]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def write_images(folder: Path) -> None:
    """Write photographs for the start at 224 pixels."""
    sys.path.insert(0, str(SOURCE))
    from loader import write_photos

    folder.mkdir()
    write_photos(str(folder), 512)


def start(network: str, device: str, given: list[str], begin: float, place: Path) -> None:
    """Make two steps and print when each part of the start ended."""
    ended = {"python": time.time() - begin}

    def mark(name: str) -> None:
        if "torch" in sys.modules and device.startswith("cuda"):
            torch.cuda.synchronize()
        ended[name] = time.time() - begin

    from compressive import recipes
    from compressive.config import override

    source = place / "photos" if network == "resnet50" else "builtin"
    small = (
        SMALL[network] if device == "cpu" else ("train.batch_size=256",) * (network == "resnet50")
    )
    changes = (f"data.source={source}", f"train.device={device}", *QUIET, *small, *given)
    config = override(recipes.get(RECIPES[network]).config, *changes)
    start_as_command(config)
    ended["settings"] = time.time() - begin
    import torch

    ended["import torch"] = time.time() - begin
    from compressive.progress import Display
    from compressive.train.loop import train_step
    from compressive.train.run import Run

    ended["imports"] = time.time() - begin
    rebuilt = collect_rebuilt_kernels()
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder) / "run", Display(quiet=True), resume=False)
        mark("build")
        run.restore()
        mark("first checkpoint")
        make, batches = run.make_views, run.batches()
        ahead = getattr(run, "ahead", None)
        if ahead is not None:
            finish = ahead.finish

            def finish_and_mark() -> None:
                finish()
                if "network ahead" not in ended:
                    mark("network ahead")

            ahead.finish = finish_and_mark

        def views(batch: Any) -> Any:
            made = make(batch)
            if "views" not in ended:
                mark("views")
            return made

        run.make_views = views
        loss = float(train_step(run, batches).loss)
        mark("first step")
        processor = time.process_time()  # tells the work from the wait on a busy machine
        second = float(train_step(run, batches).loss)
        mark("second step")
        later = time_steps(lambda: train_step(run, batches), mark) if device != "cpu" else []
        ended.pop("later", None)
        run.close()
    names, times = list(ended), list(ended.values())
    parts = {b: round(times[i + 1] - times[i], 2) for i, b in enumerate(names[1:])}
    print(
        json.dumps(
            {
                "seconds": {name: round(value, 2) for name, value in ended.items()},
                "parts": {"python": round(times[0], 2), **parts},
                "breakdown": break_down(ended),
                "loss": loss,
                "second_loss": second,
                "later_steps_ms": later,
                "ahead": ahead and [ahead.process.exit_code, *messages(ahead.process, begin)],
                "rebuilt": rebuilt,
                "has_bytecode": Path(cache_from_source(str(torch.__file__))).exists(),
                "processor_seconds": round(processor, 2),
                **account(),
            }
        )
    )


def messages(process: Any, begin: float) -> list[str]:
    """Return when each part was done, in seconds since `begin`, and the last other lines."""
    words = [line.partition(" ") for line in process.messages]
    times = {i: float(at) for i, (at, _, _) in enumerate(words) if at.replace(".", "").isdigit()}
    parts = [f"{at - begin:.2f} {words[i][2]}" for i, at in times.items()]
    others = [line for i, line in enumerate(process.messages) if i not in times]
    return [*parts, *others[-4:]]


def time_steps(step: Callable[[], object], synchronize: Callable[[str], None]) -> list[float]:
    """Return the milliseconds of a step in the median and minimum of blocks of five."""
    found: list[float] = []
    for _ in range(6):
        synchronize("later")
        begin = time.perf_counter()
        for _ in range(5):
            step()
        synchronize("later")
        found.append(round(200 * (time.perf_counter() - begin), 2))
    return [statistics.median(found), min(found)]


def start_as_command(config: Any) -> None:
    """Do what the command line does before it imports torch; versions before 2026-11-18 do not."""
    try:
        from compressive.platforms.compile_process import start_early
        from compressive.platforms.garbage import collect_rarely
        from compressive.rundir.compile_marks import may_need_compiling
    except ImportError:
        return
    collect_rarely()
    if may_need_compiling(config, is_complete=True):
        start_early()


def break_down(ended: dict[str, float]) -> dict[str, float]:
    """Return the seconds of imports, building, compiling and a step, and their sum."""
    step = ended["second step"] - ended["first step"]
    parts = {"imports": ended["imports"], "build": ended["first checkpoint"] - ended["imports"]}
    parts["compile"] = ended["first step"] - ended["first checkpoint"] - step
    parts |= {"step": step, "all": ended["first step"]}
    return {name: round(value, 2) for name, value in parts.items()}


def collect_rebuilt_kernels() -> list[str]:
    """Return a list of why kernels cannot be loaded from the cache, filled while they are built."""
    found: list[str] = []
    logger = logging.getLogger("torch._inductor.runtime.triton_heuristics")

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "Bypassing" in (text := record.getMessage()):
                found.append(text)

    logger.addHandler(Collect())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return found


def account() -> dict[str, Any]:
    """Return the times of torch's compiler and the counts of its caches."""
    import torch._dynamo.utils as dynamo

    times = dynamo.compilation_time_metrics
    slow = {name: each for name, each in times.items() if sum(each) >= LEAST}
    counts = {**dynamo.counters["aot_autograd"], **dynamo.counters["inductor"]}
    caches = {name: n for name, n in counts.items() if "cache" in name or "bundler" in name}
    seconds = {name: [round(t, 2) for t in each] for name, each in slow.items()}
    return {"compiler": seconds, "caches": caches}


if __name__ == "__main__":
    main()

"""Run a sweep: every planned run is trained and evaluated in its own process."""

import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from compressive import recipes
from compressive.config import with_data
from compressive.engine.local import Engine
from compressive.engine.ray_cluster import RayEngine
from compressive.progress import Display
from compressive.rundir import files
from compressive.rundir.files import SWEEP, local_path, write_text
from compressive.rundir.lock import acquire_lock, ensure_writable
from compressive.rundir.reader import read_training
from compressive.sweep.cluster_processes import ClusterProcesses
from compressive.sweep.packing import (
    AUTOMATIC,
    Packing,
    gpu_memory,
    gpu_sharing,
    needs_gpu_alone,
    parse_at_once,
)
from compressive.sweep.plan import NO_SUITE, PlannedRun, check_evaluation, plan_runs
from compressive.sweep.processes import Processes, Slot, last_line
from compressive.sweep.table import SweepRow, sweep_rows
from compressive.tracking import check_trackers


class SweepResult(NamedTuple):
    """The table of a sweep and how it ended."""

    rows: list[SweepRow]
    failed: list[Path]  # logs of the runs that failed
    interrupted: bool


def sweep(
    data: str,
    out: Path,
    *,
    recipe: str = "",
    vary: Sequence[str] = (),
    preset: str = "",
    seeds: str = "0",
    changes: Sequence[str] = (),
    suite: str = "quick",
    tasks: str = "",
    max_images: int = 0,
    held_out: bool = False,
    at_once: int | str = AUTOMATIC,
    track: str = "",
    engine: Engine | None = None,
    display: Display | None = None,
    program: Sequence[str] = (sys.executable, "-m", "compressive"),
) -> SweepResult:
    """Train and evaluate every planned run; a failed run does not stop the others.

    With `held_out` or the suite "none" no test image is read. Finished runs are skipped and others
    resumed. Values and seeds may be added later; everything else must stay the same, except for
    `track`. Ctrl-C stops the runs, which save a checkpoint. `at_once` is how many runs share the
    device; "auto" measures how many are useful on an NVIDIA GPU, and is 1 elsewhere. With a cluster
    as `engine` it is how many run at all; "auto" is as many as the cluster has room for.
    """
    axes: dict[str, Any] = {"vary": vary, "preset": preset, "seeds": seeds, "changes": changes}
    wanted = parse_at_once(at_once)
    runs = plan_runs(data, recipe=recipe, **axes)
    check_evaluation(suite, tasks, max_images, held_out)
    check_trackers(track)
    out = local_path(out)
    ensure_writable(out)
    shown = display or Display()
    if not (out / SWEEP).exists():
        from compressive.data.several import count_table
        from compressive.data.sources import open_source
        from compressive.train.auto_config import auto_config

        base = (recipes.get(recipe) if recipe else auto_config(data, changes=changes)).config
        # Fail now, before any run starts, if the images cannot be opened.
        source = open_source(data, with_data(base, data, *changes).data.split)
        for line in count_table(source):
            shown.say(line)
        runs = plan_runs(data, recipe=recipe, base=base, **axes)
    about = {"data": data, "recipe": recipe, "set": list(changes), "varied": list(runs[0].varied)}
    about |= {"suite": suite, "tasks": tasks, "max_images": max_images, "held_out": held_out}
    train = ["pretrain", data, "--recipe", recipe, *(["--track", track] if track else [])]
    train += [word for change in changes for word in ("--set", change)]
    test = ["evaluate", "--suite", suite, "--tasks", tasks, "--max-images", str(max_images)]
    test = [] if suite == NO_SUITE else [*test, *(["--held-out"] if held_out else [])]
    from compressive.train.signals import handle_stop_signals

    lock = acquire_lock(out)
    try:
        state = SweepFile(out, about, runs)
        with ExitStack() as stack, shown:
            if isinstance(engine, RayEngine):
                processes: Processes = ClusterProcesses(engine, wanted)
            else:
                processes = _open_processes(state, wanted, shown, stack)
            started = SweepRuns(state, train, test, shown, program, processes)
            with handle_stop_signals(lambda _: started.stop()):
                started.run_all()
        failed = [state.log(run) for run in runs if run.name in state.failed]
        return SweepResult(state.write(), failed, processes.stopping > 0)
    finally:
        os.close(lock)


def _open_processes(
    state: "SweepFile", wanted: int | None, display: Display, stack: ExitStack
) -> Processes:
    """Decide how many runs share the device, and let their kernels run at the same time."""
    left = [run for run in state.runs if not state.is_done(run)]
    devices = {run.device for run in left}
    device = devices.pop() if len(devices) == 1 else ""  # runs on several devices: no measurement
    packing = Packing(wanted, len(left), partial(gpu_memory, device), display.say)
    environment = {}
    if packing.can_grow or (packing.limit > 1 and len(left) > 1 and gpu_memory(device)):
        environment = stack.enter_context(gpu_sharing(display.say))
    return Processes(packing, environment)


class SweepFile:
    """sweep.json: what is varied, the status of each run, and the table."""

    def __init__(self, out: Path, about: dict[str, Any], runs: list[PlannedRun]) -> None:
        self.out: Path = out
        self.about: dict[str, Any] = about
        self.runs: list[PlannedRun] = runs
        self.status: dict[str, str] = {}
        self._lock = threading.Lock()
        path = out / SWEEP
        if not path.exists():
            if out.is_dir() and any(
                not path.name.endswith(files.PARTIAL) for path in out.iterdir()
            ):
                raise ValueError(f"{out} is not empty and contains no sweep; choose another --out")
            out.mkdir(parents=True, exist_ok=True)
            return
        try:
            old = json.loads(path.read_text())
            before = dict(old["about"])
            self.status = dict(old["runs"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}); choose another --out"
            ) from None
        for name, value in about.items():
            if before.get(name, False) != value:
                raise ValueError(
                    f"{out} holds a sweep with {name} {before.get(name, False)!r}, not {value!r}; "
                    "give the same value to resume it, or choose another --out"
                )

    @property
    def failed(self) -> set[str]:
        """The names of the runs that failed."""
        return {run.name for run in self.runs if self.status.get(run.name) == "failed"}

    def is_done(self, run: PlannedRun) -> bool:
        """Return whether a run has finished and its last file exists."""
        last = self.evaluation(run) / files.RESULTS
        if self.about["suite"] == NO_SUITE:
            last = self.out / run.name / files.ENCODER
        return self.status.get(run.name) == "done" and last.is_file()

    def log(self, run: PlannedRun) -> Path:
        """Return the file for the output of a run's commands; no run is named `logs`."""
        return self.out / "logs" / f"{run.name}.log"

    def evaluation(self, run: PlannedRun) -> Path:
        """Return the folder of a run's results."""
        held_out = self.about["held_out"]
        return self.out / run.name / (files.HELD_OUT if held_out else files.EVALUATION)

    def set_status(self, run: PlannedRun, status: str) -> None:
        """Record that a run is running, done, stopped or failed."""
        with self._lock:
            self.status[run.name] = status
            self.write()

    def write(self) -> list[SweepRow]:
        """Write the file atomically and return the rows of the table."""
        done = {run.name for run in self.runs if self.is_done(run)}
        rows = sweep_rows(self.out, self.runs, done, self.failed, held_out=self.about["held_out"])
        table = [
            row._asdict() | {"figures": {k: v._asdict() for k, v in row.figures.items()}}
            for row in rows
        ]
        content = {"about": self.about, "runs": self.status, "table": table}
        write_text(self.out / SWEEP, json.dumps(content, indent=1) + "\n")
        return rows


class SweepRuns:
    """The runs of a sweep: each is trained and evaluated by our commands, in its own process."""

    def __init__(
        self,
        state: SweepFile,
        train: list[str],
        test: list[str],
        display: Display,
        program: Sequence[str],
        processes: Processes,
    ) -> None:
        self.state, self.train, self.test, self.display = state, train, test, display
        self.program, self.processes, self._started = program, processes, 0
        self._shares: dict[str, float] = {}  # how much of each started run is done
        self._last: dict[str, str] = {}  # last line of each running one
        self._rates: dict[str, tuple[int, float] | None] = {}  # see `Packing.update`
        self._again: list[PlannedRun] = []

    def run_all(self) -> None:
        """Run everything; then repeat runs alone that failed because others used the GPU."""
        self.processes.run_all(self.state.runs, self._run)
        self.processes.packing.fix(1)
        self.processes.run_all(self._again, self._run)

    def stop(self) -> None:
        """Ask the runs to save and stop; the third request kills them."""
        self.processes.stop()
        if self.processes.stopping == 1:
            self.display.say("stopping; runs save a checkpoint; run the same command to resume")

    def _run(self, run: PlannedRun, slot: Slot) -> None:
        folder, log = self.state.out / run.name, self.state.log(run)
        with self.processes.lock:
            is_repeated = run in self._again
            self._started += not is_repeated
            title = f"{self._started} of {len(self.state.runs)}: {run.name}"
            title = f"again: {run.name}" if is_repeated else title
        if self.state.is_done(run):
            self._shares[run.name] = 1.0
            self.display.say(f"{title} is already done")
            return
        self.display.say(f"{title} ... (compressive watch {shlex.quote(str(folder))})")
        self.state.set_status(run, "running")
        changes = [word for change in run.changes for word in ("--set", change)]
        commands = [[*self.train, *changes, "--out", str(folder)]]
        if self.test:
            results = ["--device", run.device, "--out", str(self.state.evaluation(run))]
            commands.append([*self.test, *results, str(folder)])
        for command in commands:
            words, poll = [*self.program, *command], partial(self._show, run, command[0], log)
            with self.processes.lock:
                self._rates[run.name] = None
            code = self.processes.call(words, log, poll)
            with self.processes.lock:
                self._rates.pop(run.name, None)
                self._last.pop(run.name, None)
            if code:
                reason = f"{command[0]} exited with {code}: {last_line(log)}"
                is_crowded = slot.was_shared and (code < 0 or needs_gpu_alone(reason))
                self._fail(run, reason, log, is_crowded=is_crowded)
                return
        self.state.set_status(run, "done")
        self._shares[run.name] = 1.0

    def _fail(self, run: PlannedRun, reason: str, log: Path, *, is_crowded: bool) -> None:
        """Record a failed or stopped run, or note that it shall be repeated alone."""
        if self.processes.stopping:
            self.state.set_status(run, "stopped")
        elif is_crowded:
            self.state.set_status(run, "stopped")
            with self.processes.lock:
                self._again.append(run)
            self.display.say(f"{run.name} will be repeated alone, {reason}")
        else:
            self.state.set_status(run, "failed")
            self.display.say(f"{run.name} failed, {reason}; its output is in {log}")

    def _show(self, run: PlannedRun, command: str, log: Path) -> None:
        """Show how far the sweep is, and the last line that each running command printed."""
        share, rate = 1.0, None
        if command == "pretrain":
            folder = self.state.out / run.name
            training = read_training(folder) if (folder / files.CONFIG).is_file() else None
            share = training.step / training.total if training and training.total else 0.0
            speed = training.last("images_per_second") if training else None
            rate = (len(training.metrics), speed) if training and speed else None
        last = last_line(log)
        last = f"{command} starts" if last.startswith("$ ") else last
        count = len(self.state.runs)
        title = f"sweep, run {min(self._started, count)} of {count}"
        with self.processes.lock:
            # Assume that evaluation takes a tenth of the time of a run.
            self._shares[run.name] = share * (0.9 if self.test else 1.0)
            self._rates[run.name], self._last[run.name] = rate, last
            self.display.progress(title, sum(self._shares.values()), count, self._last)
            self.processes.packing.update(self._rates)

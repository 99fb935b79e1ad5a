"""Run a sweep: every planned run is trained and evaluated in its own process."""

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from compressive import recipes
from compressive.config import with_data
from compressive.platforms.processes import interrupt, own_process_group
from compressive.progress import Display
from compressive.rundir import files
from compressive.rundir.files import SWEEP, local_path, write_text
from compressive.rundir.lock import acquire_lock, ensure_writable
from compressive.rundir.reader import read_training
from compressive.sweep.plan import NO_SUITE, PlannedRun, check_evaluation, plan_runs
from compressive.sweep.table import SweepRow, sweep_rows
from compressive.tracking import check_trackers

_POLL = 2.0  # seconds between two looks at a running command
_LOG_END = 4096  # bytes of a log in which its last line is searched
_INTERRUPTED = 130  # exit code of a command that was interrupted


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
    at_once: int = 1,
    track: str = "",
    display: Display | None = None,
    program: Sequence[str] = (sys.executable, "-m", "compressive"),
) -> SweepResult:
    """Train and evaluate every planned run; a failed run does not stop the others.

    With `held_out` or the suite "none" no test image is read. Finished runs are skipped and others
    resumed. Values and seeds may be added later; everything else must stay the same, except for
    `track`. Ctrl-C stops the runs, which save a checkpoint.
    """
    axes: dict[str, Any] = {"vary": vary, "preset": preset, "seeds": seeds, "changes": changes}
    if at_once < 1:
        raise ValueError(f"--jobs must be 1 or more, got {at_once}")
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
        processes = _Processes(state, train, test, shown, program)
        with handle_stop_signals(lambda _: processes.stop()), shown:
            processes.run_all(at_once)
        failed = [state.log(run) for run in runs if run.name in state.failed]
        return SweepResult(state.write(), failed, processes.stopping > 0)
    finally:
        os.close(lock)


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


class _Processes:
    """Processes of the runs, started in turn and stopped on request."""

    def __init__(
        self,
        state: SweepFile,
        train: list[str],
        test: list[str],
        display: Display,
        program: Sequence[str],
    ) -> None:
        self.state, self.train, self.test, self.display = state, train, test, display
        self.program, self.stopping, self._started = program, 0, 0
        self._running: set[subprocess.Popen[bytes]] = set()
        self._shares: dict[str, float] = {}  # how much of each started run is done
        self._lock = threading.RLock()  # a signal may arrive while another is handled

    def run_all(self, at_once: int) -> None:
        """Run everything, `at_once` runs in parallel."""
        with ThreadPoolExecutor(at_once) as pool:
            for future in [pool.submit(self._run, run) for run in self.state.runs]:
                future.result()

    def stop(self) -> None:
        """Ask the runs to save and stop; the third request kills them."""
        with self._lock:
            self.stopping += 1
            for process in self._running:
                if self.stopping < 3:
                    interrupt(process)
                else:
                    process.kill()
        if self.stopping == 1:
            self.display.say("stopping; runs save a checkpoint; run the same command to resume")

    def _run(self, run: PlannedRun) -> None:
        if self.stopping:
            return
        folder, log = self.state.out / run.name, self.state.log(run)
        with self._lock:
            self._started += 1
            title = f"{self._started} of {len(self.state.runs)}: {run.name}"
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
            if code := self._call(command, log, run):
                self.state.set_status(run, "stopped" if self.stopping else "failed")
                if not self.stopping:
                    lines = log.read_text(errors="replace").split("\n")
                    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
                    reason = f"{command[0]} exited with {code}: {last}"
                    self.display.say(f"{run.name} failed, {reason}; its output is in {log}")
                return
        self.state.set_status(run, "done")
        self._shares[run.name] = 1.0

    def _show(self, run: PlannedRun, command: str, log: Path) -> None:
        """Show how far the sweep is, and the last line that a running command printed."""
        share = 1.0
        if command == "pretrain":
            folder = self.state.out / run.name
            training = read_training(folder) if (folder / files.CONFIG).is_file() else None
            share = training.step / training.total if training and training.total else 0.0
        # Assume that evaluation takes a tenth of the time of a run.
        self._shares[run.name] = share * (0.9 if self.test else 1.0)
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_END))
            lines = file.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        last = f"{command} starts" if last.startswith("$ ") else last
        count = len(self.state.runs)
        title = f"sweep, run {min(self._started, count)} of {count}"
        with self._lock:
            readings = {run.name: last}
            self.display.progress(title, sum(self._shares.values()), count, readings)

    def _call(self, arguments: list[str], log: Path, run: PlannedRun) -> int:
        """Run one of our commands and append its output to the log; return the exit code."""
        command = [*self.program, *arguments]
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            with self._lock:
                if self.stopping:
                    return _INTERRUPTED
                group = own_process_group()
                # Use a new process group: otherwise the terminal would also send Ctrl-C to the
                # process, and a run that receives it twice does not save.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=group.process_group,
                    creationflags=group.creationflags,
                )
                self._running.add(process)
            while (code := _exit_code(process)) is None:
                self._show(run, arguments[0], log)
        with self._lock:
            self._running.discard(process)
        return code


def _exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    """Return the exit code of a process, or None if it still runs after a while."""
    try:
        return process.wait(timeout=_POLL)
    except subprocess.TimeoutExpired:
        return None

"""Sweeps: the same run with other settings and seeds, each in its own process."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from compressive.config import Config, with_data
from compressive.evaluation.tasks import SUITES, select_tasks
from compressive.progress import Display
from compressive.rundir.files import (
    ENCODER,
    EVALUATION,
    HELD_OUT,
    PARTIAL,
    RESULTS,
    SWEEP,
    write_text,
)
from compressive.rundir.lock import acquire_lock, ensure_writable
from compressive.sweep.plan import Job, plan
from compressive.sweep.table import Row, rows, table
from compressive.train.signals import handle_stop_signals

NONE = "none"  # a suite: trained and not evaluated
_INTERRUPTED = 130  # what a command that was asked to stop ends with


class Summary(NamedTuple):
    """What a sweep came to."""

    out: Path
    rows: list[Row]
    failed: list[Path]  # logs of the runs that failed
    interrupted: bool  # it was asked to stop; the same command goes on


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
    display: Display | None = None,
) -> Summary:
    """Train and evaluate every run of the plan; none that fails ends the others.

    With `held_out`, and with the suite "none", no test image is opened: to choose by labels held
    out of train. Runs that are finished are not repeated, others go on where they stopped. More
    values and seeds may be given later; all else must stay. Ctrl-C stops the runs, which save
    themselves.
    """
    if at_once < 1:
        raise ValueError(f"--jobs must be 1 or more, got {at_once}")
    ensure_writable(out)
    base = None
    if not (out / SWEEP).exists():  # later ones must be the same
        _require_tasks(suite, tasks, max_images, held_out)
        base = _begun_with(data, recipe, changes)
    words: dict[str, Any] = {"vary": vary, "preset": preset, "seeds": seeds, "changes": changes}
    jobs = plan(data, recipe=recipe, base=base, **words)
    about = {
        "data": data,
        "recipe": recipe,
        "set": list(changes),
        "varied": list(jobs[0].varied),
        "suite": suite,
        "tasks": tasks,
        "max_images": max_images,
        "held_out": held_out,
    }
    train = ["pretrain", data, "--recipe", recipe]
    train += [word for change in changes for word in ("--set", change)]
    judge = ["evaluate", "--suite", suite, "--tasks", tasks, "--max-images", str(max_images)]
    judge = [] if suite == NONE else [*judge, *(["--held-out"] if held_out else [])]
    held = acquire_lock(out)
    try:
        state = _State(out, about, jobs)
        work = _Work(state, train, judge, display or Display())
        with handle_stop_signals(lambda _: work.stop()):
            work.do(at_once)
        failed = [state.log(job) for job in jobs if job.name in state.failed]
        return Summary(out, state.write(), failed, work.stopping > 0)
    finally:
        os.close(held)


def _require_tasks(suite: str, tasks: str, max_images: int, held_out: bool) -> None:
    """Refuse now what `evaluate` would refuse after the first run."""
    if suite not in (*SUITES, NONE):
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, {NONE}, got {suite!r}")
    if suite == NONE and (tasks or max_images or held_out):
        raise ValueError(
            "--suite none measures nothing: leave out --tasks, --max-images and --held-out"
        )
    if tasks:
        select_tasks(SUITES[0], [name.strip() for name in tasks.split(",")])
    if max_images < 0:
        raise ValueError(f"--max-images must be 0 or more, got {max_images}")


def _begun_with(data: str, recipe: str, changes: Sequence[str]) -> Config:
    """The settings that every run begins with; refuses now the images that runs would refuse."""
    from compressive.data.sources import open_source
    from compressive.train.images import settings_for

    base = settings_for(data, recipe, changes=changes)
    open_source(data, with_data(base, data, *changes).data.split)
    return base


class _State:
    """sweep.json: what is swept, how far each run is, and the table."""

    def __init__(self, out: Path, about: dict[str, Any], jobs: list[Job]) -> None:
        self.out, self.about, self.jobs, self.runs = out, about, jobs, dict[str, str]()
        self._one = threading.Lock()
        path = out / SWEEP
        if not path.exists():
            if out.is_dir() and any(not path.name.endswith(PARTIAL) for path in out.iterdir()):
                raise ValueError(f"{out} is not empty and holds no sweep; choose another --out")
            out.mkdir(parents=True, exist_ok=True)
            return
        try:
            old = json.loads(path.read_text())
            before, self.runs = dict(old["about"]), dict(old["runs"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error!r}; choose another --out") from None
        for name, value in about.items():
            if before.get(name, False) != value:
                raise ValueError(
                    f"{out} holds a sweep with {name} {before.get(name, False)!r}, not {value!r}; "
                    "give the same to go on with it, or choose another --out"
                )

    @property
    def failed(self) -> set[str]:
        return {job.name for job in self.jobs if self.runs.get(job.name) == "failed"}

    def is_done(self, job: Job) -> bool:
        last = self.judged(job) / RESULTS
        if self.about["suite"] == NONE:
            last = self.out / job.name / ENCODER
        return self.runs.get(job.name) == "done" and last.is_file()

    def log(self, job: Job) -> Path:
        """What the commands of a run print; not beside the runs, whose names are given by `*`."""
        return self.out / "logs" / f"{job.name}.log"

    def judged(self, job: Job) -> Path:
        """Where `evaluate` puts its results."""
        return self.out / job.name / (HELD_OUT if self.about["held_out"] else EVALUATION)

    def note(self, job: Job, how: str) -> None:
        with self._one:
            self.runs[job.name] = how
            self.write()

    def write(self) -> list[Row]:
        """The file as it is now, the old one or the new one at any time; the table's lines."""
        done = {job.name for job in self.jobs if self.is_done(job)}
        found = rows(self.out, self.jobs, done, self.failed, held_out=self.about["held_out"])
        lines = [
            row._asdict() | {"figures": {k: v._asdict() for k, v in row.figures.items()}}
            for row in found
        ]
        content = {"about": self.about, "runs": self.runs, "table": lines}
        write_text(self.out / SWEEP, json.dumps(content, indent=1) + "\n")
        return found


class _Work:
    """The runs' processes, and how to stop them."""

    def __init__(self, state: _State, train: list[str], judge: list[str], display: Display) -> None:
        self.state, self.train, self.judge, self.display = state, train, judge, display
        self.stopping, self._begun = 0, 0
        self._running: set[subprocess.Popen[bytes]] = set()
        self._one = threading.RLock()  # a signal may come while one is being heard

    def do(self, at_once: int) -> None:
        """All jobs, some of them at once."""
        with ThreadPoolExecutor(at_once) as pool:
            for future in [pool.submit(self._run, job) for job in self.state.jobs]:
                future.result()

    def stop(self) -> None:
        """Pass a request on to the runs, which save themselves; the third ends them by force."""
        with self._one:
            self.stopping += 1
            for process in self._running:
                process.send_signal(signal.SIGINT if self.stopping < 3 else signal.SIGKILL)
        if self.stopping == 1:
            self.display.say("stopping: a run in progress saves itself; the same command goes on")

    def _run(self, job: Job) -> None:
        if self.stopping:
            return
        folder, log = self.state.out / job.name, self.state.log(job)
        with self._one:
            self._begun += 1
            place = f"{self._begun} of {len(self.state.jobs)}: {job.name}"
        if self.state.is_done(job):
            self.display.say(f"{place} was done before")
            return
        self.display.say(f"{place} ... (compressive watch {shlex.quote(str(folder))})")
        self.state.note(job, "running")
        changes = [word for change in job.changes for word in ("--set", change)]
        commands = [[*self.train, *changes, "--out", str(folder)]]
        if self.judge:
            place = ["--device", job.device, "--out", str(self.state.judged(job))]
            commands.append([*self.judge, *place, str(folder)])
        for words in commands:
            if code := self._call(words, log):
                self.state.note(job, "stopped" if self.stopping else "failed")
                if not self.stopping:
                    why = f"{words[0]} ended with {code}: {_last_line(log)}"
                    self.display.say(f"{job.name} failed, {why}; all of it is in {log}")
                return
        self.state.note(job, "done")

    def _call(self, words: list[str], log: Path) -> int:
        """Run one of our commands; its output goes to the end of the log."""
        command = [sys.executable, "-m", "compressive", *words]
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as lines:
            lines.write(f"$ {shlex.join(command)}\n".encode())
            lines.flush()
            with self._one:
                if self.stopping:
                    return _INTERRUPTED
                # A group of its own: a terminal would send Ctrl-C to it as well, and a run that
                # hears it twice does not save.
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines, process_group=0
                )
                self._running.add(process)
            code = process.wait()
        with self._one:
            self._running.discard(process)
        return code


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def summary_table(summary: Summary) -> Table:
    """One line for a setting: mean and deviation over its seeds, and what failed."""
    return table(str(summary.out), summary.rows)

"""Run units as tasks and actors of a Ray cluster; Ray decides where, and repeats lost units."""

import importlib
import logging
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from compressive.engine.choice import RAY, EngineChoice, host_and_port
from compressive.engine.local import Result, Unit, WorkerLost
from compressive.engine.ray_worker import Failure, run_unit, this_process

_RETRIES = 3  # repetitions of a unit whose process or machine was lost
_CONNECT_SECONDS = 5.0
_CLIENT_ATTEMPTS = 2
_REFRESH = 5.0  # seconds between two looks at the size of the cluster
_SENT_AHEAD = 2  # units that are sent per unit that can run, so that no process waits for the next
_INIT = {"logging_level": logging.ERROR, "log_to_driver": False}


class Reserved(NamedTuple):
    """What one unit reserves."""

    cpus: int
    gpus: float


@contextmanager
def open_ray(choice: EngineChoice, device: str = "cpu") -> Iterator["RayEngine"]:
    """Join the cluster of an address, or start one on this machine; leave or stop it at the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Do not hide GPUs from tasks that reserve none. Ray prints a warning if this is not set.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(f"Ray cannot be imported ({error}); install compressive[ray]") from None
    _connect(ray, choice.address)
    _silence()
    try:
        yield RayEngine(ray, choice, device)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    where = {"address": "local" if address == RAY else address}
    if ":" in address:
        host, port = host_and_port(address, "--engine")
        try:  # Ray itself would try for half a minute
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise _unreachable(address, error.strerror or str(error)) from None
    elif address == RAY:
        where |= {"include_dashboard": False}
    # Ray's client server failed once in tests because its own process exited at once.
    for attempt in range(_CLIENT_ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(**where, **_INIT)
            return
        except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
            with suppress(Exception):
                ray.shutdown()
            is_last = attempt == _CLIENT_ATTEMPTS - 1
            if is_last or "Initialization failure" not in str(error):
                raise _unreachable(address, str(error).strip().split("\n")[0]) from None


def _silence() -> None:
    """Do not print several lines for every lost process, which Ray repeats by itself."""
    with suppress(ImportError, AttributeError):  # not part of Ray's interface
        worker: Any = importlib.import_module("ray._private.worker")
        worker.print_to_stdstream = lambda *_, **__: None


def _unreachable(address: str, why: str) -> ValueError:
    if address == RAY:
        return ValueError(f"Ray cannot start a cluster on this machine: {why}")
    hint = "check the address; a cluster with token authentication needs RAY_AUTH_MODE=token"
    return ValueError(f"no Ray cluster answers at {address} ({why}); {hint}")


class RayEngine:
    """Send units to a Ray cluster, a bounded number at a time."""

    is_local: bool = False

    def __init__(self, ray: Any, choice: EngineChoice, device: str) -> None:
        self._ray = ray
        self.reserved: Reserved = self._reserve(choice, device)
        self.cores: int = self.reserved.cpus
        self._sender = this_process()
        self._room, self._looked = 0, -1e9

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _reserve(self, choice: EngineChoice, device: str) -> Reserved:
        """Return what a unit reserves; raise ValueError if no machine has it."""
        nodes = self._nodes()
        all_cpus, all_gpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("CPU", "GPU"))
        is_gpu = re.match("cuda|rocm|hip", device) or (device == "auto" and all_gpus > 0)
        gpus = (1.0 if is_gpu else 0.0) if choice.gpus is None else choice.gpus
        # A GPU needs its share of the cores for decoding.
        share = int(all_cpus * gpus / all_gpus) if all_gpus else 1
        reserved = Reserved(choice.cpus or max(1, share), gpus)
        if not sum(units_on_node(reserved, node) for node in nodes):
            most = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)), default={})
            raise ValueError(
                f"a task needs {reserved.cpus} cores and {gpus:g} GPUs, and the largest machine of "
                f"the cluster has {most.get('CPU', 0):g} and {most.get('GPU', 0):g}; set "
                "--cpus-per-task and --gpus-per-task"
            )
        return reserved

    def room(self) -> int:
        """Return how many units the cluster can run at the same time; machines may join."""
        if time.monotonic() - self._looked > _REFRESH:
            found = sum(units_on_node(self.reserved, node) for node in self._nodes())
            self._room, self._looked = max(1, found), time.monotonic()
        return self._room

    def _options(self, name: str) -> dict[str, Any]:
        return {"num_cpus": self.reserved.cpus, "num_gpus": self.reserved.gpus, "name": name}

    def submit(self, work: Callable[[Any], Any], unit: Any, name: str) -> Any:
        """Send a unit; return Ray's reference to its result."""
        task = self._ray.remote(run_unit).options(**self._options(name), max_retries=_RETRIES)
        return task.remote(work, unit, self._sender)

    def map(
        self,
        work: Callable[[Unit], Result],
        units: Iterable[Unit],
        *,
        name: str,
        keeps_model: bool = False,
    ) -> Iterator[tuple[int, Result]]:
        """Yield the number and the result of each unit as it ends."""
        # Ray ends the process of a GPU task after one call, to free the memory of the GPU.
        if keeps_model and self.reserved.gpus > 0:
            yield from self._map_actors(work, units, name)
            return
        numbered = enumerate(units)
        waiting: dict[Any, int] = {}
        try:
            while True:
                while len(waiting) < _SENT_AHEAD * self.room():
                    if (following := next(numbered, None)) is None:
                        break
                    waiting[self.submit(work, following[1], name)] = following[0]
                if not waiting:
                    return
                for ref in self._ray.wait(list(waiting), timeout=_REFRESH)[0]:
                    yield waiting.pop(ref), self.result(ref)
        finally:
            for ref in waiting:
                self.cancel(ref, force=True)

    def _map_actors(
        self, work: Callable[[Unit], Result], units: Iterable[Unit], name: str
    ) -> Iterator[tuple[int, Result]]:
        """Send units to actors, which are processes that keep their GPU and what they loaded."""
        ray, numbered = self._ray, enumerate(units)
        options = {**self._options(name), "max_restarts": -1, "max_task_retries": _RETRIES}
        del options["name"]  # of an actor, it must be unique
        kind = ray.remote(Holder).options(**options)
        actors = [kind.remote() for _ in range(self.room())]
        # Other users of the cluster may delay an actor: it gets a unit when it has started.
        waiting: dict[Any, tuple[Any, int]] = {each.ready.remote(): (each, -1) for each in actors}
        try:
            while waiting:
                for ref in ray.wait(list(waiting), timeout=_REFRESH)[0]:
                    actor, number = waiting.pop(ref)
                    result = self.result(ref)
                    if (following := next(numbered, None)) is not None:
                        ref = actor.run.remote(work, following[1], self._sender)
                        waiting[ref] = actor, following[0]
                    else:
                        ray.kill(actor)  # frees its share for one that restarts elsewhere
                        waiting = {ref: each for ref, each in waiting.items() if each[1] >= 0}
                    if number >= 0:
                        yield number, result
        finally:
            for actor in actors:
                self._try(partial(ray.kill, actor))

    def cancel(self, ref: Any, *, force: bool) -> None:
        """Interrupt a unit, or end its process."""
        self._try(lambda: self._ray.cancel(ref, force=force))

    def _try(self, action: Callable[[], object]) -> None:
        """Ignore errors: a unit may have ended, or the cluster is gone."""
        if self._ray.is_initialized():  # else Ray would start another cluster
            with suppress(Exception):
                action()

    def is_done(self, ref: Any, seconds: float) -> bool:
        """Wait up to some seconds; return whether a unit has ended."""
        return bool(self._ray.wait([ref], timeout=seconds)[0])

    def result(self, ref: Any) -> Any:
        """Return the result of a unit that has ended; raise its error."""
        errors = self._ray.exceptions
        try:
            found = self._ray.get(ref)
        except errors.TaskCancelledError:
            raise KeyboardInterrupt from None
        except errors.RayTaskError as error:
            raise RuntimeError(f"a task failed on the cluster: {error}") from None
        except errors.RayError as error:
            why = str(error).strip().split("\n")[0]
            hint = "its memory may be full; run the same command to resume"
            message = f"a task was lost {_RETRIES + 1} times with its process ({why}); {hint}"
            raise WorkerLost(message) from None
        if isinstance(found, Failure):
            raise (ValueError if found.is_value else OSError)(found.message)
        return found


class Holder:
    """An actor: a process that runs one unit after the other."""

    def ready(self) -> None:
        """Return when the process has started."""

    def run(self, *given: Any) -> Any:
        """Run a unit."""
        return run_unit(*given)


def units_on_node(reserved: Reserved, node: dict[str, float]) -> int:
    """Return how many units a machine can run at the same time."""
    counts = [node.get("CPU", 0) / reserved.cpus]
    if reserved.gpus:
        gpus = node.get("GPU", 0)
        each = int(1 / reserved.gpus + 1e-9)  # units on one GPU; 0: a unit has several
        counts.append(gpus * each if each else gpus / reserved.gpus)
    return int(min(counts) + 1e-9)

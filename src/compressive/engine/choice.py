"""Which engine runs the units of a command, and what a unit reserves; imports no engine."""

import os
import re
from importlib.util import find_spec
from typing import NamedTuple

LOCAL, RAY = "local", "ray"
_CLIENT = "ray://"


class EngineChoice(NamedTuple):
    """A checked choice of an engine."""

    address: str = LOCAL  # local, ray (a cluster on this machine), ray://HOST:PORT or HOST:PORT
    gpus: float | None = None  # of a unit; None: 1 if the device is a GPU
    cpus: int = 0  # of a unit; 0: chosen by the engine

    @property
    def is_local(self) -> bool:
        """Return whether units run in this process."""
        return self.address == LOCAL


def parse_engine(
    engine: str = LOCAL, gpus_per_task: float | None = None, cpus_per_task: int = 0
) -> EngineChoice:
    """Return the choice of three options; raise ValueError if they are wrong."""
    if engine == LOCAL:
        options = {"--gpus-per-task": gpus_per_task is not None, "--cpus-per-task": cpus_per_task}
        for option, is_given in options.items():
            if is_given:
                raise ValueError(f"{option} needs --engine {RAY}; the engine is {LOCAL}")
        return EngineChoice()
    if engine != RAY and not engine.startswith(_CLIENT):
        raise ValueError(f"--engine must be {LOCAL}, {RAY} or {_CLIENT}HOST:PORT, got {engine!r}")
    if engine.startswith(_CLIENT):
        host_and_port(engine, "--engine")
    _check_reserved(gpus_per_task or 0.0, cpus_per_task)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"--engine {RAY} starts its own processes; start it without torchrun")
    if find_spec("ray") is None:
        raise ValueError(f"--engine {RAY} needs Ray; install compressive[ray]")
    address = engine
    if engine == RAY and (named := os.environ.get("RAY_ADDRESS", "")):
        address = named
        if named not in ("auto", LOCAL):
            host_and_port(named, "RAY_ADDRESS")
    return EngineChoice(RAY if address == LOCAL else address, gpus_per_task, cpus_per_task)


def _check_reserved(gpus: float, cpus: int) -> None:
    # Ray divides a GPU between tasks, but gives a task whole GPUs if it needs more than one.
    if not 0 <= gpus < 2**31 or (gpus > 1 and gpus != int(gpus)):
        rule = "a fraction up to 1, or a whole number"
        raise ValueError(f"--gpus-per-task must be {rule}, got {gpus:g}")
    if not 0 <= cpus < 2**31:
        raise ValueError(f"--cpus-per-task must be 0 or more, got {cpus}")


def host_and_port(address: str, called: str) -> tuple[str, int]:
    """Return host and port of an address; raise ValueError if it has none."""
    found = re.fullmatch(r"(?:ray://)?\[?([\w.:-]+?)\]?:(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise ValueError(f"{called} must be {_CLIENT}HOST:PORT or HOST:PORT, got {address!r}")
    return found[1], int(found[2])

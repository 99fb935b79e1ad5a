"""Versions, devices, decoders, memory and extras of this machine, without private data."""

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import features

from compressive.platforms.accelerators import (
    ACCELERATORS,
    device_count,
    device_memory,
    device_name,
)
from compressive.platforms.float64 import float64_device
from compressive.platforms.memory import free_host_memory, total_host_memory
from compressive.rundir.folder import package_version

_PACKAGES = ("compressive", "torch", "torchvision", "timm", "numpy", "pillow", "pyarrow")
_PACKAGES += ("safetensors", "tensorboard")
_PILLOW = {"JPEG": "jpg", "PNG": "zlib", "WebP": "webp", "AVIF": "avif", "TIFF": "libtiff"}
_PILLOW |= {"JPEG 2000": "jpg_2000"}
OPTIONAL_DECODERS = {"torchcodec": "torchcodec", "HEIC": "pillow-heif"}  # format or name, package


class DeviceFacts(NamedTuple):
    """One device of torch."""

    name: str  # as in --device
    title: str
    total_memory: int | None  # bytes; None if it is not known
    free_memory: int | None
    capability: str
    has_float64: bool


def versions() -> dict[str, str]:
    """Return versions of Python, packages and the operating system."""
    found = {name: package_version(name) for name in _PACKAGES}
    found["torch"] = torch.__version__
    built = {"CUDA": torch.version.cuda, "ROCm": getattr(torch.version, "hip", None)}
    kinds = [f"{name} {version}" for name, version in built.items() if version]
    kinds += ["MPS"] if torch.backends.mps.is_built() else []
    found["torch built for"] = ", ".join(kinds) or "CPU"
    system = f"{platform.system()} {platform.release()} ({platform.machine()})"
    return {"python": platform.python_version(), **found, "system": system}


def devices() -> list[DeviceFacts]:
    """Return the CPU and all accelerators."""
    found = [_cpu()]
    for kind in ACCELERATORS:
        for i in range(device_count(kind)):
            device = torch.device(kind, i)
            memory, capability = device_memory(device), ""
            if kind == "cuda":
                capability = "compute {}.{}".format(*torch.cuda.get_device_capability(device))
            found.append(
                DeviceFacts(
                    name="mps" if kind == "mps" else str(device),
                    title=device_name(device),
                    total_memory=memory and memory.total,
                    free_memory=memory and memory.free,
                    capability=capability,
                    has_float64=float64_device(device) == device,
                )
            )
    return found


def _cpu() -> DeviceFacts:
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count() or 1
    cores = f"{usable} of {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    kind = torch.backends.cpu.get_cpu_capability()
    memory = total_host_memory(), free_host_memory()
    return DeviceFacts("cpu", _processor(), *memory, f"{cores}, {kind}", has_float64=True)


def _processor() -> str:
    """Return the model of the processor, or its architecture if the system does not tell."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def decoders() -> dict[str, str]:
    """Return what can decode images, with versions."""
    formats = [name for name, feature in _PILLOW.items() if features.check(feature)]
    found = {"torchvision": "JPEG, WebP", "Pillow": ", ".join(formats)}
    return found | {name: package_version(package) for name, package in OPTIONAL_DECODERS.items()}


def disks() -> dict[str, int]:
    """Return the free bytes of the current and the temporary folder."""
    places = {"current folder": ".", "temporary folder": tempfile.gettempdir()}
    return {name: shutil.disk_usage(place).free for name, place in places.items()}


def extras() -> dict[str, dict[str, str]]:
    """Return the packages of each extra, with their versions or "not installed"."""
    try:
        required = importlib.metadata.requires("compressive") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        required = []
    found: dict[str, dict[str, str]] = {}
    for line in required:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        package = re.match(r"[\w.-]+", line)
        if extra and package:
            found.setdefault(extra[1], {})[package[0]] = package_version(package[0])
    return found


def scrub(text: str, private: Sequence[str] = ()) -> str:
    """Return the first line of a message without folders, user, machine and `private` words."""
    line = text.strip().split("\n")[0]
    line = re.sub(r"(?:[A-Za-z]:)?[\\/](?:[^\s:;,'\"\\/]+[\\/])+", "", line)
    names = {*private, platform.node(), *(os.environ.get(n, "") for n in ("USER", "USERNAME"))}
    for name in sorted(filter(lambda name: len(name) > 2, names), key=len, reverse=True):
        line = line.replace(name, "...")
    return line[:200]


def collect() -> dict[str, Any]:
    """Return all facts, ready for JSON."""
    return {
        "versions": versions(),
        "devices": [facts._asdict() for facts in devices()],
        "decoders": decoders(),
        "disk": disks(),
        "extras": extras(),
    }

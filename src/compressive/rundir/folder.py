"""The folder of a run: its settings with where and by what it was made, and whether they fit."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from compressive.config import Config, Data, flat, from_dict
from compressive.rundir.files import CONFIG, PARTIAL, write_text
from compressive.rundir.lock import ensure_writable

# Settings that do not change what is learned: a run may go on with other values of these.
FREE = {
    "recipe",
    "data.source",
    "data.cache_on_device",
    "data.workers",
    "train.device",
    "train.save_every",
    "train.log_every",
    "train.tensorboard",
    "health.max_restarts",
    "health.spike_sigma",
    "health.collapse_std",
    "health.min_participation_ratio",
    "probe.every_epochs",
}


def open_folder(folder: Path, config: Config, *, resume: bool) -> bool:
    """Make the folder, or go on in it; whether there is a run to go on with.

    A folder that holds a run with other settings is refused: two runs in one folder would be
    neither.
    """
    ensure_writable(folder)
    path = folder / CONFIG
    if not path.exists():
        if folder.is_dir() and any(not path.name.endswith(PARTIAL) for path in folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no run; choose another --out")
        return False
    if not resume:
        raise ValueError(f"{folder} already holds a run; choose another --out, or delete it")
    old, new = flat(read_config(folder)), flat(config)
    changed = [name for name in old if old[name] != new[name] and name not in FREE]
    new["data.source"] = _place(config)
    if changed and new["data.source"] != old["data.source"]:
        changed = ["data.source", *changed]  # from which others may follow
    if changed:
        words = ", ".join(f"{name} = {old[name]}, not {new[name]}" for name in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ValueError(
            f"{folder} holds a run with {words}{more}; give the same settings to go on with it, "
            "choose another --out, or delete it"
        )
    return True


def write_config(folder: Path, config: Config, device: torch.device) -> None:
    """config.json: every setting, and under "about" where, when and by what it was made."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {**asdict(config), "about": _about(device)}
    settings["data"]["source"] = _place(config)
    write_text(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def _place(config: Config) -> str:
    """Where the images are, from wherever that is read."""
    source = config.data.source
    path = Path(source).expanduser()
    return os.path.abspath(path) if source != Data().source and path.exists() else source


def read_config(folder: Path) -> Config:
    """The settings of the run in this folder."""
    path = Path(folder) / CONFIG
    try:
        settings = json.loads(path.read_text())
        if isinstance(settings, dict):
            settings.pop("about", None)
        return from_dict(settings)
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is no folder of a run: it has no {CONFIG}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    except ValueError as error:  # a setting of another version, or a value that somebody wrote
        raise ValueError(f"{path}: {error}") from None


def command() -> str:
    """What was called: this program, however it was started, or another one."""
    called = Path(sys.argv[0])
    is_ours = called.name == "compressive" or called == Path(__file__).parents[1] / "__main__.py"
    return shlex.join(["compressive" if is_ours else sys.argv[0], *sys.argv[1:]])


def _about(device: torch.device) -> dict[str, Any]:
    packages = ("compressive", "torch", "torchvision", "timm", "numpy")
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in packages} | {"torch": torch.__version__},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # a source tree on the path


def _commit() -> str:
    """The commit of our source tree, with a + where it has changes; nothing once installed."""
    here = str(Path(__file__).parents[1])

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", here, *words], capture_output=True, text=True, timeout=5
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + "+" if commit and git("status", "--porcelain", "--", here) else commit
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _processor() -> str:
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"

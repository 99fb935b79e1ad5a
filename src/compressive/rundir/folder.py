"""config.json: write and read the settings of a run, and check them before it is resumed."""

import importlib.metadata
import json
import platform
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressive.config import Config, Health, flat, from_dict
from compressive.rundir.files import CONFIG, FINETUNE, PARTIAL, SEARCH, write_text
from compressive.rundir.lock import ensure_writable
from compressive.rundir.places import absolute_places, split_places
from compressive.rundir.versions import FORMAT_KEY, FORMAT_VERSIONS, UnsupportedFormat, check_format

if TYPE_CHECKING:
    import torch

# Settings that do not change what is learned: a run may be resumed with other values.
FREE = {"recipe", "data.source", "data.cache_on_device", "data.workers", "probe.every_epochs"}
FREE |= {"train.device", "train.save_every", "train.log_every", "train.tensorboard"}
FREE |= {"train.track"}
FREE |= {f"health.{each.name}" for each in fields(Health)}


class OtherSettings(ValueError):
    """Raised if a run has other settings, none of them about its data."""


def open_folder(folder: Path, config: Config, *, resume: bool, given: Sequence[str] = ()) -> bool:
    """Return whether a folder holds a run to resume; raise ValueError if it has other settings.

    `given` names the settings that the user chose. The message leaves out settings that were
    derived from them, now and when the run was started.
    """
    ensure_writable(folder)
    path = folder / CONFIG
    if not path.exists():
        own = {FINETUNE, SEARCH}  # fine-tuning writes them before the run
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if any(name not in own and not name.endswith(PARTIAL) for name in names):
            raise ValueError(f"{folder} is not empty and holds no run; choose another --out")
        return False
    if not resume:
        raise ValueError(f"{folder} already holds a run; choose another --out")
    old, new = flat(read_config(folder)), flat(config)
    changed = [name for name in old if old[name] != new[name] and name not in FREE]
    new["data.source"] = absolute_places(config.data.source)
    if changed and new["data.source"] != old["data.source"]:
        changed = ["data.source", *changed]  # the other changes may follow from it
    if changed:
        chosen = {*given, *recorded_given(folder)}
        chosen |= {"data.source"} if chosen else set()
        named = [name for name in changed if name in chosen]
        shown = named or changed[:3]
        words = ", ".join(f"{name} = {old[name]}, not {new[name]}" for name in shown)
        more = "" if named or len(changed) < 4 else f" and {len(changed) - 3} more"
        hint = _continue_command(folder, config, shown, old) or "choose another --out"
        is_data = any(name.startswith("data.") for name in changed)
        kind = ValueError if is_data else OtherSettings
        raise kind(
            f"{folder} holds a run with {words}{more}; give the same settings to resume it, or "
            f"{hint}"
        )
    return True


def _continue_command(
    folder: Path, config: Config, changed: Sequence[str], old: Mapping[str, Any]
) -> str:
    """Return the command that continues a run if only its length was raised, else ""."""
    length = {"train.epochs": config.train.epochs, "train.steps": config.train.steps}
    name = changed[0]
    if len(changed) > 1 or name not in length or not 0 < old[name] < length[name]:
        return ""
    option = f"--{name.partition('.')[2]}"
    places = split_places(config.data.source)
    words = ["compressive", "pretrain", *places, option, str(length[name])]
    words += ["--continue-from", str(folder), "--out", f"{folder}-{length[name]}"]
    return f"start a longer run from it: {shlex.join(words)}"


def write_config(
    folder: Path, config: Config, device: "torch.device", given: Sequence[str] = ()
) -> None:
    """Write config.json: every setting, and under "about" time, command, device and versions.

    "about" also has the names of the settings that were `given` rather than derived.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {FORMAT_KEY: FORMAT_VERSIONS[CONFIG], **asdict(config)}
    settings["data"]["source"] = absolute_places(config.data.source)
    # The id has 48 bits, which a float64 represents exactly (see train.resume).
    run_id = secrets.token_hex(6)
    settings["about"] = {"run_id": run_id, "given": sorted(given), **_provenance(device)}
    write_text(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def read_run_id(folder: Path) -> str:
    """Return the id of the run in a folder; "" for a run from before ids were introduced."""
    found = _read_about(folder).get("run_id")
    return found if isinstance(found, str) and re.fullmatch("[0-9a-f]{12}", found) else ""


def check_run_id(place: str | Path, path: Path, metadata: Mapping[str, str]) -> None:
    """Raise ValueError if `place` is the folder of another run than the one that wrote `path`."""
    ids = {metadata.get("run_id", ""), read_run_id(path.parent)} - {""}
    if len(ids) > 1 and Path(place).is_dir():
        hint = f"run the training command again to write it, or give {path} itself"
        raise ValueError(f"{path} is of another run than {place}; {hint}")


def recorded_given(folder: Path) -> list[str]:
    """Return the names of the settings that the user of a run gave."""
    found = _read_about(folder).get("given")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _read_about(folder: Path) -> dict[str, Any]:
    """Return what config.json says under "about", or {} if that cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return dict(json.loads((folder / CONFIG).read_bytes())["about"])
    return {}


def read_config(folder: Path) -> Config:
    """Return the settings of the run in a folder."""
    path = Path(folder) / CONFIG
    try:
        settings = json.loads(path.read_text())
        if isinstance(settings, dict):
            check_format(path, CONFIG, settings.pop(FORMAT_KEY, None))
            settings.pop("about", None)
        return from_dict(settings)
    except UnsupportedFormat:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} is not a run folder: it has no {CONFIG}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    except ValueError as error:  # an unknown setting or an invalid value
        raise ValueError(f"{path}: {error}") from None


def command() -> str:
    """Return the command line, with `compressive` for every way of starting this program."""
    called = Path(sys.argv[0])
    is_ours = called.stem == "compressive" or called == Path(__file__).parents[1] / "__main__.py"
    return shlex.join(["compressive" if is_ours else sys.argv[0], *sys.argv[1:]])


def _provenance(device: "torch.device") -> dict[str, Any]:
    import torch  # import here: it takes seconds, and readers do not need it

    from compressive.platforms.accelerators import device_name

    packages = ("compressive", "torch", "torchvision", "timm", "numpy")
    processor = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "commit": _commit(),
        "device": device_name(device) or processor,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: package_version(name) for name in packages}
        | {"torch": torch.__version__},
    }


def package_version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"  # run from a source tree


def _commit() -> str:
    """Return the commit of the source tree, with a + if it has changes; "" if installed."""
    here = str(Path(__file__).parents[1])

    def git(*words: str) -> str:
        command = ["git", "-C", here, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + "+" if commit and git("status", "--porcelain", "--", here) else commit
    except (OSError, subprocess.TimeoutExpired):
        return ""

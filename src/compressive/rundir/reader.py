"""Read run folders without torch, whether complete, unfinished or damaged."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from compressive.config import flat, total_steps
from compressive.rundir import files
from compressive.rundir.fingerprint import file_fingerprint
from compressive.rundir.gallery_file import read_gallery
from compressive.rundir.metrics_log import STOPPED, read_metrics
from compressive.rundir.predictions_file import Predictions, read_predictions
from compressive.rundir.records import Record, ResultsFile, finite_number, read_results
from compressive.rundir.versions import FORMAT_KEY, UnsupportedFormat, check_format


@dataclass(frozen=True, kw_only=True)
class TrainingFiles:
    """Settings and metrics of a run."""

    path: Path
    settings: Mapping[str, Any]  # by dotted name
    about: Mapping[str, Any]  # "about" of config.json: how the run was started
    metrics: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    total: int | None  # steps of the whole run; None until a checkpoint states the image count

    @property
    def step(self) -> int:
        """Return the last step in the metrics."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def is_stopped(self) -> bool:
        """Return whether the run stopped early, by request or after too many failures."""
        return bool(self.metrics) and STOPPED in self.metrics[-1]

    @property
    def is_over(self) -> bool | None:
        """Return whether training is complete, or None if its length is unknown."""
        return None if self.total is None else self.step >= self.total and not self.is_stopped

    @property
    def health(self) -> str | None:
        """Return the last health status."""
        states = (line.get("health") for line in reversed(self.metrics))
        return next((state for state in states if isinstance(state, str)), None)

    def series(self, *keys: str) -> list[tuple[float, ...]]:
        """Return step and values of the lines that have finite numbers for all keys."""
        names = ("step", *keys)
        rows = [tuple(finite_number(line.get(name)) for name in names) for line in self.metrics]
        return [tuple(v for v in row if v is not None) for row in rows if None not in row]

    def last(self, key: str) -> float | None:
        """Return the last finite number for a key."""
        found = self.series(key)
        return found[-1][1] if found else None

    def unfinished(self) -> str:
        """Return a message if training is incomplete, else ""."""
        # Use the step of the last checkpoint, which has the weights: metrics may be ahead of it.
        names = (path.name for path in (self.path / files.CHECKPOINTS).glob("step_*"))
        saved = [int(match[1]) for match in map(files.STEP.fullmatch, names) if match]
        step = max(saved) if saved else self.step
        if self.total is None or step >= self.total:
            return ""
        return f"training is not finished: step {step:,} of {self.total:,}"


@dataclass(frozen=True, kw_only=True)
class RunFolder(TrainingFiles):
    """Files of a run, and what is missing or damaged among them."""

    name: str
    records: Sequence[Record]  # only those with a finite value
    skipped: Sequence[str]
    evaluated: Mapping[str, Any]  # "about" of results.json
    gallery: Mapping[str, np.ndarray]
    gallery_metadata: Mapping[str, str]
    predictions: Mapping[str, Predictions]  # by task
    missing: Sequence[str]

    @property
    def classes(self) -> list[str]:
        """Return the class names of the gallery, if it has any."""
        try:
            names = json.loads(self.gallery_metadata.get("classes") or "[]")
        except (ValueError, RecursionError):
            return []
        return [str(name) for name in names] if isinstance(names, list) else []


def read_runs(paths: Sequence[Path], *, held_out: bool = False) -> list[RunFolder]:
    """Return runs in the order given, each named by the shortest unique end of its path."""
    if not paths:
        raise ValueError("no run to report; name one or more run folders")
    folders = [Path(path).resolve() for path in paths]
    if len(set(folders)) < len(folders):
        twice = next(f for f in folders if folders.count(f) > 1)
        raise ValueError(f"{twice} is named twice; name each run once")
    named = zip(paths, folders, strict=True)
    return [_read_run(Path(given), _unique_name(path, folders), held_out) for given, path in named]


def read_training(run: Path, missing: list[str] | None = None) -> TrainingFiles:
    """Return settings and metrics of a run, and list in `missing` what could not be read."""
    missing = [] if missing is None else missing
    settings = _read_config(run / files.CONFIG, missing)
    about = settings.pop("about", None)
    by_name = flat(settings)
    return TrainingFiles(
        path=run,
        settings=by_name,
        about=about if isinstance(about, dict) else {},
        metrics=_read_metrics(run / files.METRICS, missing),
        total=_total(run, by_name),
    )


def results_of(run: Path, *, held_out: bool = False) -> Path:
    """Return the folder of a run's results: on test images, else (or with `held_out`) held-out."""
    # If there is no such folder but a results.json in `run`, return `run`.
    kinds = (files.HELD_OUT,) if held_out else (files.EVALUATION, files.HELD_OUT)
    there = [run / kind for kind in kinds if (run / kind).is_dir()]
    return there[0] if there else run if (run / files.RESULTS).is_file() else run / kinds[0]


def of_other_weights(run: Path, about: Mapping[str, Any]) -> str:
    """Return a message if results with this "about" are not of the current encoder, else ""."""
    evaluated, path = about.get("weights"), run / files.ENCODER
    if not evaluated or not path.is_file():
        return ""
    with suppress(SafetensorError):
        if file_fingerprint(path) == evaluated:
            return ""
    return f"results.json: of other weights than those in {path.name}; evaluate the run again"


def unfinished(run: Path) -> str:
    """Return a message if the training of a run is incomplete, else ""."""
    return read_training(run).unfinished()


def _unique_name(path: Path, others: Sequence[Path]) -> str:
    for length in range(1, len(path.parts)):
        end = path.parts[-length:]
        if sum(other.parts[-length:] == end for other in others) == 1:
            return "/".join(end)
    return str(path)


def _read_run(path: Path, name: str, held_out: bool) -> RunFolder:
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; give the folder of a run")
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give the folder of a run")
    inside = results_of(path, held_out=held_out)
    needed = path / files.CONFIG, path / files.METRICS, inside / files.RESULTS
    if not any(file.is_file() for file in needed):
        none = "it has none of config.json, metrics.jsonl and evaluation/results.json"
        hint = "give a folder that `compressive pretrain` wrote"
        raise ValueError(f"{path} is no run: {none}; {hint}")
    missing: list[str] = []
    if inside == path:  # results without a run
        training = TrainingFiles(path=path, settings={}, about={}, metrics=[], total=None)
    else:
        training = read_training(path, missing)
    has_encoder = (path / files.ENCODER).is_file()
    if so_far := training.unfinished():
        missing.append(so_far)
    elif inside != path and not has_encoder:
        missing.append(f"{files.ENCODER}: missing")
    is_trained = has_encoder and not so_far
    hint = f"; `compressive evaluate {path}` makes it" if is_trained else ""
    results = _read_results(inside / files.RESULTS, missing, hint)
    gallery = read_gallery(inside / "gallery.safetensors", missing)
    if other := of_other_weights(path, results.about):
        missing.append(other)
    return RunFolder(
        **vars(training),
        name=name,
        records=results.records,
        skipped=results.skipped,
        evaluated=results.about,
        gallery=gallery.arrays,
        gallery_metadata=gallery.metadata,
        predictions=_matching(read_predictions(inside, missing), results.records),
        missing=missing,
    )


def _matching(
    found: Mapping[str, Predictions], records: Sequence[Record]
) -> dict[str, Predictions]:
    """Return predictions for the images of the records; others are of an earlier evaluation."""
    known = {(r.task, r.dataset, r.images) for r in records if r.metric == "top-1"}
    return {task: p for task, p in found.items() if (task, p.dataset, p.images) in known}


def _total(run: Path, settings: Mapping[str, Any]) -> int | None:
    """Return the steps of the whole run, or None if unknown."""
    steps, epochs, batch = (settings.get(f"train.{k}") for k in ("steps", "epochs", "batch_size"))
    if isinstance(steps, int) and steps > 0:
        return steps
    if not isinstance(epochs, int) or not isinstance(batch, int) or epochs < 0 or batch < 1:
        return None
    count = _image_count(run / files.CHECKPOINTS)
    return total_steps(count, epochs, batch) if count else None


def _image_count(checkpoints: Path) -> int | None:
    """Return the number of training images from the header of a checkpoint."""
    for path in sorted(checkpoints.glob("step_*.safetensors"), reverse=True):
        try:
            with safe_open(path, "numpy") as file:
                return int(dict(json.loads(file.metadata()["state"])["dict"])["images"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            continue  # deleted in the meantime, or damaged
    return None


def _read_config(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        missing.append(f"{path.name}: missing")
        return {}
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError):  # not JSON, or not text
        content = None
    if not isinstance(content, dict):
        missing.append(f"{path.name}: damaged, or still being written")
        return {}
    check_format(path, files.CONFIG, content.pop(FORMAT_KEY, None))
    return content


def _read_metrics(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        missing.append(f"{path.name}: missing, so no training curves")
        return []
    lines, damaged = read_metrics(path)
    if damaged:
        missing.append(f"{path.name}: {damaged} damaged or unfinished lines left out")
    elif not lines:
        missing.append(f"{path.name}: no step written yet")
    return lines


def _read_results(path: Path, missing: list[str], hint: str) -> ResultsFile:
    """Return results without records that have no finite value."""
    try:
        found, damaged = read_results(path)
    except UnsupportedFormat:
        raise
    except FileNotFoundError:
        missing.append(f"{path.name}: missing{hint}")
        return ResultsFile("")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "damaged, or still being written"
        missing.append(f"{path.name}: {why}")
        return ResultsFile("")
    finite = [
        replace(r, value=value, low=finite_number(r.low), high=finite_number(r.high))
        for r in found.records
        if (value := finite_number(r.value)) is not None
    ]
    if damaged := damaged + len(found.records) - len(finite):
        missing.append(f"{path.name}: {damaged} records without a finite number left out")
    return replace(found, records=finite)

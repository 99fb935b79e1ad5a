"""What the folder of a run holds so far, whole or not, read without torch.

Longer than 300 lines, as every file of a run may be missing, damaged or half-written.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from compressive.rundir.files import (
    CHECKPOINTS,
    CONFIG,
    ENCODER,
    EVALUATION,
    HELD_OUT,
    METRICS,
    RESULTS,
    STEP,
)
from compressive.rundir.fingerprint import file_fingerprint

_GALLERY = {  # array of the gallery: its axes, kind of number
    "views": (5, "u"),
    "query": (4, "u"),
    "neighbors": (5, "u"),
    "query_label": (1, "i"),
    "neighbor_label": (2, "i"),
    "map": (2, "f"),
    "map_label": (1, "i"),
}


@dataclass(frozen=True)
class Figure:
    """One number of an evaluation."""

    task: str
    dataset: str
    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    of: str = ""  # which images: numbers of other images cannot be compared
    command: str = ""
    protocol: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """The files of a run, and what is not among them."""

    path: Path
    name: str
    settings: Mapping[str, Any]  # dotted name of a setting: its value
    about: Mapping[str, Any]
    journal: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    figures: Sequence[Figure]
    skipped: Sequence[str]
    evaluated: Mapping[str, Any]  # what the evaluation says of itself
    gallery: Mapping[str, np.ndarray]
    gallery_words: Mapping[str, str]
    missing: Sequence[str]
    total: int | None = None  # steps that it was to make; none where nothing tells

    @property
    def is_over(self) -> bool | None:
        """Whether training came to its end; none where nothing tells how long it was to be."""
        if self.total is None:
            return None
        last = self.journal[-1] if self.journal else {"step": 0}
        return last["step"] >= self.total and "stopped" not in last

    @property
    def health(self) -> str | None:
        """The last verdict of the monitor."""
        verdicts = [line["health"] for line in self.journal if isinstance(line.get("health"), str)]
        return verdicts[-1] if verdicts else None

    @property
    def classes(self) -> list[str]:
        """Names of the classes of the gallery; none where there are none."""
        try:
            names = json.loads(self.gallery_words.get("classes") or "[]")
        except json.JSONDecodeError:
            return []
        return [str(name) for name in names] if isinstance(names, list) else []

    def series(self, *keys: str) -> list[tuple[float, ...]]:
        """Step and values of the lines that have finite numbers under all these keys."""
        rows = [tuple(number(line.get(key)) for key in ("step", *keys)) for line in self.journal]
        return [tuple(v for v in row if v is not None) for row in rows if None not in row]

    def last(self, key: str) -> float | None:
        """The last finite number under this key."""
        found = self.series(key)
        return found[-1][1] if found else None


def read_runs(paths: Sequence[Path], *, held_out: bool = False) -> list[Run]:
    """Runs in the order given, each under the shortest end of its path that no other has."""
    if not paths:
        raise ValueError("no run to report; name one or more run folders")
    folders = [Path(path).resolve() for path in paths]
    if len(set(folders)) < len(folders):
        twice = next(f for f in folders if folders.count(f) > 1)
        raise ValueError(f"{twice} is named twice; name each run once")
    named = zip(paths, folders, strict=True)
    return [_read(given, _name(path, folders), held_out) for given, path in named]


def results_of(run: Path, *, held_out: bool = False) -> Path:
    """The folder with a run's results: on test images, else on held-out ones; or these alone.

    Results that were written elsewhere are a folder of their own.
    """
    kinds = (HELD_OUT,) if held_out else (EVALUATION, HELD_OUT)
    there = [run / kind for kind in kinds if (run / kind).is_dir()]
    return there[0] if there else run if (run / RESULTS).is_file() else run / kinds[0]


def of_other_weights(run: Path, about: object) -> str:
    """A line where these results are not of the encoder that the run has now; else nothing."""
    evaluated = about.get("weights") if isinstance(about, dict) else None
    path = run / ENCODER
    if not evaluated or not path.is_file():
        return ""
    with suppress(SafetensorError):
        if file_fingerprint(path) == evaluated:
            return ""
    return f"results.json: of other weights than {path.name} has now; evaluate the run again"


def unfinished(run: Path) -> str:
    """A line where the training of a run has not come to its end; else nothing."""
    lines = _journal(run / METRICS, [])
    return _so_far(run, lines, total_steps(run, _json(run / CONFIG, [])))


def _so_far(run: Path, journal: Sequence[Mapping[str, Any]], total: int | None) -> str:
    """Of its weights, which are those of the last checkpoint: the journal may be ahead of them."""
    found = map(STEP.fullmatch, (path.name for path in (run / CHECKPOINTS).glob("step_*")))
    saved = [int(match[1]) for match in found if match]
    step = max(saved) if saved else journal[-1]["step"] if journal else 0
    if total is None or step >= total:
        return ""
    return f"training has not come to its end: step {step:,} of {total:,}"


def number(value: object) -> float | None:
    """A finite number, or none; what cannot be subtracted within floats is none either."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    found = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _name(path: Path, others: Sequence[Path]) -> str:
    for length in range(1, len(path.parts)):
        end = path.parts[-length:]
        if sum(other.parts[-length:] == end for other in others) == 1:
            return "/".join(end)
    return str(path)


def _read(given: Path, name: str, held_out: bool) -> Run:
    path = Path(given)
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}; give the folder of a run")
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give the folder of a run")
    inside = results_of(path, held_out=held_out)
    marks = [path / CONFIG, path / METRICS, inside / RESULTS]
    if not any(mark.is_file() for mark in marks):
        raise ValueError(
            f"{path} is no run: it has none of config.json, metrics.jsonl and "
            "evaluation/results.json; give a folder that `compressive pretrain` wrote"
        )
    missing: list[str] = []
    settings = _json(marks[0], missing) if inside != path else {}
    about = settings.pop("about", None)
    lines = _journal(marks[1], missing) if inside != path else []
    total = total_steps(path, settings)
    has_encoder = (path / ENCODER).is_file()
    so_far = _so_far(path, lines, total)
    if so_far:
        missing.append(so_far)
    elif inside != path and not has_encoder:
        missing.append(f"{ENCODER}: not there")
    is_trained = has_encoder and not so_far
    hint = f"; `compressive evaluate {path}` makes it" if is_trained else ""
    results = _json(marks[2], missing, hint)
    gallery, words = _gallery(inside / "gallery.safetensors", missing)
    skipped, evaluated = results.get("skipped"), results.get("about")
    if older := of_other_weights(path, evaluated):
        missing.append(older)
    return Run(
        path=path,
        name=name,
        settings=flat(settings),
        about=about if isinstance(about, dict) else {},
        journal=lines,
        figures=_figures(results.get("records"), missing),
        skipped=[str(text) for text in skipped] if isinstance(skipped, list) else [],
        evaluated=evaluated if isinstance(evaluated, dict) else {},
        gallery=gallery,
        gallery_words=words,
        missing=missing,
        total=total,
    )


def total_steps(run: Path, settings: Mapping[str, Any]) -> int | None:
    """Steps that a run is to make, as far as its files tell."""
    train = settings.get("train")
    train = train if isinstance(train, dict) else {}
    steps, epochs, batch = (train.get(name) for name in ("steps", "epochs", "batch_size"))
    if isinstance(steps, int) and steps > 0:
        return steps
    count = _images(run / "checkpoints")
    if count is None or not isinstance(epochs, int) or not isinstance(batch, int) or batch < 1:
        return None
    return count * epochs // batch + 1  # as optim.total_steps


def _images(checkpoints: Path) -> int | None:
    """How many images the run has, as the header of its checkpoints tells."""
    for path in sorted(checkpoints.glob("step_*.safetensors"), reverse=True):
        try:
            with safe_open(path, "numpy") as file:
                return int(dict(json.loads(file.metadata()["state"])["dict"])["images"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            continue  # removed in between, damaged, or of an older version
    return None


def _json(path: Path, missing: list[str], hint: str = "") -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        missing.append(f"{path.name}: not there{hint}")
        return {}
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError):  # not JSON, or not text
        content = None
    if not isinstance(content, dict):
        missing.append(f"{path.name}: damaged, or still being written")
        return {}
    return content


def journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a metrics.jsonl, and how many others: the last may be half written."""
    lines, damaged = [], 0
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # not JSON, or not text
            line = None
        step = line.get("step") if isinstance(line, dict) else None
        if isinstance(line, dict) and isinstance(step, int) and number(step) is not None:
            lines.append(line)
        else:
            damaged += bool(text.strip())
    return lines, damaged


def _journal(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        missing.append(f"{path.name}: not there, so no training curves")
        return []
    lines, damaged = journal(path)
    if damaged:
        missing.append(f"{path.name}: {damaged} damaged or unfinished lines left out")
    elif not lines:
        missing.append(f"{path.name}: no step written yet")
    return lines


def _figures(records: object, missing: list[str]) -> list[Figure]:
    found, damaged = [], 0
    for record in records if isinstance(records, list) else []:
        kept = record if isinstance(record, dict) else {}
        names = [kept.get(key) for key in ("task", "dataset", "metric")]
        value = number(kept.get("value"))
        if value is None or not all(isinstance(name, str) for name in names):
            damaged += 1
            continue
        low, high, n = (number(kept.get(key)) for key in ("low", "high", "n"))
        protocol = kept.get("protocol")
        found.append(
            Figure(
                *(str(name) for name in names),
                value=value,
                low=low,
                high=high,
                n=None if n is None else int(n),
                of=str(kept.get("of") or kept.get("images") or ""),
                command=str(kept.get("command") or ""),
                protocol=protocol if isinstance(protocol, dict) else {},
            )
        )
    if damaged:
        missing.append(f"results.json: {damaged} records without a finite number left out")
    return found


def _gallery(path: Path, missing: list[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    if not path.is_file():
        missing.append(
            f"{path.name}: not there, so no views, neighbors and map; "
            "`compressive evaluate RUN --tasks gallery` makes it"
        )
        return {}, {}
    try:
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if name in _GALLERY]  # noqa: SIM118
            arrays = {name: file.get_tensor(name) for name in names}
            words = dict(file.metadata() or {})
    except (SafetensorError, OSError, TypeError, ValueError):
        missing.append(f"{path.name}: damaged, or still being written")
        return {}, {}
    fits = {n: (a.ndim, a.dtype.kind) == _GALLERY[n] and a.size > 0 for n, a in arrays.items()}
    if not all(fits.values()):
        odd = ", ".join(name for name in sorted(fits) if not fits[name])
        missing.append(f"{path.name}: {odd} of another shape or kind, left out")
    return {name: array for name, array in arrays.items() if fits[name]}, words

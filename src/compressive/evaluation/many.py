"""Evaluate one encoder or several, each as a unit of an engine."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from compressive.engine.local import Engine
from compressive.evaluation.results import Results
from compressive.evaluation.suite import evaluate
from compressive.progress import Display
from compressive.rundir.files import RESULTS
from compressive.storage.address import is_remote


class EvaluationUnit(NamedTuple):
    """An encoder, the folder of its results, and the options of `evaluate`."""

    encoder: str
    out: str | None
    options: dict[str, Any]
    is_quiet: bool = False


class Evaluated(NamedTuple):
    """The results of an encoder and their folder, or the reason why there are none."""

    results: Results | None
    folder: Path
    error: str = ""


def output_folders(encoders: Sequence[str], out: str | None) -> list[str | None]:
    """Return the folder of each encoder's results: OUT, or OUT/NAME if there are several."""
    if len({os.path.realpath(name) for name in encoders}) < len(encoders):
        raise ValueError("an encoder is given twice; give each once")
    if out is None or len(encoders) == 1:
        return [out] * len(encoders)
    names = [os.path.basename(os.path.normpath(each)) for each in encoders]
    for i, each in enumerate(encoders):
        if names.count(os.path.basename(os.path.normpath(each))) > 1:
            names[i] += f"-{hashlib.blake2b(each.encode(), digest_size=4).hexdigest()}"
    return [f"{out.rstrip('/')}/{name}" for name in names]


def evaluate_many(
    encoders: Sequence[str],
    engine: Engine,
    *,
    out: str | None = None,
    display: Display | None = None,
    **options: Any,
) -> Iterator[tuple[str, Evaluated]]:
    """Yield the results of each encoder, in order; an error of one does not end the others."""
    count = len(encoders)
    units = [
        EvaluationUnit(encoder, folder, options, is_quiet=not engine.is_local)
        for encoder, folder in zip(encoders, output_folders(encoders, out), strict=True)
    ]
    if engine.is_local:
        for number, found in engine.map(evaluate_unit, units, name="evaluate"):
            yield encoders[number], found
        return
    done: dict[int, Evaluated] = {}
    with display or Display() as shown:
        shown.progress("evaluating", 0, count, {"": f"0 of {count} encoders"})
        for number, found in engine.map(evaluate_unit, units, name="evaluate"):
            done[number] = found
            words = {"": f"{len(done)} of {count} encoders"}
            shown.progress("evaluating", len(done), count, words)
    for number in range(count):
        yield encoders[number], done[number]


def evaluate_unit(unit: EvaluationUnit) -> Evaluated:
    """Evaluate an encoder; return its results, or its error as one line."""
    display = Display(quiet=True) if unit.is_quiet else None
    try:
        with _results_folder(unit.out, Display(quiet=unit.is_quiet).say) as local:
            results, folder = evaluate(unit.encoder, out=local, display=display, **unit.options)
            return Evaluated(results, folder)
    except ValueError as error:
        return Evaluated(None, Path(), str(error))
    except OSError as error:
        text = (error.filename is None and error.strerror) or str(error)
        return Evaluated(None, Path(), text)


@contextmanager
def _results_folder(out: str | None, say: Callable[[str], None]) -> Iterator[str | Path | None]:
    """Yield the folder of the results; if it is on storage, a local one that is mirrored."""
    if out is None or not is_remote(out):
        yield out
        return
    from compressive.rundir.stored_output import mirrored_folder

    def is_ahead(local: Path, _: object, objects: Mapping[str, object]) -> bool:
        return RESULTS not in objects and (local / RESULTS).exists()

    with mirrored_folder(out, say, first=(RESULTS,), is_ahead=is_ahead) as local:
        yield local

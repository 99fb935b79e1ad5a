"""Collect the numbers of an evaluation with confidence intervals, and write and read them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from jaxtyping import Bool, Float
from safetensors.numpy import save as serialize

from compressive.metric_info import ACCURACIES
from compressive.rundir.checksum import CHECKSUM_KEY, file_checksum
from compressive.rundir.files import RESULTS, write_files
from compressive.rundir.intervals import mean_part, t_interval, wilson_interval
from compressive.rundir.records import Record, ResultsFile, read_results

VALUES = "values.safetensors"


@dataclass(kw_only=True, eq=False)
class Results(ResultsFile):
    """Records of an evaluation, the values per image behind them, and what was skipped."""

    seed: int = 0
    command: str = ""
    set: str = ""  # name of the dataset that is evaluated
    of: str = ""  # fingerprint of its content
    values: dict[str, np.ndarray] = field(default_factory=dict)  # key of a record: value per image

    def __repr__(self) -> str:
        top = [record for record in self.records if record.metric == "top-1"][:3]
        shown = "".join(f", {each.task} {100 * each.value:.1f} %" for each in top)
        where = f" on {self.set}" if self.set else ""
        return f"<Results of {self.run}: {len(self.records)} numbers{where}{shown}>"

    @property
    def notes(self) -> list[str]:
        """Notes of this command's records on how datasets were split."""
        now = [record for record in self.records if record.command == self.command]
        said = [note for record in now for note in record.protocol.get("notes", ())]
        return list(dict.fromkeys(said))

    def _repr_html_(self) -> str:
        from compressive.evaluation.results_table import results_html

        return results_html(self)

    def add(
        self,
        task: str,
        dataset: str,
        metric: str,
        value: float | Float[Any, " n"] | Bool[Any, " n"],  # a tensor; reading needs no torch
        *,
        protocol: dict[str, Any],
        n: int = 0,
        images: str = "",
        draws: Sequence[float] = (),
    ) -> Record:
        """Add a number, or values per image; of the latter record the mean and its interval.

        `draws` are the means of single draws of training labels, whose variance the interval has.
        """
        low = high = each = None
        if not isinstance(value, float | int):
            each = value.detach().cpu().double()
            value, n = float(each.mean()), len(each)
            low, high = self._interval(metric, each.numpy(), draws)
        record = Record(
            run=self.run,
            task=task,
            dataset=dataset,
            metric=metric,
            value=value,
            low=low,
            high=high,
            n=n,
            images=images,
            of=self.of if self._is_of_the_set(dataset) else "",
            protocol=protocol,
            seed=self.seed,
            command=self.command,
        )
        self.records = [other for other in self.records if other.key != record.key]
        self.values.pop(record.key, None)
        if each is not None:
            self.values[record.key] = each.float().numpy()
        self.records.append(record)
        return record

    def _interval(
        self, metric: str, each: Float[np.ndarray, " n"], draws: Sequence[float]
    ) -> tuple[float, float]:
        """Return Wilson's interval of hits, Student's if there are draws, else the bootstrap's."""
        if len(draws) > 1:
            # One hit and one miss more, so that equal values have an interval too.
            padded = np.append(each, (0.0, 1.0))
            found = t_interval(float(padded.mean()), mean_part(padded), mean_part(draws))
            low, high = (found.low, found.high) if found else (0.0, 1.0)
        # Classes have weights in the mean per class, also if all of its values are 1.
        elif metric in {*ACCURACIES} - {"mean per class"} and np.isin(each, (0.0, 1.0)).all():
            low, high = wilson_interval(float(each.mean()), len(each))
        else:
            import torch

            from compressive.metrics import bootstrap_interval

            low, high = map(float, bootstrap_interval(torch.from_numpy(each), seed=self.seed))
        # With class weights a resampled mean can exceed 1.
        return (max(low, 0.0), min(high, 1.0)) if metric in ACCURACIES else (low, high)

    def begin_with(self, old: "Results") -> None:
        """Take over records of the same encoder and data; `add` replaces them."""
        if old.about.get("weights") != self.about.get("weights"):
            return
        own = self._is_of_the_set
        self.records = [r for r in old.records if not own(r.dataset) or r.of == self.of]
        self.values = {r.key: old.values[r.key] for r in self.records if r.key in old.values}

    def _is_of_the_set(self, dataset: str) -> bool:
        """Return whether this is the evaluated dataset, a split of it, or corruptions of it."""
        return bool(self.set) and f"{dataset} ".startswith((f"{self.set} ", f"{self.set}-C "))

    def write(self, folder: Path) -> Path:
        """Write the values per image and results.json atomically; return the path of the latter."""
        path = folder / RESULTS
        values = serialize(self.values, {CHECKSUM_KEY: file_checksum({}, self.values)})
        # Both or none: on a full disk the values must not be of other records.
        write_files({folder / VALUES: [values], path: [self.as_json().encode()]})
        return path


def read(folder: str | Path) -> Results:
    """Return what `Results.write` wrote, given the folder or its results.json."""
    path = Path(folder)
    path = path / RESULTS if path.is_dir() else path
    if not Path(folder).exists():
        raise FileNotFoundError(f"{folder} does not exist; give the folder of an evaluated run")
    if not path.is_file():
        raise FileNotFoundError(f"no {RESULTS} in {folder}; run `compressive evaluate {folder}`")
    found, damaged = read_results(path)
    if damaged:
        raise ValueError(f"{path} is damaged or from another program: {damaged} invalid records")
    return Results(**vars(found), values=_read_values(path.parent / VALUES))


def _read_values(path: Path) -> dict[str, np.ndarray]:
    """Return the values per image; raise ValueError if they are not those that were written."""
    if not path.is_file():
        return {}
    try:
        with safetensors.safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(_damaged_values(path, str(error))) from None
    stated = metadata.get(CHECKSUM_KEY)
    if stated is None:
        note = "has no checksum, as an earlier version wrote it; evaluate again to add one"
        warnings.warn(f"{path} {note}", stacklevel=2)
    elif stated != file_checksum(metadata, values):
        raise ValueError(_damaged_values(path, "its checksum does not fit"))
    return values


def _damaged_values(path: Path, why: str) -> str:
    return f"{path} is damaged ({why}); delete it and run `compressive evaluate` again"

"""Numbers and where each comes from: one record for one number, and the images behind it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors
from jaxtyping import Bool, Float
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import Tensor

from compressive.metric_info import ACCURACIES
from compressive.metrics import bootstrap_interval
from compressive.rundir.files import RESULTS, write_bytes, write_text

VALUES = "values.safetensors"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One number."""

    run: str
    task: str
    dataset: str
    metric: str
    value: float
    low: float | None  # ends of a 95 % interval over images, where the number is a mean of them
    high: float | None
    n: int  # images
    images: str  # a short name for which they are: only values of the same ones can be paired
    of: str  # a short name for the set as it was opened; "" for one that has no other reading
    protocol: dict[str, Any]  # what was done, and every hyperparameter that was chosen
    seed: int
    command: str

    @property
    def key(self) -> str:
        """What the number is of, whichever run."""
        return f"{self.task}/{self.dataset}/{self.metric}"


class Results:
    """Records as they come, values per image where there are any, and what was left out."""

    def __init__(self, run: str, *, seed: int = 0, command: str = "") -> None:
        self.run, self.seed, self.command = run, seed, command
        self.set, self.of = "", ""  # name and content of the set that records are of
        self.records: list[Record] = []
        self.values: dict[str, Tensor] = {}
        self.skipped: list[str] = []
        self.skipped_in: dict[str, str] = {}  # these words: the task and set that they are of
        self.about: dict[str, Any] = {}

    def add(
        self,
        task: str,
        dataset: str,
        metric: str,
        value: float | Float[Tensor, " n"] | Bool[Tensor, " n"],
        *,
        protocol: dict[str, Any],
        n: int = 0,
        images: str = "",
    ) -> Record:
        """A number, or one value per image whose mean it is; those get an interval."""
        low = high = None
        each = None
        if isinstance(value, Tensor):
            each = value.detach().double().cpu()
            interval = bootstrap_interval(each, seed=self.seed)
            low, high, n = float(interval.low), float(interval.high), len(each)
            if metric in ACCURACIES:  # of values that are weighted by class the means may exceed 1
                low, high = max(low, 0.0), min(high, 1.0)
            value = float(each.mean())
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
            self.values[record.key] = each.float()
        self.records.append(record)
        return record

    def begin_with(self, old: "Results") -> None:
        """Keep what was measured before of the same things, until it is measured anew."""
        if old.about.get("weights") != self.about.get("weights"):
            return
        same = [r for r in old.records if not self._is_of_the_set(r.dataset) or r.of == self.of]
        self.records = same
        self.values = {r.key: old.values[r.key] for r in same if r.key in old.values}

    def _is_of_the_set(self, dataset: str) -> bool:
        """Whether it is this set, a split of it, or what corruptions made of it."""
        own = (f"{self.set} ", f"{self.set}-C ")
        return bool(self.set) and (
            dataset in (self.set, f"{self.set}-C") or dataset.startswith(own)
        )

    def write(self, folder: Path) -> Path:
        """results.json, and beside it the values per image; each whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / VALUES, serialize(self.values))
        content = {
            "run": self.run,
            "about": self.about,
            "records": [asdict(record) for record in self.records],
            "skipped": self.skipped,
            "skipped_in": self.skipped_in,
        }
        write_text(folder / RESULTS, json.dumps(content, indent=1) + "\n")
        return folder / RESULTS


def read(folder: str | Path) -> Results:
    """What `write` wrote, given the folder or its results.json."""
    path = Path(folder)
    path = path / RESULTS if path.is_dir() else path
    if not Path(folder).exists():
        raise FileNotFoundError(
            f"{folder} is not there; give the folder of a run that was evaluated"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"no {RESULTS} in {folder}; `compressive evaluate {folder}` makes it"
        )
    try:
        content = json.loads(path.read_text())
        known = {field.name for field in fields(Record)}
        records = [Record(**{k: v for k, v in r.items() if k in known}) for r in content["records"]]
        found = Results(content["run"])
        found.records, found.skipped = records, content["skipped"]
        found.about = content.get("about", {})
        found.skipped_in = dict(content.get("skipped_in", {}))
        for record in records:
            if not isinstance(record.value, int | float) or not isinstance(record.protocol, dict):
                raise TypeError(f"{record.key} has no number or no protocol")
        if (path.parent / VALUES).is_file():
            found.values = load_file(path.parent / VALUES)
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is damaged or from another program: {error!r}") from None
    return found

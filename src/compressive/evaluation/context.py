"""The state that evaluation tasks share: model, data, cached features and results."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from compressive.augment.ops import MEAN, STD, colors, normalize
from compressive.data.decode import Unreadable
from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.loaders import Batch, open_loader
from compressive.data.sampler import BatchIndices
from compressive.data.source import Source
from compressive.data.splits import stratified
from compressive.device import precision
from compressive.evaluation.dataset import Splits
from compressive.evaluation.features import (
    BATCH,
    Crop,
    Features,
    Loader,
    cached,
    extract,
    network_fingerprint,
)
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Results
from compressive.evaluation.task_clock import TaskClock
from compressive.progress import Display
from compressive.rundir.files import UNREADABLE

VALIDATION_IMAGES = 10_000  # held out of ImageNet's train; smaller data sets hold out 10 %

FeatureClassifier = Callable[[Float[Tensor, "batch feat"]], Float[Tensor, "batch classes"]]


class TaskOptions(NamedTuple):
    """Options of single tasks."""

    out: Path | None = None  # folder of the gallery
    epochs: int = 0  # of the linear evaluation; 0: chosen from the size of the data set
    benchmark_root: Path | None = None  # folder of the data sets of transfer and robustness
    frost: Sequence[UInt8[Tensor, "3 h w"]] | None = None  # photographs for the frost corruption


class EvalContext:
    """A frozen model, a data set, and the features and classifier that tasks share."""

    def __init__(
        self,
        model: FrozenModel,
        splits: Splits,
        results: Results,
        *,
        device: torch.device,
        seed: int = 0,
        cache: Path | None = None,
        display: Display | None = None,
        share: float | None = None,
        bf16: bool | None = None,
        options: TaskOptions | None = None,
        clock: TaskClock | None = None,
    ) -> None:
        self.model: FrozenModel = model
        self.splits: Splits = splits
        self.results: Results = results
        self.device: torch.device = device
        self.seed: int = seed
        self.cache: Path | None = cache
        self.display: Display = display or Display(quiet=True)
        self.options: TaskOptions = options or TaskOptions()
        self.clock: TaskClock = clock or TaskClock()
        kind = "auto" if bf16 is None else "bf16" if bf16 else "float32"
        self.dtype: torch.dtype = precision(kind, device)
        self.crop: Crop = model.crop(share)
        self.classifier: FeatureClassifier | None = None  # of the linear evaluation
        self.head: dict[str, object] = {}  # protocol of that classifier
        self.task = ""  # name of the current task
        self.after_results: list[Callable[[], object]] = []  # to call once results are written
        self.unreadable: list[tuple[str, str]] = []  # origin, reason
        self._loaders: dict[str, Loader] = {}
        self._features: dict[str, Features] = {}
        self._fingerprints: dict[str, DatasetFingerprint] = {}
        self._images: dict[tuple[str, bytes], str] = {}  # fingerprints by split and indices

    @property
    def classes(self) -> int:
        """Number of classes; 0 if train has no labels."""
        return self.splits.classes

    def source(self, split: str) -> Source:
        """Return the train or test images."""
        return self.splits.train if split == "train" else self.splits.test

    def loader(self, split: str) -> Loader:
        """Return the loader of a split, opened once."""
        if split not in self._loaders:
            source, side = self.model.shrink(self.source(split))
            with self.clock.measure("decode"):
                self._loaders[split] = open_loader(
                    source,
                    side=side,
                    device=self.device,
                    progress=partial(self.progress, f"decoding {split}"),
                )
        return self._loaders[split]

    def features(self, split: str) -> Features:
        """Return the features of the central crops of train or test."""
        if split not in self._features:
            source, loader = self.source(split), self.loader(split)
            with self.clock.measure("features"):
                state = self._fingerprint_of(split).with_file_times()
                found = self._cached_features(source, state, loader, self.crop, split)
                self._features[split] = found
        return self._features[split]

    def features_of(self, source: Source, crop: Crop, title: str) -> Features:
        """Return the features of another data set without keeping its images in memory."""
        shrunk, side = self.model.shrink(source)
        state = DatasetFingerprint(source).with_file_times()
        with open_loader(shrunk, side=side, device=self.device) as loader:
            return self._cached_features(source, state, loader, crop, title)

    def _cached_features(
        self, source: Source, state: str, loader: Loader, crop: Crop, title: str
    ) -> Features:
        key = {
            "weights": network_fingerprint(self.model.network),
            "data": state,
            "crop": tuple(crop),
            **self.model.shrink_protocol(),
            "precision": str(self.dtype),
            "device": self.device.type,
        }

        make = partial(
            extract,
            *(self.model.network, loader, len(source), crop),
            precision=self.dtype,
            progress=partial(self.progress, f"features of {title}"),
        )
        found = cached(self.cache, key, make, self.device)
        if len(found.feats) < len(source):
            lost = sorted({*range(len(source))} - {*found.index.tolist()})
            self.unreadable += [(source.origin(i), _reason(source, i)) for i in lost]
            self.skip(f"{len(lost)} images of {title} that cannot be read, listed in {UNREADABLE}")
        return Features(*(part.to(self.device) for part in found))

    @cached_property
    def parts(self) -> tuple[Int[Tensor, " fit"], Int[Tensor, " held"]]:
        """Rows of the train features for fitting, and rows for choosing hyperparameters.

        The second part is stratified and depends on the seed.
        """
        labels = self.features("train").labels.cpu()
        share = min(0.1, VALIDATION_IMAGES / len(labels))
        fit, held = stratified(labels, share, seed=self.seed)
        return fit.to(self.device), held.to(self.device)

    def some_places(self, split: str, most: int) -> Int[Tensor, " some"]:
        """Return the places of `most` images of a split that the seed draws; 0: of all images."""
        count = len(self.source(split))
        if not 0 < most < count:
            return torch.arange(count)
        draw = torch.Generator().manual_seed(self.seed)
        return torch.randperm(count, generator=draw)[:most].sort().values

    def batches(self, split: str, size: int = BATCH) -> Iterator[Batch]:
        """Yield the images of a split in order."""
        return self.batches_at(split, torch.arange(len(self.source(split))), size)

    def batches_at(
        self, split: str, places: Int[Tensor, " some"], size: int = BATCH
    ) -> Iterator[Batch]:
        """Yield the images at these places of a split, without unreadable ones."""
        parts, done = places.split(size), 0
        wanted_parts = (BatchIndices(some, torch.zeros_like(some)) for some in parts)
        for wanted, batch in zip(parts, self.loader(split).batches(wanted_parts), strict=True):
            if self.loader(split).unreadable:
                there = batch.index == wanted.to(batch.index.device)
                batch = Batch(*(part[there] for part in batch))
            yield batch
            done += len(wanted)
            if self.task:
                self.progress(self.task, done, len(places))

    def renormalize(self, views: Float[Tensor, "batch 3 h w"]) -> Float[Tensor, "batch 3 h w"]:
        """Convert views normalized as in pretraining to the normalization of the model."""
        mean, std = self.model.mean, self.model.std
        if (mean, std) == (MEAN, STD):
            return views
        return normalize(colors(views), mean=mean, std=std)

    def protocol(self, **more: Any) -> dict[str, Any]:
        """Return the protocol of a record on this data set, extended by `more`."""
        notes = {"notes": list(self.splits.notes)} if self.splits.notes else {}
        dtype = str(self.dtype).removeprefix("torch.")
        return {**self.preprocessing(), "precision": dtype, **notes, **more}

    def preprocessing(self) -> dict[str, Any]:
        """Describe how images are prepared for the model."""
        return {**self.crop.protocol(), **self.model.shrink_protocol()}

    def images(self, split: str, index: Int[Tensor, " some"] | None = None) -> str:
        """Return the fingerprint of some images of a split, the same on every machine."""
        places = None if index is None else index.cpu().contiguous()
        # Dozens of records are of the same images, and a fingerprint reads all their names.
        key = split, b"" if places is None else places.numpy().tobytes()
        if key not in self._images:
            named = self._fingerprint_of(split).of(None if places is None else places.tolist())
            self._images[key] = named
        return self._images[key]

    def _fingerprint_of(self, split: str) -> DatasetFingerprint:
        if split not in self._fingerprints:
            self._fingerprints[split] = DatasetFingerprint(self.source(split))
        return self._fingerprints[split]

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of both splits and the seed that draws subsets of them."""
        return f"{self.images('train')} {self.images('test')} {self.seed}"

    def skip(self, text: str, place: str = "") -> None:
        """Record `text` as skipped; `place` is task and data set (default: the current ones)."""
        if text not in self.results.skipped:
            self.results.skipped.append(text)
        self.results.skipped_in[text] = place or f"{self.task} on {self.splits.name}"

    def progress(self, title: str, done: float, total: float, unit: str = "images") -> None:
        """Display progress; `unit` is what `done` counts."""
        self.display.progress(title, done, total, unit=unit)

    def close(self) -> None:
        """Stop the worker threads of the loaders."""
        for loader in self._loaders.values():
            loader.close()


def _reason(source: Source, i: int) -> str:
    """Return why an image cannot be read; the feature cache does not store the reason."""
    try:
        source.image(i)
    except Unreadable as problem:
        return str(problem)
    return "could not be read before, but can be read now"

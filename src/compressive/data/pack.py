"""Pack images into shards: resize, deduplicate, keep labels and splits; resume after a kill."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compressive.data.all_splits import open_all_splits
from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.location import ImageData
from compressive.data.pack_shard import (
    ShardRecord,
    ShardUnit,
    fill_shard,
    names_in,
    write_shard,
)
from compressive.data.several import named_place, split_tables
from compressive.data.shard_file import CLASSES_FILE
from compressive.data.shard_writers import WRITERS
from compressive.data.source import Source
from compressive.engine.local import Engine, LocalEngine
from compressive.progress import Display, printable
from compressive.rundir.files import PARTIAL, UNREADABLE, local_path, write_text
from compressive.rundir.lock import acquire_lock, ensure_writable

SUMMARY = "pack.json"
_WORK = ".pack"  # plan and finished shards of an interrupted command
_PACK_VERSION = 1


class SplitCounts(NamedTuple):
    """Images of a split: written, left out as unreadable, left out as duplicates."""

    images: int
    unreadable: int
    duplicates: int
    shards: int


@dataclass(frozen=True)
class Packed:
    """The result of packing."""

    folder: Path
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    shared: int = 0  # images of a later split that an earlier one has, too; all are kept


def pack_images(
    data: ImageData,
    out: str | Path,
    *,
    size: int = 0,
    quality: int = 92,
    kind: Literal["tar", "parquet"] = "tar",
    drop_duplicates: bool = False,
    images_per_shard: int = 2000,
    workers: int = 0,
    engine: Engine | None = None,
    shards: str = "",
    display: Display | None = None,
) -> Packed:
    """Write the images of a source to shards; the same command resumes an interrupted one.

    `size` is the shorter side in pixels of larger images; 0 keeps all images. Images that are not
    resized keep their bytes. Resized ones are JPEG of this `quality`, or PNG if it is 0.
    `drop_duplicates` keeps the first of several images of a split with equal pixels. `engine` runs
    the shards; `shards` is their address on storage if they are not written to `out`.
    """
    for name, value, low in (("size", size, 0), ("images_per_shard", images_per_shard, 1)):
        if value < low:
            raise ValueError(f"{name} must be {low} or more, got {value}")
    if kind not in WRITERS:
        raise ValueError(f"format must be {' or '.join(WRITERS)}, got {kind!r}")
    if not 0 <= quality <= 100:
        raise ValueError(f"quality must be 0 (PNG) to 100, got {quality}")
    folder = local_path(out)
    ensure_writable(folder)
    sources = open_all_splits(data)
    settings = {"size": size, "quality": quality, "format": kind, "version": _PACK_VERSION}
    settings |= {"drop_duplicates": drop_duplicates, "images_per_shard": images_per_shard}
    engine = engine or LocalEngine()
    workers = workers or engine.cores or os.cpu_count() or 1
    if not engine.is_local:
        data = named_place(data)
    with display or Display() as shown:
        for line in split_tables(sources):
            shown.say(line)
        lock = acquire_lock(folder)
        try:
            packing = _Packing(data, folder, sources, settings, shown, workers, engine, shards)
            return packing.run()
        finally:
            os.close(lock)


class _Shard(NamedTuple):
    """A shard of a split: images from `first` to `last`, exclusive."""

    split: str
    number: int
    name: str
    first: int
    last: int


class _Packing:
    def __init__(
        self,
        data: ImageData,
        folder: Path,
        sources: dict[str, Source],
        settings: dict[str, Any],
        display: Display,
        workers: int,
        engine: Engine,
        shards: str,
    ) -> None:
        self.data, self.folder, self.sources, self.settings = data, folder, sources, settings
        self.display, self.workers, self.engine = display, workers, engine
        self.place = shards or str(folder)
        self.done, self.total = 0, sum(map(len, sources.values()))
        # The first shard of a split that has an image, by the digest of its pixels.
        self.first_shard: dict[str, dict[str, int]] = {split: {} for split in sources}
        self.classes = _all_classes(sources)
        self.prints: dict[str, str] = {}

    def run(self) -> Packed:
        plan = json.dumps(self._plan(), indent=1)
        if self._is_finished(plan):
            self.display.say(f"already packed: {self.folder}")
            return _read_summary(self.folder)
        write_text(self.folder / _WORK / "plan.json", plan)
        self._remove_partial()
        shards = [shard for split in self.sources for shard in self._shards(split)]
        self._write_all(shards)
        counts: dict[str, SplitCounts] = {}
        bad: list[str] = []
        shared = 0
        for split in self.sources:
            images = same = left = 0
            own = [shard for shard in shards if shard.split == split]
            for shard in own:
                record = self._record(shard)
                images, same = images + record["images"], same + record["duplicates"]
                left += len(record["unreadable"])
                bad += record["unreadable"]
                earlier = [self.first_shard[name] for name in counts]
                shared += sum(any(d in found for found in earlier) for d in record["digests"])
            counts[split] = SplitCounts(images, left, same, len(own))
        if not any(each.images for each in counts.values()):
            raise ValueError(f"none of the {self.total:,} images can be read; first: {bad[0]}")
        return self._finish(Packed(self.folder, counts, shared), bad, plan)

    def _plan(self) -> dict[str, Any]:
        prints = {}
        for split, source in self.sources.items():
            found = DatasetFingerprint(source)
            prints[split] = found.with_file_times()
            self.prints[split] = "" if self.engine.is_local else found.of()
        return {"settings": self.settings, "images": prints}

    def _is_finished(self, plan: str) -> bool:
        """Return whether this folder is complete; raise ValueError if it has something else."""
        work, summary = self.folder / _WORK / "plan.json", self.folder / SUMMARY
        if summary.exists() and json.loads(summary.read_text())["plan"] == json.loads(plan):
            return True
        is_ours = work.exists() and work.read_text() == plan
        if is_ours or not (names_in(str(self.folder)) | names_in(self.place)) - {_WORK}:
            return False
        has_shards = work.exists() or summary.exists()
        what = "shards of other images or settings" if has_shards else "other files"
        raise ValueError(f"{self.place} holds {what}; choose another --out, or empty it")

    def _shards(self, split: str) -> Iterator[_Shard]:
        """Yield the shards of a split."""
        length, step = len(self.sources[split]), self.settings["images_per_shard"]
        count, kind = -(-length // step), self.settings["format"]
        for k in range(count):
            name = f"{split}-{k:05d}-of-{count:05d}.{kind}"
            yield _Shard(split, k, name, k * step, min((k + 1) * step, length))

    def _write_all(self, shards: list[_Shard]) -> None:
        """Write the shards that are not finished; then repeat those with images of earlier ones."""
        there = names_in(self.place)
        left = [shard for shard in shards if shard.name not in there or not self._record(shard)]
        missing = set(left)
        for shard in shards:
            if shard not in missing:
                self._note(shard, self._record(shard)["digests"])
                self.done += shard.last - shard.first
        self._write(left)
        # Shards that are written at the same time do not know each other's images.
        again = {shard: self._repeated(shard) for shard in shards} if self._drops else {}
        self._write([shard for shard, repeated in again.items() if repeated], again)

    @property
    def _drops(self) -> bool:
        return bool(self.settings["drop_duplicates"])

    def _repeated(self, shard: _Shard) -> frozenset[str]:
        """Return the digests in a shard that an earlier shard of the split has, too."""
        digests = self._record(shard)["digests"]
        return frozenset(d for d in digests if self._is_earlier(shard, d))

    def _is_earlier(self, shard: _Shard, digest: str) -> bool:
        return self.first_shard[shard.split].get(digest, shard.number) < shard.number

    def _write(
        self, shards: list[_Shard], drop: dict[_Shard, frozenset[str]] | None = None
    ) -> None:
        numbers = {shard.name: shard for shard in shards}

        def here(unit: ShardUnit) -> ShardRecord:
            shard = numbers[os.path.basename(unit.place)]
            source = self.sources[shard.split]
            return fill_shard(
                unit, source, is_earlier=lambda d: self._is_earlier(shard, d), tick=self._tick
            )

        units = (self._unit(shard, (drop or {}).get(shard, frozenset())) for shard in shards)
        work = here if self.engine.is_local else write_shard
        for number, record in self.engine.map(work, units, name="pack"):
            shard = shards[number]
            write_text(self._record_path(shard), json.dumps(record))
            self._note(shard, record["digests"])
            if not self.engine.is_local and drop is None:
                self._tick(shard.last - shard.first)

    def _unit(self, shard: _Shard, drop: frozenset[str]) -> ShardUnit:
        return ShardUnit(
            data=None if self.engine.is_local else self.data,
            fingerprint=self.prints[shard.split],
            split=shard.split,
            first=shard.first,
            last=shard.last,
            place=f"{self.place.rstrip('/')}/{shard.name}",
            settings=self.settings,
            classes=self.classes,
            workers=self.workers,
            drop=drop,
        )

    def _tick(self, count: int = 1) -> None:
        self.done = min(self.total, self.done + count)
        self.display.progress("packing", self.done, self.total, unit="images")

    def _note(self, shard: _Shard, digests: list[str]) -> None:
        """Remember the first shard of each image."""
        first = self.first_shard[shard.split]
        for digest in digests:
            first[digest] = min(shard.number, first.get(digest, shard.number))

    def _record_path(self, shard: _Shard) -> Path:
        return self.folder / _WORK / f"{os.path.splitext(shard.name)[0]}.json"

    def _record(self, shard: _Shard) -> ShardRecord:
        """Return what a finished shard holds, or {} if it is not finished."""
        path = self._record_path(shard)
        found: ShardRecord = json.loads(path.read_text()) if path.exists() else {}
        return {} if "shared" in found else found  # of an earlier version

    def _remove_partial(self) -> None:
        """Remove what killed processes have left."""
        for left in self.folder.glob(f".*{PARTIAL}"):
            left.unlink(missing_ok=True)

    def _finish(self, packed: Packed, bad: list[str], plan: str) -> Packed:
        if bad:
            write_text(self.folder / UNREADABLE, "".join(f"{line}\n" for line in bad))
        if self.classes is not None and self.settings["format"] == "tar":
            lines = "".join(f"{printable(name)}\n" for name in self.classes)
            write_text(self.folder / CLASSES_FILE, lines)
        counts = {name: each._asdict() for name, each in packed.splits.items()}
        summary = {"plan": json.loads(plan), "splits": counts, "shared": packed.shared}
        write_text(self.folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
        shutil.rmtree(self.folder / _WORK)
        self._remove_partial()
        return packed


def _read_summary(folder: Path) -> Packed:
    summary = json.loads((folder / SUMMARY).read_text())
    splits = {name: SplitCounts(**each) for name, each in summary["splits"].items()}
    return Packed(folder, splits, summary["shared"])


def _all_classes(sources: dict[str, Source]) -> tuple[str, ...] | None:
    """Return the classes of all splits; those of the first split keep their numbers."""
    found = [source.classes for source in sources.values() if source.classes is not None]
    return tuple(dict.fromkeys(chain.from_iterable(found))) if found else None

"""Pack images into shards: resize, deduplicate, keep labels and splits; resume after a kill."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compressive.data.all_splits import open_all_splits
from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.location import ImageData
from compressive.data.repack import prepare_all
from compressive.data.several import split_tables
from compressive.data.shard_file import CLASSES_FILE
from compressive.data.shard_writers import WRITERS, PackedImage, ShardWriter
from compressive.data.source import Source
from compressive.progress import Display, printable
from compressive.rundir.files import DISK_FULL, PARTIAL, UNREADABLE, local_path, write_text
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
    display: Display | None = None,
) -> Packed:
    """Write the images of a source to shards; the same command resumes an interrupted one.

    `size` is the shorter side in pixels of larger images; 0 keeps all images. Images that are not
    resized keep their bytes. Resized ones are JPEG of this `quality`, or PNG if it is 0.
    `drop_duplicates` keeps the first of several images of a split with equal pixels.
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
    workers = workers or os.cpu_count() or 1
    with display or Display() as shown:
        for line in split_tables(sources):
            shown.say(line)
        lock = acquire_lock(folder)
        try:
            return _Packing(folder, sources, settings, shown, workers).run()
        finally:
            os.close(lock)


class _Packing:
    def __init__(
        self,
        folder: Path,
        sources: dict[str, Source],
        settings: dict[str, Any],
        display: Display,
        workers: int,
    ) -> None:
        self.folder, self.sources, self.settings = folder, sources, settings
        self.display, self.workers = display, workers
        self.done, self.total = 0, sum(map(len, sources.values()))
        self.digests: dict[str, set[str]] = {split: set() for split in sources}
        self.classes = _all_classes(sources)

    def run(self) -> Packed:
        plan = json.dumps(self._plan(), indent=1)
        if self._is_finished(plan):
            self.display.say(f"already packed: {self.folder}")
            return _read_summary(self.folder)
        write_text(self.folder / _WORK / "plan.json", plan)
        for left in self.folder.glob(f".*{PARTIAL}"):
            left.unlink()
        counts: dict[str, SplitCounts] = {}
        bad: list[str] = []
        shared = 0
        for split, source in self.sources.items():
            parts = [self._shard(split, source, *each) for each in self._shards(source)]
            unreadable = [line for part in parts for line in part["unreadable"]]
            images, same, both = (
                sum(part[name] for part in parts) for name in ("images", "duplicates", "shared")
            )
            counts[split] = SplitCounts(images, len(unreadable), same, len(parts))
            bad, shared = [*bad, *unreadable], shared + both
        if not any(each.images for each in counts.values()):
            raise ValueError(f"none of the {self.total:,} images can be read; first: {bad[0]}")
        return self._finish(Packed(self.folder, counts, shared), bad, plan)

    def _plan(self) -> dict[str, Any]:
        prints = {name: DatasetFingerprint(s).with_file_times() for name, s in self.sources.items()}
        return {"settings": self.settings, "images": prints}

    def _is_finished(self, plan: str) -> bool:
        """Return whether this folder is complete; raise ValueError if it has something else."""
        work, summary = self.folder / _WORK / "plan.json", self.folder / SUMMARY
        if summary.exists() and json.loads(summary.read_text())["plan"] == json.loads(plan):
            return True
        is_ours = work.exists() and work.read_text() == plan
        if is_ours or not [path for path in self.folder.iterdir() if path.name != _WORK]:
            return False
        has_shards = work.exists() or summary.exists()
        what = "shards of other images or settings" if has_shards else "other files"
        raise ValueError(f"{self.folder} holds {what}; choose another --out, or empty it")

    def _shards(self, source: Source) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield number, count and images of the shards of a split."""
        step = self.settings["images_per_shard"]
        count = -(-len(source) // step)
        for k in range(count):
            yield k, count, range(k * step, min((k + 1) * step, len(source)))

    def _shard(
        self, split: str, source: Source, number: int, count: int, indices: Sequence[int]
    ) -> dict[str, Any]:
        """Write one shard unless it is finished; return what it holds."""
        stem, kind = f"{split}-{number:05d}-of-{count:05d}", self.settings["format"]
        path, record = self.folder / f"{stem}.{kind}", self.folder / _WORK / f"{stem}.json"
        if record.exists() and path.exists():
            about: dict[str, Any] = json.loads(record.read_text())
            self.done += len(indices)
        else:
            with _atomic(path) as partial, WRITERS[kind](partial, self.classes) as writer:
                about = self._fill(writer, split, source, indices)
            write_text(record, json.dumps(about))
        self.digests[split].update(about["digests"])
        return about

    def _fill(
        self, writer: ShardWriter, split: str, source: Source, indices: Sequence[int]
    ) -> dict[str, Any]:
        """Write images to a shard; return their number and what was left out."""
        unreadable: list[str] = []
        digests: dict[str, int] = {}
        images = shared = 0
        options = self.settings["size"], self.settings["quality"], self.workers
        others = [digests for name, digests in self.digests.items() if name != split]
        for image in prepare_all(source, indices, *options):
            self.done += 1
            self.display.progress("packing", self.done, self.total, unit="images")
            origin = source.origin(image.index)
            if image.error:
                unreadable.append(printable(f"{origin}: {image.error}"))
                continue
            is_repeated = image.digest in digests or image.digest in self.digests[split]
            if is_repeated and self.settings["drop_duplicates"]:
                continue
            digests[image.digest] = image.index
            shared += any(image.digest in found for found in others)
            name = Path(origin.rpartition(":")[2] or origin).name
            label = self._label(source, image.index)
            writer.add(PackedImage(image.index, name, image.kind, image.content, label))
            images += 1
        left_out = len(indices) - images - len(unreadable)
        return {
            "images": images,
            "duplicates": left_out,
            "shared": shared,
            "unreadable": unreadable,
            "digests": [*digests],
        }

    def _label(self, source: Source, i: int) -> int:
        """Return the class number of image i among the classes of all splits."""
        if source.labels is None or source.classes is None or self.classes is None:
            return -1
        label = int(source.labels[i])
        if label < 0 or source.classes == self.classes:
            return label
        return self.classes.index(source.classes[label])

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
        return packed


def _read_summary(folder: Path) -> Packed:
    summary = json.loads((folder / SUMMARY).read_text())
    splits = {name: SplitCounts(**each) for name, each in summary["splits"].items()}
    return Packed(folder, splits, summary["shared"])


def _all_classes(sources: dict[str, Source]) -> tuple[str, ...] | None:
    """Return the classes of all splits; those of the first split keep their numbers."""
    found = [source.classes for source in sources.values() if source.classes is not None]
    return tuple(dict.fromkeys(chain.from_iterable(found))) if found else None


@contextmanager
def _atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary name that becomes `path` when it is complete."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        hint = "free some space and run the same command to resume"
        why = os.strerror(error.errno or 0)
        raise OSError(error.errno, f"could not write {path}: {why}; {hint}") from None
    finally:
        partial.unlink(missing_ok=True)

"""The images of a run: open them, detect changes when resuming, and list unreadable ones."""

import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from compressive.config import Config, Data, override
from compressive.data.fingerprint import file_states, start_of_file
from compressive.data.loaders import Batch, Resident, Streaming
from compressive.data.location import PYTHON
from compressive.data.sampler import BatchIndices, batch_index_stream
from compressive.data.several import count_table, drop_labels, take
from compressive.data.shared_loader import open_shared_loader
from compressive.data.source import Source, require_source
from compressive.data.sources import open_source
from compressive.data.split_cache import SplitResident
from compressive.distributed import rank, world_size
from compressive.progress import printable
from compressive.rundir.files import write_text
from compressive.rundir.places import split_places
from compressive.storage.address import is_remote
from compressive.train.online_eval import evenly_spaced_indices

Loader = Resident | Streaming | SplitResident
FileList = UInt8[Tensor, " _"]  # name, size, time and checksum of each file, compressed
# 2019, 2019-05, 2019_05_17, 20190517, 2019-05 Rome
_DATE = re.compile(r"(19|20)\d\d([-_. ]?(0[1-9]|1[0-2])([-_. ]?[0-3]\d)?)?(\D.*)?")
_FILES_AT_ONCE = 1000  # compressed together
_SAMPLED_FILES = 64  # files whose content is compared
_SAMPLED_BYTES = 2**20  # read from the start of each; most images are smaller, shards larger


def from_python(config: Config, source: Source) -> Config:
    """Return the config of a run on a Python source; set data.source if it has the default.

    A part of the built-in images keeps the default.
    """
    require_source(source)
    if config.data.source != Data().source or source.name == Data().source:
        return config
    return override(config, f"data.source={PYTHON}{source.name}")


def load_source(config: Config, source: Source | None = None) -> Source:
    """Return the images of a run, at most data.limit: `source` or, if it is None, data.source."""
    if source is None:
        data = config.data
        source = open_source(data.source, data.split, max_pixels=data.max_pixels)
    if config.data.labels == "none":
        source = drop_labels(source)
    if 0 < config.data.limit < len(source):
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(config.seed))
        source = take(source, order[: config.data.limit].sort().values)
    if len(source) < 2:
        raise ValueError(f"{source.name} has {len(source)} image; there must be 2 or more")
    return source


def load_images(
    source: Source,
    config: Config,
    side: int,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Loader:
    """Return the loader of a run, as its settings say; every process must call this."""
    data, train = config.data, config.train
    return open_shared_loader(
        source,
        side=side,
        device=device,
        batch=train.batch_size // train.grad_accum_steps // world_size(),
        cache_on_device=data.cache_on_device,
        decode_on_device=data.decode_on_device,
        workers=data.workers,
        progress=progress,
    )


def training_batches(
    loader: Loader, config: Config, count: int, *, attempt: int, step: int
) -> Generator[Batch]:
    """Yield this process's batches of a run from a step on."""
    train = config.train
    split = loader if isinstance(loader, SplitResident) else None
    plan = batch_index_stream(
        count,
        train.batch_size,
        seed=config.seed,
        attempt=attempt,
        step=step,
        portions=train.grad_accum_steps,
        rank=rank() if split is None else None,
        world=world_size(),
    )
    return loader.batches(plan) if split is None else split.batches_of_rank(plan)


def loader_note(loader: Loader) -> str:
    """Return a note if images are split between processes or decoded on the device, else ""."""
    if isinstance(loader, SplitResident):
        held, parts = f"{loader.bytes_held / 1e9:.1f} GB", f"{loader.processes} processes"
        return f"images are split between {parts} and stay on the device, {held} in each"
    if isinstance(loader, Streaming) and loader.decoder is not None:
        return "JPEG files are decoded on the GPU; data.decode_on_device=no: on the CPU"
    return ""


def some(loader: Loader, index: Int[Tensor, " some"], epoch: int = 0) -> Batch:
    """Return the images at these indices as one batch, outside the order of training."""
    return next(loader.batches(iter([BatchIndices(index, torch.full_like(index, epoch))])))


def color_fingerprint(loader: Loader, count: int) -> Float[Tensor, "some 3"]:
    """Return mean colors of some images, which identify a set; -1 where one cannot be read."""
    # Pixels are not suitable: versions of a decoder may round differently.
    index = evenly_spaced_indices(count, 16)
    batch = some(loader, index)
    means = batch.images.sum((2, 3)) / (batch.height * batch.width).unsqueeze(1)
    substitute = batch.index.cpu() != index
    return means.cpu().masked_fill(substitute.unsqueeze(1), -1)


def uniform_data_notes(
    loader: Loader, labels: Int[Tensor, " count"] | None, count: int
) -> list[str]:
    """Return notes if sampled images or all labels are equal: health checks may not detect it."""
    notes: list[str] = []
    batch = some(loader, index := evenly_spaced_indices(count, 16))
    if all(bool((part == part[:1]).all()) for part in (batch.images, batch.height, batch.width)):
        sample = (
            f"all {count:,}" if len(index) == count else f"{len(index)} of {len(index)} sampled"
        )
        notes.append(f"{sample} images are identical: nothing can be learned from copies of one")
    known = labels[labels >= 0] if labels is not None else torch.empty(0)
    if len(known) and bool((known == known[0]).all()):
        notes.append("all labels are the same: accuracies during training say nothing")
    return notes


def source_notes(source: Source) -> list[str]:
    """Return a note about classes if they look wrong, and a table if there are several sources."""
    return [date_labels_note(source.classes), *count_table(source)]


def date_labels_note(classes: Sequence[str] | None) -> str:
    """Return a note if all class folders are named after years, months or days, else ""."""
    if not classes or not all(_DATE.fullmatch(name) for name in classes):
        return ""
    shown = ", ".join(classes[:3]) + (", ..." if len(classes) > 3 else "")
    return f"note: folders named after dates ({shown}) are used as classes; ignore: --labels none"


def are_others(before: Float[Tensor, "some 3"], now: Float[Tensor, "some 3"]) -> bool:
    """Return whether two color fingerprints are of different images."""
    if before.shape != now.shape:
        return True
    both = (before >= 0) & (now >= 0)
    return bool(((before - now).abs() > 2)[both].any())  # 2 of 255; decoders differ by less


def list_files(source: Source, place: str) -> FileList:
    """Return relative names, sizes and times of all files, and checksums of a sample."""
    states, roots = file_states(source), [*map(_root_of, split_places(place))]
    sampled = set(evenly_spaced_indices(len(states), _SAMPLED_FILES).tolist())
    # In parts: the text of all files would need as much memory as their states.
    packer, packed = zlib.compressobj(1), bytearray()
    files = enumerate(states.items())
    while part := list(islice(files, _FILES_AT_ONCE)):
        fields = [""] if part[0][0] else []  # a separator after the part before
        for i, (path, (size, time)) in part:
            content = start_of_file(path, _SAMPLED_BYTES) if i in sampled and size else b""
            fields += (_relative_name(path, roots), str(size), str(time), f"{zlib.crc32(content)}")
        packed += packer.compress("\0".join(fields).encode(errors="surrogateescape"))
    packed += packer.flush()
    return torch.frombuffer(packed, dtype=torch.uint8)


def _root_of(place: str) -> str:
    """Return the folder that file names of a source are relative to, with a slash."""
    if is_remote(place):
        return f"{place.rstrip('/')}/"
    path = Path(place).expanduser()
    return f"{path.parent if path.is_file() else path}{os.sep}"


def _relative_name(path: str, roots: Sequence[str]) -> str:
    """Return a path relative to its source, with the number of the source if there are several."""
    for k, root in enumerate(roots):
        if path.startswith(root):
            return f"{k}:{path.removeprefix(root)}" if len(roots) > 1 else path.removeprefix(root)
    return path


def compare_files(
    before: FileList, now: FileList, unreadable: Path, loader: Loader | None, count: int
) -> tuple[str, str]:
    """Describe removed, added or changed files, and files that only have another time.

    A file that is or was unreadable may change. Without a loader, only names are compared. If no
    name is in both lists, images were moved or packed, and only their number and colors count.
    """
    old, new = ({f[0]: f[1:] for f in _fields(files)} for files in (before, now))
    if old == new or not old.keys() & new:
        return "", ""
    names = {"removed": [n for n in old if n not in new], "added": [n for n in new if n not in old]}
    if not any(names.values()) and loader is not None:
        known = unreadable.read_bytes().decode(errors="replace") if unreadable.exists() else ""
        differ = [n for n in old if old[n][0] != new[n][0] or _differ(old[n][2], new[n][2])]
        edited = [n for n in differ if f"{n}: " not in known]
        image = {n: i for i, n in enumerate(new)} if len(new) == count else {}  # unknown for shards
        if not all(n in image and _is_unreadable(loader, image[n]) for n in edited):
            names["changed"] = edited
    touched = [n for n in old if n in new and old[n][1] != new[n][1]]
    note = "with other modification times, but equal sizes and samples"
    return _counted(names), _counted({note: touched})


def _fields(files: FileList) -> Iterator[tuple[str, ...]]:
    """Yield name, size, time and checksum of each file."""
    text = zlib.decompress(files.numpy().tobytes()).decode(errors="surrogateescape")
    return zip(*[iter(text.split("\0"))] * 4, strict=False)


def _differ(before: str, now: str) -> bool:
    return before != now and "0" not in (before, now)  # 0: not read


def _is_unreadable(loader: Loader, i: int) -> bool:
    return int(some(loader, torch.tensor([i])).index) != i  # a substitute was returned


def _counted(kinds: dict[str, list[str]]) -> str:
    there = [(len(names), kind, names[0]) for kind, names in kinds.items() if names]
    return ", ".join(f"{n:,} file{'s' * (n > 1)} {kind} ({first!r})" for n, kind, first in there)


def list_unreadable(pairs: Sequence[tuple[str, str]], path: Path) -> int:
    """Add unreadable images and the reasons to a file; return how many it lists."""
    if not pairs:
        return 0
    now = [printable(f"{origin}: {reason}") for origin, reason in pairs]
    before = path.read_bytes().decode(errors="replace").split("\n") if path.exists() else []
    known = {"", *now}
    lines = [*now, *(line for line in before if line not in known)]
    write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)

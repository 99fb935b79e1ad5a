"""Where images come from: folders, parquet and tar shards, torchvision's sets, built-in pictures.

Longer than 300 lines because all kinds of places are told apart here, by one set of rules; each
kind is one short function that ends in a `Pictures`.
"""

import difflib
import inspect
import io
import json
import os
import re
import struct
import tarfile
import threading
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int, Int64, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional
from torchvision.io import ImageReadMode, decode_image

ALLOWED = (
    "a folder of images or of class folders, with or without train/ and val/; a folder of *.parquet"
    " or *.tar shards, or one of them; torchvision:NAME; or builtin"
)
_COMMON = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
EXTENSIONS = frozenset(_COMMON | {".ppm", ".pgm", ".pbm", ".pnm", ".avif"})
_VAL = ("val", "valid", "validation", "dev")
# What a split may be called, in the order that it is looked for. ImageNet's val is what people test
# on, so test may be called val; the reverse would let test images choose between models.
_CALLED = {
    "train": ("train", "training", "trainval", "train-standard"),
    "test": ("test", "testing", *_VAL),
    **{name: (name, *_VAL) for name in _VAL},
}
_SPLITS = frozenset(("train", "training", "test", "testing", "unlabeled", *_VAL))
_LABELS = ("label", "labels", "fine_label", "cls", "class", "target")
_PNG = b"\x89PNG\r\n\x1a\n"
_BUILTIN = {"train": 6000, "test": 2400}  # pictures; each of the 12 classes has as many


class Unreadable(ValueError):
    """An image that cannot be decoded; the message is the reason."""


@runtime_checkable
class Source(Protocol):
    """Images by number, with labels where there are any; many threads may read at once."""

    @property
    def name(self) -> str:
        """What to call it."""
        ...

    @property
    def labels(self) -> Int64[Tensor, " count"] | None:
        """The class of each image, -1 where it has none."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes; there whenever labels are."""
        ...

    def __len__(self) -> int: ...

    def image(self, i: int) -> UInt8[Tensor, "3 h w"]:
        """Image i, upright, in RGB; raises `Unreadable`. Not to be written into."""
        ...

    def origin(self, i: int) -> str:
        """Where image i lies: a file, or a shard and a place in it."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Pictures:
    """A `Source` made of a function that reads image i, as encoded bytes or as pixels."""

    name: str
    count: int
    read: Callable[[int], Any]  # bytes, or UInt8[Tensor, "3 h w"]
    place: Callable[[int], str]
    labels: Int64[Tensor, " count"] | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        assert (self.labels is None) == (self.classes is None)
        assert self.labels is None or len(self.labels) == self.count

    def __len__(self) -> int:
        return self.count

    def image(self, i: int) -> UInt8[Tensor, "3 h w"]:
        """Image i, upright, in RGB; raises `Unreadable`. Not to be written into."""
        try:
            found = self.read(self._checked(i))
        except OSError as error:
            raise Unreadable(error.strerror or str(error)) from error
        return found if isinstance(found, Tensor) else decode(found)

    def origin(self, i: int) -> str:
        """Where image i lies: a file, or a shard and a place in it."""
        return self.place(self._checked(i))

    def _checked(self, i: int) -> int:
        if not 0 <= i < self.count:
            raise IndexError(f"{self.name} has images 0 to {self.count - 1}, got {i}")
        return i


def subset(source: Source, index: Int[Tensor, " some"]) -> Source:
    """Some images of a source, in this order; their class ids stay what they were."""
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(source):
        raise ValueError(
            f"index must lie in 0 to {len(source) - 1}, the images of {source.name}, "
            f"got {int(index.min())} to {int(index.max())}"
        )
    whole = index.tolist()
    return Pictures(
        name=source.name,
        count=len(whole),
        read=lambda i: source.image(whole[i]),
        place=lambda i: source.origin(whole[i]),
        labels=None if source.labels is None else source.labels[index],
        classes=source.classes,
    )


def open_source(place: str | Path, split: str = "train") -> Source:
    """The images of a place, whatever kind of place it is.

    - `builtin`: drawn on the spot, splits train and test.
    - `torchvision:NAME` or `torchvision:NAME@ROOT`: one of its sets, downloaded if need be; ROOT is
      `$COMPRESSIVE_DATA`, else `~/.cache/compressive`.
    - `*.parquet` as Hugging Face writes them, `*.tar` as WebDataset does: one, or a folder of them
      (also in `data/`), each belonging to the split in its name or its folder's.
    - Folders `train`, `val`, ... as ImageNet has them: one split each, holding what follows.
    - Class folders: images only in subfolders. The top one is the class; one alone says nothing,
      so then there are no labels.
    - A flat folder: images directly in it, no labels. If it has subfolders with images too, these
      are taken in, still without labels.

    What has no splits is `train` as a whole. Images are told by their extension, in any case;
    hidden files and folders are passed over. Order is that of the sorted names.
    """
    text = str(place)
    if text == "builtin":
        return _open_builtin(split)
    if text.startswith("torchvision:"):
        return _open_torchvision(text, split)
    if not text.strip():
        raise ValueError(f"the source of images is empty; it can be {ALLOWED}")
    path = Path(place).expanduser()
    if not path.exists():
        raise FileNotFoundError(_missing(path))
    source = _open_path(path, split)
    if not len(source):
        raise ValueError(
            f"no images in {path}, split {split}: looked for {' '.join(sorted(EXTENSIONS))} in it "
            f"and its subfolders, for *.parquet and for *.tar; allowed: {ALLOWED}"
        )
    return source


def _open_path(path: Path, split: str) -> Source:
    if parquet := _shards(path, ".parquet"):
        return _open_parquet(path, parquet[_choose(split, parquet, path)])
    # ImageNet's root often still holds the archives that its folders came from.
    if (tars := _shards(path, ".tar")) and not _split_folders(path):
        return _open_tar(path, tars[_choose(split, tars, path)])
    if not path.is_dir():
        raise ValueError(f"{path} is neither a folder nor *.parquet nor *.tar; allowed: {ALLOWED}")
    return _open_folder(path, split)


def decode(data: bytes) -> UInt8[Tensor, "3 h w"]:
    """An encoded image as RGB, turned upright by its EXIF orientation, transparency dropped.

    Of an animation the first frame; of 16 bits the upper 8. The GIL is free while pixels are
    decoded. A file without its end is `Unreadable`. Damage further inside is found for sure only in
    PNG, the one format with checksums.
    """
    if not data:
        raise Unreadable("empty file")
    try:
        # Of WebP only the simple forms: torchvision knows neither the orientation nor the animation
        # that the extended one, VP8X, may hold.
        if data[:2] == b"\xff\xd8" or data[8:16] in (b"WEBPVP8 ", b"WEBPVP8L"):
            # torch warns of memory that it may not write to; the copy is 1 % of the decoding.
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return decode_image(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=True)
        # Not torchvision's decode_png: a damaged PNG ends the process there. In 0.29, 595 of 600
        # with a few bytes changed or with zeros for an end were segmentation faults.
        if data.startswith(_PNG):
            _require_checksums(data)
        with Image.open(io.BytesIO(data)) as picture:
            return _rgb(picture)
    except Unreadable:
        raise
    except struct.error:
        raise Unreadable("truncated") from None
    except UnidentifiedImageError:
        raise Unreadable(f"in no known image format, it begins with {data[:8]!r}") from None
    except Exception as error:  # of PIL's plugins each has kinds of its own
        raise Unreadable(_first_line(error)) from error


def shrink(image: UInt8[Tensor, "3 h w"], side: int) -> UInt8[Tensor, "3 new_h new_w"]:
    """The longer side brought down to `side`, antialiased bicubic; smaller images as they are."""
    sides = image.shape[1:]
    if max(sides) <= side:
        return image
    size = [max(1, round(n * side / max(sides))) for n in sides]
    return functional.interpolate(image[None], size, mode="bicubic", antialias=True)[0]


def _first_line(error: Exception) -> str:
    """What an error says, without the place in torchvision's sources or the lines after."""
    line = str(error).split("\n")[0] or type(error).__name__
    return re.sub(r"^.*\.cpp:\d+, ", "", line)


def _require_checksums(data: bytes) -> None:
    """Every critical chunk of a PNG whole, up to the last. PIL does not look at those of pixels."""
    view, at, kind = memoryview(data), len(_PNG), b""
    while kind != b"IEND":
        size, kind = struct.unpack_from(">I4s", data, at)
        (stored,) = struct.unpack_from(">I", data, at + 8 + size)
        if kind[:1].isupper() and zlib.crc32(view[at + 4 : at + 8 + size]) != stored:
            raise Unreadable("damaged: a checksum does not match")
        at += 12 + size


def _rgb(picture: Image.Image) -> UInt8[Tensor, "3 h w"]:
    picture.load()  # first, so that nothing below hides a truncated file
    with suppress(Exception):  # bad EXIF data is no reason to lose a good picture
        picture = ImageOps.exif_transpose(picture)
    if picture.mode == "F":
        raise Unreadable("pixels are floating-point numbers, which have no agreed range")
    if picture.mode.startswith("I"):  # PIL would clip 16 bits at 255
        gray = np.asarray(picture)
        if gray.min() < 0 or gray.max() > 65535:
            raise Unreadable("pixels are 32-bit numbers, which have no agreed range")
        return torch.from_numpy((gray >> 8).astype(np.uint8)).expand(3, -1, -1)
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


class _Listing(NamedTuple):
    images: list[str]
    folders: list[str]
    shards: list[str]


def _listing(folder: str | Path) -> _Listing:
    """Names in a folder, sorted. Their kind comes with them: no file is opened or asked about."""
    found = _Listing([], [], [])
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            extension = name[name.rfind(".") :].lower()
            if name.startswith("."):
                continue
            if entry.is_dir():
                found.folders.append(name)
            elif extension in EXTENSIONS:
                found.images.append(name)
            elif extension in (".parquet", ".tar"):
                found.shards.append(name)
    for names in found:
        names.sort()
    return found


def _below(folder: str, prefix: str) -> list[str]:
    """All images in a folder and its subfolders, each with the prefix."""
    images, folders, _ = _listing(folder)
    found = [prefix + name for name in images]
    for name in folders:
        found += _below(f"{folder}/{name}", f"{prefix}{name}/")
    return found


def _open_folder(root: Path, split: str) -> Source:
    splits = _split_folders(root)
    chosen = _choose(split, splits or ["train"], root)
    base = root / chosen if splits else root
    direct, folders, _ = _listing(base)
    inner = {name: _below(f"{base}/{name}", f"{name}/") for name in folders}
    inner = {name: paths for name, paths in inner.items() if paths}
    paths = [*direct, *chain.from_iterable(inner.values())]
    # Ids are the same in every split, even where one of them lacks a class.
    known = {name for other in splits for name in _listing(root / other).folders}
    classes = tuple(sorted(known | inner.keys()))
    labeled = {}
    if not direct and len(classes) > 1:
        ids = {name: i for i, name in enumerate(classes)}
        labels = np.repeat([ids[name] for name in inner], [len(paths) for paths in inner.values()])
        labeled = {"labels": torch.from_numpy(labels), "classes": classes}
    return Pictures(
        name=root.resolve().name,
        count=len(paths),
        read=lambda i: _read(f"{base}/{paths[i]}"),
        place=lambda i: f"{base}/{paths[i]}",
        **labeled,
    )


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _split_folders(root: Path) -> list[str]:
    """Subfolders that are splits. A single one among others may be a class: trains, say."""
    if not root.is_dir():
        return []
    folders = _listing(root).folders
    named = [name for name in folders if name.lower() in _SPLITS]
    if len(named) == 1 and len(folders) > 1 and not _listing(root / named[0]).folders:
        return []
    inside = {name: _listing(root / name) for name in named}
    return [name for name, found in inside.items() if found.images or found.folders]


def _choose(split: str, there: Iterable[str], place: str | Path) -> str:
    """The name that a split has at a place."""
    own = {name.lower(): name for name in there}
    for name in _CALLED.get(split, (split,)):
        if name.lower() in own:
            return own[name.lower()]
    raise ValueError(f"{place} has no split {split!r}; there is {', '.join(sorted(own.values()))}")


def _shards(path: Path, suffix: str) -> dict[str, list[Path]]:
    """Shards by the split that each belongs to."""
    if path.is_file():
        # Whoever names one file means it, whatever it is called.
        own = _split_in(path.name) or "train"
        return {name: [path] for name in ("train", own)} if path.suffix.lower() == suffix else {}
    found: dict[str, list[Path]] = {}
    for folder in (path, path / "data"):
        inside = [folder / name for name in sorted(_SPLITS)]
        for part in filter(Path.is_dir, [folder, *inside]):
            default = "train" if part is folder else part.name
            for name in _listing(part).shards:
                if name.lower().endswith(suffix):
                    found.setdefault(_split_in(name) or default, []).append(part / name)
    return found


def _split_in(name: str) -> str | None:
    """The split that a shard's name tells, as in train-00000-of-00002 or imagenet1k-val-07."""
    words = [word for word in re.split(r"[-_.]", name.lower()) if word in _SPLITS]
    whole = re.match(r"(.+?)-\d{5}-of-\d{5}", name)
    return words[0] if words else whole[1] if whole else None


def _missing(path: Path) -> str:
    """Words for a path that is not there, with the names that come nearest to it."""
    there, wanted = path.absolute(), path.name
    while not there.exists():
        wanted, there = there.name, there.parent
    names = sorted(os.listdir(there)) if there.is_dir() else []
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or names[:3]
    hint = f"{there} has {', '.join(near)}" if near else f"{there} is empty"
    return f"no file or folder {path}; {hint}; a source can be {ALLOWED}"


def _labeled(values: Sequence[Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Labels and classes of `Pictures` from ids or words, None where an image has no label."""
    if all(value is None or value == -1 for value in values):
        return {}
    if any(isinstance(value, str) for value in values):
        names = sorted({str(value) for value in values if value is not None})
        ids = {name: i for i, name in enumerate(names)}
        values = [None if value is None else ids[str(value)] for value in values]
    labels = torch.tensor([-1 if value is None else int(value) for value in values])
    if not names or len(names) <= int(labels.max()):
        names = [str(i) for i in range(int(labels.max()) + 1)]
    return {"labels": labels, "classes": tuple(names)}


class _RowGroups:
    """Cells of a column of parquet files, read a row group at a time and kept while they fit.

    A parquet file has no rows to go to, only groups of them (100 to 1,000 images), each packed as
    one. Up to a quarter of the machine's memory is used so as to unpack every group only once.
    """

    def __init__(self, files: Sequence[Path], metadata: Sequence[Any], column: str) -> None:
        self.files, self.metadata, self.column = files, metadata, column
        self.groups = [(k, g) for k, m in enumerate(metadata) for g in range(m.num_row_groups)]
        sizes = [metadata[k].row_group(g) for k, g in self.groups]
        self.starts = [0, *accumulate(size.num_rows for size in sizes)]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        self.room = memory // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.kept: dict[int, Any] = {}
        self.door = threading.Lock()
        self.busy = [threading.Lock() for _ in self.groups]
        total = sum(size.total_byte_size for size in sizes)
        if total > self.room:
            warnings.warn(
                f"{files[0].parent} unpacks to {total / 2**30:.3g} GiB, more than the "
                f"{self.room / 2**30:.3g} GiB kept in memory: most images will cost the reading of "
                "a whole row group; image files or tar shards are faster",
                stacklevel=4,
            )

    def place(self, i: int) -> str:
        """The file of row i and its row in there."""
        k, g = self.groups[group := self._group(i)]
        return f"{self.files[k]}:{i - self.starts[group - g]}"

    def cell(self, i: int) -> bytes:
        """The bytes of row i."""
        group = self._group(i)
        found = self.kept.get(group)
        if found is None:
            with self.busy[group]:  # the others wait for the first that wants this group
                found = self.kept.get(group)
                found = self._unpacked(group) if found is None else found
        value = found[i - self.starts[group]].as_py()
        value = value["bytes"] if isinstance(value, dict) else value
        if value is None:
            raise Unreadable("the row holds no image bytes")
        return value

    def _group(self, i: int) -> int:
        return bisect_right(self.starts, i) - 1

    def _unpacked(self, group: int) -> Any:
        from pyarrow import ArrowException, parquet

        k, g = self.groups[group]
        file, metadata = self.files[k], self.metadata[k]
        try:
            # A reader of its own: Arrow does not promise that threads may share one.
            with parquet.ParquetFile(file, memory_map=True, metadata=metadata) as reader:
                found = reader.read_row_group(g, columns=[self.column], use_threads=False)[0]
        except ArrowException as error:
            raise Unreadable(_first_line(error)) from error
        with self.door:
            self.kept[group] = found
            used = sum(column.nbytes for column in self.kept.values())
            while used > self.room:
                used -= self.kept.pop(next(iter(self.kept))).nbytes
        return found


def _open_parquet(path: Path, files: list[Path]) -> Source:
    from pyarrow import ArrowException, parquet

    values = []
    try:
        metadata = [parquet.read_metadata(file, memory_map=True) for file in files]
        schema = parquet.read_schema(files[0], memory_map=True)
        label = _label_column(schema)
        for file in files if label else []:
            values += parquet.read_table(file, columns=[label], memory_map=True)[0].to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path}: parquet that cannot be read, {_first_line(error)}") from error
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    rows = _RowGroups(files, metadata, _image_column(schema, path))
    return Pictures(
        name=path.resolve().name,
        count=rows.starts[-1],
        read=rows.cell,
        place=rows.place,
        **_labeled(values, names),
    )


def _image_column(schema: Any, path: Path) -> str:
    """The column of encoded images: `image.bytes` as Hugging Face has it, or plain bytes."""
    leaves = {}
    for field in schema:
        kind = str(field.type)
        if kind in ("binary", "large_binary"):
            leaves[field.name] = field.name
        elif re.match(r"struct<.*\bbytes: (large_)?binary", kind):
            leaves[field.name] = f"{field.name}.bytes"
    for name in ("image", "img", *leaves):
        if name in leaves:
            return leaves[name]
    raise ValueError(f"{path} has no column of image bytes; it has {', '.join(schema.names)}")


def _label_column(schema: Any) -> str | None:
    """The column with one class for each row, if there is one."""
    kinds = {field.name: str(field.type) for field in schema}
    good = [
        name for name in _LABELS if re.match(r"u?int|bool|(large_)?string", kinds.get(name, ""))
    ]
    return good[0] if good else None


class _Member(NamedTuple):
    name: str
    offset: int
    size: int


def _members(tar: io.FileIO) -> list[_Member]:
    """Files in a tar, by its headers alone.

    tarfile takes 39 us for each and this 3, so ImageNet's 2.6 million take 8 s instead of 100.
    Whatever is not a plain header is left to tarfile.
    """
    end, at, found = os.fstat(tar.fileno()).st_size, 0, []
    while at < end:
        head = os.pread(tar.fileno(), 512, at)
        if head[:1] == b"\0":
            break
        kind, digits, start = head[156:157], head[124:136].rstrip(b"\0 "), at + 512
        plain = head[257:262] == b"ustar" and kind in (b"0", b"\0", b"5", b"x")
        if not plain or not digits.isdigit():
            return _members_by_tarfile(tar)
        size = int(digits, 8)
        if start + size > end:
            raise ValueError("it ends in the middle of a file")
        if kind == b"x" and re.search(rb" (path|size)=", os.pread(tar.fileno(), size, start)):
            return _members_by_tarfile(tar)
        if kind in (b"0", b"\0"):
            parts = (part.split(b"\0")[0] for part in (head[345:500], head[:100]))
            name = b"/".join(part for part in parts if part)
            found.append(_Member(os.fsdecode(name), start, size))
        at = start + -(-size // 512) * 512
    return found


def _members_by_tarfile(tar: io.FileIO) -> list[_Member]:
    tar.seek(0)
    with tarfile.open(fileobj=tar, mode="r:") as archive:
        return [_Member(m.name, m.offset_data, m.size) for m in archive if m.isfile()]


def _open_tar(path: Path, files: list[Path]) -> Source:
    shard, names, spans, values = [], [], [], []
    for k, file in enumerate(files):
        try:
            with open(file, "rb", buffering=0) as tar:
                for image, label in _samples(tar):
                    shard.append(k)
                    names.append(image.name)
                    spans.append((image.offset, image.size))
                    values.append(label)
        except (ValueError, tarfile.TarError) as error:
            raise ValueError(f"{file} cannot be read as a WebDataset tar: {error}") from error
    where = np.array(spans)

    def read(i: int) -> bytes:
        # Opened anew: a set may have more shards than a process may have files open.
        with open(files[shard[i]], "rb", buffering=0) as tar:
            return os.pread(tar.fileno(), int(where[i, 1]), int(where[i, 0]))

    return Pictures(
        name=path.resolve().name,
        count=len(names),
        read=read,
        place=lambda i: f"{files[shard[i]]}:{names[i]}",
        **_labeled(values),
    )


def _samples(tar: io.FileIO) -> list[tuple[_Member, int | str | None]]:
    """Images of a tar and their labels: files of one name, up to its first dot, belong together."""
    groups: dict[str, dict[str, _Member]] = {}
    for member in _members(tar):
        if match := re.match(r"((?:.*/)?[^./][^./]*)\.([^/]*)$", member.name):
            groups.setdefault(match[1], {})[match[2].lower()] = member
    samples = []
    for parts in groups.values():
        kinds = [kind for kind in parts if f".{kind.rpartition('.')[2]}" in EXTENSIONS]
        if kinds:
            label = None
            for kind in ("json", "cls"):
                if kind in parts:
                    text = os.pread(tar.fileno(), parts[kind].size, parts[kind].offset)
                    label = _label_in(text.decode())
            samples.append((parts[kinds[0]], label))
    return samples


def _label_in(text: str) -> int | str | None:
    """A class as `key.cls` has it, a number or a word, or in an entry of `key.json`."""
    if not text.lstrip().startswith("{"):
        return int(text) if text.strip().lstrip("-").isdigit() else text.strip()
    entries = json.loads(text)
    return next((entries[name] for name in _LABELS if name in entries), None)


def _open_builtin(split: str) -> Source:
    from compressive.data.builtin import CLASSES, pictures

    split = _choose(split, _BUILTIN, "builtin")
    pixels, labels = (torch.from_numpy(a) for a in pictures(_BUILTIN[split], split=split))
    return Pictures(
        name="builtin",
        count=len(pixels),
        read=lambda i: pixels[i],
        place=lambda i: f"builtin:{split}:{i}",
        labels=labels,
        classes=CLASSES,
    )


def _open_torchvision(place: str, split: str) -> Source:
    from torchvision import datasets

    name, _, folder = place.removeprefix("torchvision:").partition("@")
    kind = getattr(datasets, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, datasets.VisionDataset)):
        near = difflib.get_close_matches(name, datasets.__all__, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "it has CIFAR10, STL10, ..."
        raise ValueError(f"torchvision.datasets has no {name!r}; {hint}")
    root = Path(folder or os.environ.get("COMPRESSIVE_DATA") or "~/.cache/compressive").expanduser()
    accepts = _parameters(kind)
    # With `str` in place of a decoder a set tells its files and their labels without reading any.
    offered: dict[str, Any] = {"root": str(root), "loader": str}
    given = {key: value for key, value in offered.items() if key in accepts}
    make = cast(Callable[..., Any], kind)

    def build(**chosen: Any) -> Any:
        try:
            return make(**given, **chosen)
        except (OSError, RuntimeError):  # not there yet; some sets refuse to download twice
            if "download" not in accepts:
                raise
            root.mkdir(parents=True, exist_ok=True)
            return make(**given, **chosen, download=True)

    try:
        return _of_torchvision(place, _with_split(build, accepts, split, place), "loader" in given)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"{place} is not in {root} and could not be fetched ({_first_line(error)}); it needs "
            f"internet once, or the folder that has it: torchvision:{name}@FOLDER"
        ) from error
    except TypeError as error:
        raise ValueError(
            f"{place} is not a set of images with one class each ({_first_line(error)})"
        ) from error


def _parameters(kind: type) -> set[str]:
    """What a class can be made with; `**kwargs` stands for what its parent takes."""
    names = set()
    for parent in kind.__mro__:
        parameters = inspect.signature(parent.__init__).parameters
        names |= parameters.keys()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return names


def _with_split(build: Callable[..., Any], accepts: set[str], split: str, place: str) -> Any:
    """A torchvision set in the way it wants its split told: a flag, a word, or not at all."""
    if "split" not in accepts:
        flagged = "train" in accepts
        chosen = _choose(split, ("train", "test") if flagged else ("train",), place)
        return build(train=chosen == "train") if flagged else build()
    words = ""
    for name in _CALLED.get(split, (split,)):
        try:
            return build(split=name)
        except ValueError as error:
            if "split" not in str(error):
                raise
            words = _first_line(error)
    raise ValueError(f"{place} has no split {split!r}; {words}")


def _of_torchvision(place: str, dataset: Any, by_path: bool) -> Source:
    match dataset[0]:
        case (str() | Image.Image(), int() | np.integer() | None):
            every = range(len(dataset))
        case _:
            raise TypeError("its items are not an image and a class")
    files: list[str] = []
    known = (getattr(dataset, name, None) for name in ("targets", "labels", "y"))
    values = next((v for v in known if v is not None and len(v) == len(dataset)), None)
    if by_path:
        files, values = map(list, zip(*(dataset[i] for i in every), strict=True))
    elif values is None:
        values = [dataset[i][1] for i in every]

    def pixels(i: int) -> UInt8[Tensor, "3 h w"]:
        try:
            return _rgb(dataset[i][0])
        except Exception as error:  # as in `decode`
            raise Unreadable(_first_line(error)) from error

    names = getattr(dataset, "classes", None) or []
    return Pictures(
        name=place.partition("@")[0],
        count=len(dataset),
        read=(lambda i: _read(files[i])) if by_path else pixels,
        place=(lambda i: files[i]) if by_path else (lambda i: f"{place}:{i}"),
        **_labeled(
            [None if value is None else int(value) for value in values],
            # ImageNet's classes have several names each.
            [name if isinstance(name, str) else ", ".join(name) for name in names],
        ),
    )

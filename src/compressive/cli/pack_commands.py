"""The command that packs images into shards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from compressive.cli.engine_options import CpusPerTask, EngineName
from compressive.cli.remote_output import check_remote_folder, print_stored
from compressive.cli.terminal import (
    one_line_errors,
    path_argument,
    path_option,
    print_line,
    print_next,
    require_at_least,
)
from compressive.data.location import check_exists
from compressive.engine.choice import LOCAL, parse_engine
from compressive.engine.opening import open_engine
from compressive.rundir.lock import ensure_writable
from compressive.rundir.places import join_places
from compressive.storage.address import is_remote

if TYPE_CHECKING:
    from compressive.data.pack import Packed

_TO_PACK_HELP = "Images to pack, as for pretrain."
_SHORTER_SIDE_HELP = (
    "Shrink larger images to this shorter side, in pixels; 0: keep the original files."
)
_QUALITY_HELP = "JPEG quality of resized images, 1 to 100; 0: PNG."
_SHARD_FORMAT_HELP = "tar (WebDataset) or parquet (Hugging Face)."
_DUPLICATES_HELP = "Leave out images whose pixels equal those of an earlier image of the split."
_PER_SHARD_HELP = "Images in each shard."
_SHARD_FORMATS = ("tar", "parquet")


def pack_command(
    data: Annotated[list[str], path_argument(help=_TO_PACK_HELP)],
    out: Annotated[str, path_option(help="Folder of the shards, also s3:// or gs://.")],
    size: Annotated[int, typer.Option(help=_SHORTER_SIDE_HELP)] = 0,
    quality: Annotated[int, typer.Option(help=_QUALITY_HELP)] = 92,
    kind: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help=_SHARD_FORMAT_HELP)
    ] = "tar",
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help=_DUPLICATES_HELP)
    ] = False,
    images_per_shard: Annotated[int, typer.Option(help=_PER_SHARD_HELP)] = 2000,
    workers: Annotated[int, typer.Option(help="Threads; 0: one per core.")] = 0,
    engine: EngineName = LOCAL,
    cpus_per_task: CpusPerTask = 0,
) -> None:
    """Write images to tar or parquet shards, which are faster to read than many files.

    Keeps order, labels, class names and splits. Unreadable images are left out and listed in
    unreadable.txt. The same command resumes an interrupted one.
    """
    with one_line_errors():
        require_at_least(0, size=size, quality=quality, workers=workers)
        require_at_least(1, images_per_shard=images_per_shard)
        if kind not in _SHARD_FORMATS:
            raise ValueError(f"--format must be {' or '.join(_SHARD_FORMATS)}, got {kind!r}")
        if quality > 100:
            raise ValueError(f"--quality must be 0 to 100, got {quality}")
        choice = parse_engine(engine, cpus_per_task=cpus_per_task)
        place = join_places(data)
        check_exists(place)
        if is_remote(out):
            check_remote_folder(out)
        else:
            ensure_writable(Path(out))
        from compressive.data.pack import pack_images

        with open_engine(choice) as opened, _shard_folder(out, choice.is_local) as folder:
            packed = pack_images(
                place,
                folder,
                size=size,
                quality=quality,
                kind=cast(Literal["tar", "parquet"], kind),
                drop_duplicates=drop_duplicates,
                images_per_shard=images_per_shard,
                workers=workers,
                engine=opened,
                shards=out if is_remote(out) and not choice.is_local else "",
            )
        for line in _split_lines(packed):
            print_line(line)
        print_stored(out)
        print_next("pretrain", out)


@contextmanager
def _shard_folder(out: str, is_local: bool) -> Iterator[str | Path]:
    """Yield the folder of the shards; if it is on storage, a local one that is mirrored.

    The processes of a cluster upload shards themselves, so that only the rest is mirrored.
    """
    if not is_remote(out):
        yield out
        return
    from compressive.rundir.stored_output import mirrored_folder

    def is_ahead(local: Path, _: object, objects: Mapping[str, object]) -> bool:
        return all((local / name).exists() for name in objects)

    # The plan first: with it, the same command resumes on another machine.
    ignored = () if is_local else tuple(f".{kind}" for kind in _SHARD_FORMATS)
    options = {"first": (".pack/plan",), "is_ahead": is_ahead, "ignored": ignored}
    with mirrored_folder(out, print_line, **options) as local:
        yield local


def _split_lines(packed: "Packed") -> list[str]:
    """Return what was written, one line for each split."""
    lines = []
    for split, counts in packed.splits.items():
        left = [(counts.unreadable, "unreadable"), (counts.duplicates, "duplicates")]
        words = "".join(f", {count:,} {name} left out" for count, name in left if count)
        noun = "shard" if counts.shards == 1 else "shards"
        lines.append(f"{split}: {counts.images:,} images in {counts.shards:,} {noun}{words}")
    if packed.shared:
        lines.append(f"note: {packed.shared:,} images are also in another split; all are kept")
    if any(counts.unreadable for counts in packed.splits.values()):
        lines.append(f"unreadable images: {packed.folder / 'unreadable.txt'}")
    return lines

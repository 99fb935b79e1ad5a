"""Inspect a folder of images: one HTML page and one table."""

from pathlib import Path
from typing import NamedTuple

from compressive.config import Data
from compressive.data.location import ImageData
from compressive.data.several import place_of, split_tables
from compressive.device import pick_device
from compressive.evaluation.embed import check_table_path
from compressive.evaluation.frozen_model import open_model
from compressive.inspection.duplicates import NEAR_SIMILARITY
from compressive.inspection.findings import Findings, find
from compressive.inspection.page import inspection_page
from compressive.inspection.scan import data_splits, scan
from compressive.inspection.table import INSPECTION_FORMATS, inspection_columns, table_bytes
from compressive.progress import Display
from compressive.rundir.files import local_path, write_files
from compressive.rundir.lock import ensure_writable
from compressive.rundir.places import describe_places

DEFAULT_ENCODER = "cifar10-byol-r18"
NO_ENCODER = "none"
_CLUSTERS = 20


class Inspection(NamedTuple):
    """The files that were written, and the main numbers."""

    page: Path
    table: Path
    images: int
    unreadable: list[tuple[str, str]]  # location, reason
    exact_copies: int  # images that equal an earlier one
    near_groups: int
    leaks: int  # groups with images in more than one split
    label_errors: int | None  # None without labels or encoder


def inspect(
    data: ImageData,
    out: str | Path = "inspect.html",
    *,
    table: str | Path = "inspect.csv",
    encoder: str | Path = DEFAULT_ENCODER,
    clusters: int = _CLUSTERS,
    near_similarity: float = NEAR_SIMILARITY,
    network: str = "",
    size: int = 0,
    device: str = "auto",
    cache: str | Path | None = None,
    display: Display | None = None,
) -> Inspection:
    """Write a page and a table about all images of a source, in all its splits.

    The arguments are those of `compressive inspect`. `encoder="none"` compares only pixels: no
    outliers, clusters, label errors and map. `cache` is a folder that keeps features for the next
    call.
    """
    place = place_of(data)
    out, table = _check_outputs(out, table, place)
    if not 0 < near_similarity <= 1:
        raise ValueError(f"--near-similarity must be above 0 and at most 1, got {near_similarity}")
    if clusters < 1:
        raise ValueError(f"--clusters must be 1 or more, got {clusters}")
    where = pick_device(device, called="--device")
    splits = data_splits(data, Data().max_pixels)
    model = None
    if str(encoder) != NO_ENCODER:
        model = open_model(str(encoder), where, network=network, size=size)
    with display or Display() as show:
        for line in split_tables({split.name: split.source for split in splits}):
            show.say(line)
        made = scan(splits, model, where, show, cache=None if cache is None else local_path(cache))
        found = find(made, clusters=clusters, threshold=near_similarity, device=where, show=show)
        show.begin("writing the page")
        page = inspection_page(found, describe_places(place), model, near_similarity)
    content = table_bytes(inspection_columns(found), table.suffix.lower())
    write_files({table: [content], out: [page.encode(errors="replace")]})
    return _inspection(found, out, table)


def _check_outputs(out: str | Path, table: str | Path, data: str) -> tuple[Path, Path]:
    """Return the paths of page and table; raise ValueError if they cannot be written."""
    table = check_table_path(table, data, INSPECTION_FORMATS, "inspect", called="--table")
    out = local_path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out must end with .html, got {str(out)!r}")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name a file in it, such as {out}/inspect.html")
    if not out.parent.exists():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; create it first")
    ensure_writable(out.parent)
    return out, table


def _inspection(found: Findings, out: Path, table: Path) -> Inspection:
    scan = found.scan
    return Inspection(
        page=out,
        table=table,
        images=len(scan),
        unreadable=[(scan.origin(i), why) for i, why in sorted(scan.reasons.items())],
        exact_copies=sum(len(group) - 1 for group in found.exact_groups),
        near_groups=len(found.near_groups),
        leaks=len(found.leaks),
        label_errors=None if found.labels is None else len(found.label_errors),
    )

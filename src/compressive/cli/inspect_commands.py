"""Commands that look at images with an encoder: inspect, neighbors."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from compressive.cli.completion import complete_encoder
from compressive.cli.evaluate_commands import DeviceName, EncoderName, InputSize, TimmName
from compressive.cli.terminal import (
    SafeTable,
    one_line_errors,
    path_argument,
    path_option,
    print_line,
    print_next,
    require_at_least,
)
from compressive.config import check_device_name
from compressive.data.location import check_exists
from compressive.rundir.places import join_places
from compressive.weights import require_path

_INSPECT_ENCODER = "cifar10-byol-r18"
_INSPECT_ENCODER_HELP = (
    "As for embed; none: compare only pixels, which is faster, without outliers, clusters, label "
    "errors and map."
)
_CLUSTERS_HELP = "Maximum number of clusters; small sets get about one per 50 images."
_NEAR_HELP = (
    "Similarity of near duplicates, at most 1; a lower value finds more, with more false positives."
)
_TABLE_HELP = "Table to write, one row per image: .csv or .parquet; also on s3:// or gs://."
_CACHE_HELP = "Folder that keeps the features for the next call."
_IN_HELP = "Images to search, as for pretrain, or a features file of embed (.parquet, .npz, .csv); "
_IN_HELP += "may be repeated."
_PRINTED = 5  # unreadable files that are printed


def inspect_command(
    data: Annotated[list[str], path_argument(help="Images, as for pretrain; all splits are read.")],
    encoder: Annotated[
        str, path_option(help=_INSPECT_ENCODER_HELP, autocompletion=complete_encoder)
    ] = _INSPECT_ENCODER,
    out: Annotated[
        str, path_option(help="Page to write, also on s3:// or gs://.")
    ] = "inspect.html",
    table: Annotated[str, path_option(help=_TABLE_HELP)] = "inspect.csv",
    clusters: Annotated[int, typer.Option(help=_CLUSTERS_HELP)] = 20,
    near_similarity: Annotated[float, typer.Option(help=_NEAR_HELP)] = 0.94,
    cache: Annotated[Path | None, path_option(help=_CACHE_HELP)] = None,
    network: TimmName = "",
    size: InputSize = 0,
    device: DeviceName = "auto",
) -> None:
    """Show what is in a folder of images: one page and one table.

    Counts, sizes, formats, unreadable files, exact and near duplicates, leaks between splits,
    outliers, clusters and a map; with labels also likely label errors.
    """
    with one_line_errors():
        check_device_name(device, "--device")
        require_at_least(1, clusters=clusters)
        require_at_least(0, size=size)
        if not 0 < near_similarity <= 1:
            raise ValueError(
                f"--near-similarity must be above 0 and at most 1, got {near_similarity:g}"
            )
        require_path(encoder)
        place = join_places(data)
        check_exists(place)
        from compressive.inspection.run import inspect
        from compressive.rundir.stored_output import uploaded_files

        _require_one_process("inspect")
        with uploaded_files(out, table) as (page_path, table_path):
            found = inspect(
                place,
                page_path,
                table=table_path,
                encoder=encoder,
                clusters=clusters,
                near_similarity=near_similarity,
                network=network,
                size=size,
                device=device,
                cache=cache,
            )
    for origin, reason in found.unreadable[:_PRINTED]:
        print_line(f"unreadable: {origin}: {reason}")
    if len(found.unreadable) > _PRINTED:
        print_line(f"unreadable: {len(found.unreadable) - _PRINTED:,} more, listed in {table}")
    print_line(f"images: {found.images:,} ({len(found.unreadable):,} unreadable)")
    print_line(f"exact copies: {found.exact_copies:,}")
    print_line(f"groups of near duplicates: {found.near_groups:,}")
    print_line(f"groups that are in more than one split: {found.leaks:,}")
    if found.label_errors is not None:
        print_line(f"likely label errors: {found.label_errors:,}")
    print_line(f"table: {table}")
    print_line(f"page: {out}")


def neighbors_command(
    encoder: EncoderName,
    image: Annotated[Path, path_argument(help="The image to compare with.")],
    data: Annotated[list[str], path_option("--in", help=_IN_HELP)],
    count: Annotated[int, typer.Option(help="Images to find.")] = 10,
    out: Annotated[
        Path | None, path_option(help="Also write them: .html (a page), .csv or .parquet.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the images; all: every split.")] = "all",
    network: TimmName = "",
    size: InputSize = 0,
    device: DeviceName = "auto",
) -> None:
    """Find the images that are most similar to an image, by the encoder's features."""
    with one_line_errors():
        check_device_name(device, "--device")
        require_at_least(1, count=count)
        require_at_least(0, size=size)
        require_path(encoder)
        if not image.is_file():
            raise ValueError(f"no image file {image}")
        place = join_places(data)
        check_exists(place)
        from compressive.inspection.neighbors import neighbors

        _require_one_process("neighbors")
        found = neighbors(
            encoder,
            image,
            place,
            count=count,
            out=out,
            split=split,
            network=network,
            size=size,
            device=device,
        )
    columns = Table("similarity", "class", "image")
    for each in found.neighbors:
        columns.add_row(f"{each.similarity:.3f}", each.label or "", each.image)
    Console(soft_wrap=True).print(SafeTable(columns))
    if found.unreadable:
        print_line(f"skipped: {len(found.unreadable):,} unreadable images")
    if found.path is not None:
        print_line(f"written: {found.path}")
    print_next("inspect", *data, "--encoder", encoder)


def _require_one_process(name: str) -> None:
    from compressive.distributed import launched

    if launched("WORLD_SIZE", 1) > 1:
        raise ValueError(f"{name} runs in one process; start it without torchrun")

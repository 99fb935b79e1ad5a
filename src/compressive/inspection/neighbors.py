"""Search the images that are most similar to one image."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from compressive.config import Data
from compressive.data.decode import Unreadable, decode
from compressive.data.location import ImageData
from compressive.data.several import is_path, place_of, split_tables
from compressive.data.source import ImageSource, read_file
from compressive.data.sources import open_source
from compressive.device import pick_device
from compressive.evaluation.embed import as_text, check_table_path, embed_source
from compressive.evaluation.features import network_fingerprint
from compressive.evaluation.frozen_model import FrozenModel, open_model
from compressive.inspection.feature_file import is_feature_file, read_features
from compressive.inspection.scan import DataSplit, data_splits
from compressive.inspection.search import nearest
from compressive.inspection.table import INSPECTION_FORMATS, table_bytes
from compressive.inspection.tiles import thumbnail_url
from compressive.progress import Display, printable
from compressive.reporting.page import page_template
from compressive.rundir.files import local_path, write_bytes
from compressive.rundir.places import split_places

_EVERY_SPLIT = "all"
_PAGES = (".html", ".htm")


class SimilarImage(NamedTuple):
    """An image that was found."""

    image: str
    similarity: float  # cosine of features
    label: str | None


class Similar(NamedTuple):
    """The images that were found, the most similar first, and the file that was written."""

    neighbors: list[SimilarImage]
    unreadable: list[tuple[str, str]]
    path: Path | None


class _Bank(NamedTuple):
    """Features of the images that are searched."""

    features: Float[Tensor, "count feat"]
    image: list[str]
    label: list[str | None]
    unreadable: list[tuple[str, str]]
    pixels: Any  # function of a position that returns an image; None: unknown


def neighbors(
    encoder: str | Path,
    image: str | Path,
    data: ImageData,
    *,
    count: int = 10,
    out: str | Path | None = None,
    split: str = _EVERY_SPLIT,
    network: str = "",
    size: int = 0,
    device: str = "auto",
    display: Display | None = None,
) -> Similar:
    """Return the `count` images of `data` that are most similar to an image, by cosine.

    `data` is a source of images, or a features file that `embed` wrote with the same encoder. The
    ending of `out` chooses a page (.html) or a table (.csv, .parquet).
    """
    if count < 1:
        raise ValueError(f"--count must be 1 or more, got {count}")
    out = None if out is None else _check_neighbors_out(out, data)
    path = local_path(image)
    try:
        pixels = decode(read_file(str(path)))
    except (Unreadable, OSError) as error:
        raise ValueError(f"cannot read the image {path}: {error}") from None
    where = pick_device(device, called="--device")
    model = open_model(str(encoder), where, network=network, size=size)
    one = ImageSource(name=path.name, count=1, read=lambda _: pixels, place=lambda _: str(path))
    with display or Display() as show:
        query = embed_source(model, one, where, Display(quiet=True))[0].feats.cpu()
        bank = _open_bank(data, split, model, where, show)
    near = nearest(
        F.normalize(query, dim=1), F.normalize(bank.features, dim=1), count, device=where
    )
    places = near.index[0].tolist()
    found = [
        SimilarImage(bank.image[i], round(cosine, 6), bank.label[i])
        for i, cosine in zip(places, near.cosine[0].tolist(), strict=True)
    ]
    if out is not None and out.suffix.lower() in _PAGES:
        shown = [_thumbnail(bank, i) for i in places]
        write_bytes(out, _page(path, pixels, found, shown, model).encode(errors="replace"))
    elif out is not None:
        columns: dict[str, list[Any]] = {
            "image": [each.image for each in found],
            "similarity": [each.similarity for each in found],
            "class": [each.label for each in found],
        }
        write_bytes(out, table_bytes(columns, out.suffix.lower()))
    return Similar(found, bank.unreadable, out)


def _check_neighbors_out(out: str | Path, data: ImageData) -> Path:
    return check_table_path(out, data, (*_PAGES, *INSPECTION_FORMATS), "neighbors")


def _open_bank(
    data: ImageData, split: str, model: FrozenModel, device: torch.device, show: Display
) -> _Bank:
    """Read features from a file, or compute those of all images."""
    places = split_places(place_of(data)) if is_path(data) else []
    if len(places) == 1 and is_feature_file(places[0]):
        return _stored_bank(places[0], model)
    if split == _EVERY_SPLIT:
        splits = data_splits(data, Data().max_pixels)
    else:
        splits = [DataSplit(split, open_source(data, split), 0)]
    for line in split_tables({each.name: each.source for each in splits}):
        show.say(line)
    features, image, label, unreadable, places = [], [], [], [], []
    for each in splits:
        made, bad = embed_source(model, each.source, device, show)
        features.append(made.feats.cpu())
        unreadable += bad
        names = [as_text(str(name)) for name in each.source.classes or ()]
        for i, k in zip(made.index.tolist(), made.labels.tolist(), strict=True):
            places.append((each.source, i))
            image.append(as_text(each.source.origin(i)))
            label.append(names[k] if 0 <= k < len(names) else None)

    def pixels(place: int) -> Tensor:
        source, i = places[place]
        return source.image(i)

    return _Bank(torch.cat(features), image, label, unreadable, pixels)


def _stored_bank(data: str, model: FrozenModel) -> _Bank:
    """Return stored features; raise ValueError if another encoder made them."""
    stored = read_features(data)
    own = network_fingerprint(model.network)
    if stored.fingerprint is not None and stored.fingerprint != own:
        raise ValueError(
            f"{data} has features of another encoder than {model.name}; run: compressive embed"
        )
    if stored.features.shape[1] != model.feature_dim:
        sizes = f"{stored.features.shape[1]} numbers per image, {model.name} {model.feature_dim}"
        raise ValueError(f"{data} has {sizes}; it is of another encoder")
    features = torch.from_numpy(stored.features.copy())

    def pixels(place: int) -> Tensor:
        return decode(read_file(stored.image[place]))

    return _Bank(features, stored.image, list(stored.label), [], pixels)


def _thumbnail(bank: _Bank, place: int) -> str:
    try:
        return thumbnail_url(bank.pixels(place))
    except (Unreadable, OSError):  # a shard, or a file that was moved
        return ""


def _page(
    path: Path, pixels: Tensor, found: list[SimilarImage], shown: list[str], model: FrozenModel
) -> str:
    rows = [
        (url, each.label or "", f"{each.similarity:.3f}", printable(Path(each.image).name))
        for each, url in zip(found, shown, strict=True)
    ]
    content = {
        "title": f"Images similar to {printable(path.name)}",
        "query": thumbnail_url(pixels),
        "rows": rows,
        "encoder": printable(model.name),
    }
    return page_template("compressive.inspection", "neighbors.html.jinja").render(content)

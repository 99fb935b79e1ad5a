"""Write the features of a data set to a parquet, npz or csv file."""

import csv
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compressive.data.loaders import open_loader
from compressive.data.location import ImageData
from compressive.data.several import count_table, is_path, place_of
from compressive.data.source import Source
from compressive.data.sources import open_source
from compressive.device import pick_device, precision
from compressive.engine.local import Engine
from compressive.evaluation.embed_parts import embed_parts, encoder_unit
from compressive.evaluation.features import Features, extract, network_fingerprint
from compressive.evaluation.frozen_model import FrozenModel, open_model
from compressive.progress import Display
from compressive.rundir.files import local_path, write_bytes
from compressive.rundir.lock import ensure_writable
from compressive.rundir.places import split_places
from compressive.storage.address import is_remote

FORMATS = (".parquet", ".npz", ".csv")
METADATA_KEY = "compressive"  # of what made the features, as JSON
FINGERPRINT = "encoder_fingerprint"  # in that JSON: a hash of the weights
Vectors = NDArray[np.float32]  # image, feature
About = dict[str, str]


class Embedding(NamedTuple):
    """The file that was written."""

    path: Path
    count: int
    dim: int
    unreadable: list[tuple[str, str]]  # origin, reason


def embed(
    encoder: str | Path,
    images: ImageData,
    out: str | Path = "features.parquet",
    *,
    split: str = "train",
    network: str = "",
    size: int = 0,
    device: str = "auto",
    engine: Engine | None = None,
    display: Display | None = None,
) -> Embedding:
    """Write one float32 feature vector for each image of a split, with its name and label.

    The arguments are those of `compressive embed`. The ending of `out` chooses the format. Images
    are cropped as in `evaluate`. Unreadable ones are left out. Parquet and npz also have name and
    fingerprint of the encoder, as JSON. `engine` runs the batches; by default this process does.
    """
    out = check_table_path(out, images, FORMATS, "features")
    is_here = engine is None or engine.is_local
    # A cluster has its own devices, which this machine may lack.
    where = pick_device(device if is_here else "cpu", called="--device")
    model = open_model(str(encoder), where, network=network, size=size)
    source = open_source(images, split, max_pixels=model.max_pixels)
    with display or Display() as shown:
        for line in count_table(source):
            shown.say(line)
        if engine is None or engine.is_local:
            found, unreadable = embed_source(model, source, where, shown)
        else:
            whole = encoder_unit(encoder, images, model, source, split, network, size, device)
            found, unreadable = embed_parts(engine, whole, len(source), shown)
    feats, index = found.feats.cpu().numpy(), found.index.cpu()
    names = [as_text(source.origin(int(i))) for i in index]
    about = {
        "encoder": model.name,
        FINGERPRINT: network_fingerprint(model.network),
        "split": split,
    }
    write = {".parquet": _parquet, ".npz": _npz, ".csv": _csv}[out.suffix.lower()]
    write_bytes(out, write(feats, names, found.labels.cpu(), source, about))
    return Embedding(out, len(feats), feats.shape[1], unreadable)


def embed_source(
    model: FrozenModel,
    source: Source,
    device: torch.device,
    show: Display,
    *,
    dtype: torch.dtype | None = None,
    title: str = "embedding",
) -> tuple[Features, list[tuple[str, str]]]:
    """Return the features of all readable images, and location and reason of the others."""
    shrunk, side = model.shrink(source)
    with open_loader(shrunk, side=side, device=device, cache_on_device="no") as loader:
        found = extract(
            model.network,
            loader,
            len(source),
            model.crop(),
            precision=dtype or precision("auto", device),
            progress=partial(show.progress, title, unit="images"),
        )
        return found, list(loader.unreadable)


def check_table_path(
    out: str | Path,
    images: ImageData,
    formats: Sequence[str],
    name: str,
    *,
    called: str = "--out",
) -> Path:
    """Return the path of a table to write; raise ValueError if it cannot be written there."""
    out = local_path(out)
    if out.suffix.lower() not in formats:
        raise ValueError(f"{called} must end with {' or '.join(formats)}, got {str(out)!r}")
    if out.is_dir():
        example = f"{out}/{name}{formats[-1]}"
        raise ValueError(f"{called} {out} is a folder; name a file in it, such as {example}")
    if not out.parent.exists():
        raise ValueError(f"{called} {out}: there is no folder {out.parent}; create it first")
    ensure_writable(out.parent, called)
    places = split_places(place_of(images)) if is_path(images) else []
    among = [local_path(place).resolve() for place in places if not is_remote(place)]
    if out.suffix.lower() == ".parquet" and any(map(out.resolve().is_relative_to, among)):
        raise ValueError(
            f"{called} {out} is inside the image folder and would be read as images; choose "
            f"another folder, or {formats[-1]}"
        )
    return out


def as_text(name: str) -> str:
    """Escape bytes of a file or folder name that are not valid Unicode."""
    return name.encode(errors="backslashreplace").decode()


def _parquet(
    feats: Vectors, names: list[str], labels: Tensor, source: Source, about: About
) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(feats.ravel()), feats.shape[1])
    columns = {"image": pa.array(names), "features": vectors}
    if source.labels is not None:
        columns["label"] = pa.array(labels.numpy(), mask=labels.numpy() < 0)
        if source.classes is not None:
            words = [as_text(source.classes[int(i)]) if i >= 0 else None for i in labels]
            columns["class"] = pa.array(words, pa.string())
    file = io.BytesIO()
    table = pa.table(columns).replace_schema_metadata({METADATA_KEY: json.dumps(about)})
    parquet.write_table(table, file)
    return file.getvalue()


def _csv(feats: Vectors, names: list[str], labels: Tensor, source: Source, about: About) -> bytes:
    """Write one line per image: its name, its class if it has one, and the numbers."""
    del about  # csv has no place for it
    file = io.StringIO(newline="")
    lines = csv.writer(file)
    classes = source.classes
    head = ["image"] if classes is None else ["image", "class"]
    lines.writerow([*head, *(f"feature_{i}" for i in range(feats.shape[1]))])
    for name, label, vector in zip(names, labels.tolist(), feats.tolist(), strict=True):
        own = [name] if classes is None else [name, as_text(classes[label]) if label >= 0 else ""]
        lines.writerow([*own, *(f"{number:.9g}" for number in vector)])  # exact in float32
    return file.getvalue().encode()


def _npz(feats: Vectors, names: list[str], labels: Tensor, source: Source, about: About) -> bytes:
    """Write only text and numbers, which are readable without pickle."""
    arrays = {"features": feats, "image": np.array(names)}
    if source.labels is not None:
        arrays["label"] = labels.numpy()
        if source.classes is not None:
            arrays["classes"] = np.array([as_text(name) for name in source.classes])
    arrays[METADATA_KEY] = np.array(json.dumps(about))
    file = io.BytesIO()
    np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    return file.getvalue()

"""Plant duplicates, leaks, label errors and damaged files in a data set, and count what is found.

python benchmarks/inspect_planted.py CIFAR10 --work planted --out docs/results/2026-11-17-inspect
"""

import argparse
import io
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import numpy as np
import pyarrow as pa
import torch
from PIL import Image, ImageEnhance
from pyarrow import parquet

from compressive.data.source import Source, subset
from compressive.data.sources import open_source


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _cropped(image: Image.Image, random: np.random.Generator) -> bytes:
    """Cut off an eighth of each side at a random position."""
    width, height = (round(side * 7 / 8) for side in image.size)
    left, top = (
        int(random.integers(0, a - b + 1)) for a, b in zip(image.size, (width, height), strict=True)
    )
    return _encoded(image.crop((left, top, left + width, top + height)))


def _resized(image: Image.Image) -> bytes:
    return _encoded(
        image.resize([round(side * 1.5) for side in image.size], Image.Resampling.BICUBIC)
    )


NEAR: dict[str, Callable[[Image.Image, np.random.Generator], bytes]] = {
    "JPEG, quality 75": lambda image, _: _encoded(image, "JPEG", quality=75),
    "resized by 1.5": lambda image, _: _resized(image),
    "brightness times 1.3": lambda image, _: _encoded(ImageEnhance.Brightness(image).enhance(1.3)),
    "cropped by 1/8": _cropped,
    "mirrored": lambda image, _: _encoded(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
}


SPLITS = ("train", "test")


@dataclass
class Planted:
    """What was planted; a row is (split, number). Pairs are a copy and its original."""

    pairs: dict[str, list[tuple[tuple[str, int], tuple[str, int]]]] = field(default_factory=dict)
    labels: list[tuple[str, int]] = field(default_factory=list)
    damaged: list[tuple[str, int]] = field(default_factory=list)


def plant(
    place: str,
    folder: Path,
    *,
    copies: int,
    label_share: float,
    most: dict[str, int] | None = None,
    seed: int = 0,
) -> Planted:
    """Write train.parquet and test.parquet with planted errors; `copies` is per kind."""
    sources = {
        split: _first(open_source(place, split), (most or {}).get(split, 0)) for split in SPLITS
    }
    rows = {name: [_png(source, i) for i in range(len(source))] for name, source in sources.items()}
    labels = {split: _label_list(source) for split, source in sources.items()}
    random, found = np.random.default_rng(seed), Planted()
    free = {split: list(random.permutation(len(rows[split]))) for split in sources}

    def copy(kind: str, split: str, change: Callable[[Image.Image], bytes] | None) -> None:
        """Append changed copies of images of a split to train."""
        pairs = found.pairs.setdefault(kind, [])
        for _ in range(copies):
            i = int(free[split].pop())
            content = rows[split][i]
            if change is not None:
                content = change(Image.open(io.BytesIO(content)))
            pairs.append((("train", len(rows["train"])), (split, i)))
            rows["train"].append(content)
            labels["train"].append(labels[split][i])

    for split, name in (("train", "copy"), ("test", "leak")):
        copy(f"{name}: same file", split, None)
        copy(f"{name}: same pixels, other file", split, lambda image: _encoded(image, "BMP"))
        for kind, change in NEAR.items():
            copy(f"{name}: {kind}", split, lambda image, c=change: c(image, random))
    classes = sources["train"].classes or ()
    for split in sources:
        for _ in range(round(label_share * len(sources[split]))):
            i = int(free[split].pop())
            other = int(random.integers(1, len(classes)))
            labels[split][i] = (labels[split][i] + other) % len(classes)
            found.labels.append((split, i))
    for _ in range(max(1, copies // 10)):
        i = int(free["train"].pop())
        rows["train"][i] = rows["train"][i][: len(rows["train"][i]) // 2]
        found.damaged.append(("train", i))
    folder.mkdir(parents=True, exist_ok=True)
    for split in sources:
        _write(folder / f"{split}.parquet", rows[split], labels[split], classes)
    return found


def _first(source: Source, most: int) -> Source:
    """Return evenly spaced images of a source, which is often sorted by class."""
    if not most or most >= len(source):
        return source
    return subset(source, torch.arange(most) * len(source) // most)


def _png(source: Source, i: int) -> bytes:
    return _encoded(Image.fromarray(source.image(i).permute(1, 2, 0).numpy()), compress_level=1)


def _label_list(source: Source) -> list[int]:
    assert source.labels is not None
    return source.labels.tolist()


def _write(path: Path, rows: list[bytes], labels: list[int], classes: tuple[str, ...]) -> None:
    names = {"info": {"features": {"label": {"names": list(classes), "_type": "ClassLabel"}}}}
    image = pa.array(
        [{"bytes": row, "path": None} for row in rows],
        pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    )
    table = pa.table({"image": image, "label": pa.array(labels, pa.int64())})
    about = {b"huggingface": json.dumps(names).encode()}
    parquet.write_table(table.replace_schema_metadata(about), path, row_group_size=1000)


def count(planted: Planted, table: Path) -> dict[str, Any]:
    """Compare the table of an inspection with what was planted."""
    columns = parquet.read_table(table).to_pydict()
    row = {}
    for place, origin in enumerate(columns["image"]):
        split, _, number = Path(origin).name.rpartition(":")
        row[split.removesuffix(".parquet"), int(number)] = place
    kinds = {}
    for kind, pairs in planted.pairs.items():
        is_exact = "same" in kind
        group = columns["exact_group" if is_exact else "near_group"]
        places = [(row[a], row[b]) for a, b in pairs]
        found = [group[a] is not None and group[a] == group[b] for a, b in places]
        if kind.startswith("leak"):
            found = [f and columns["leak"][b] for f, (_, b) in zip(found, places, strict=True)]
        kinds[kind] = {
            "planted": len(pairs),
            "found": sum(found),
            "missed": len(pairs) - sum(found),
        }
    copied = {row[place] for pairs in planted.pairs.values() for pair in pairs for place in pair}
    extra = {}
    for name in ("exact_group", "near_group"):
        members = [i for i, group in enumerate(columns[name]) if group is not None]
        extra[name] = len([i for i in members if i not in copied])
    damaged = {row[place] for place in planted.damaged}
    reported = {i for i, why in enumerate(columns["unreadable"]) if why}
    found_damaged = len(damaged & reported)
    kinds["damaged files"] = {
        "planted": len(damaged),
        "found": found_damaged,
        "missed": len(damaged) - found_damaged,
        "false_alarms": len(reported - damaged),
    }
    result: dict[str, Any] = {"kinds": kinds, "images_in_other_groups": extra}
    if "likely_label_error" in columns:
        wrong = {row[place] for place in planted.labels}
        flagged = [i for i, is_error in enumerate(columns["likely_label_error"]) if is_error]
        flagged.sort(key=lambda i: columns["label_support"][i])
        right = len(wrong & set(flagged))
        kinds["label errors"] = {
            "planted": len(wrong),
            "found": right,
            "missed": len(wrong) - right,
            "false_alarms": len(flagged) - right,
            "found_in_first": {
                str(n): len(wrong & set(flagged[:n])) for n in (100, 200, 500, 1000)
            },
        }
    return result


def main() -> None:
    """Plant, inspect in a process of its own, count, and write inspect.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True, help="folder of inspect.json")
    parser.add_argument("--work", type=Path, required=True, help="folder of the planted images")
    parser.add_argument("--copies", type=int, default=100, help="per kind")
    parser.add_argument("--label-share", type=float, default=0.01)
    parser.add_argument("--train", type=int, default=0, help="images of train; 0: all")
    parser.add_argument("--test", type=int, default=0, help="images of test; 0: all")
    parser.add_argument("--encoder", default="cifar10-byol-r18")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    truth = given.work / "planted.json"
    if truth.exists():  # so that features in the cache are used again
        planted = Planted(**json.loads(truth.read_text(), object_hook=_rows))
    else:
        most = {"train": given.train, "test": given.test}
        options = {"copies": given.copies, "label_share": given.label_share, "most": most}
        planted = plant(given.data, given.work / "images", **options)
        truth.write_text(json.dumps(asdict(planted)))
    given.out.mkdir(parents=True, exist_ok=True)
    table, cache = given.work / "inspect.parquet", given.work / "cache"
    was_cached = cache.exists()
    command = [sys.executable, "-m", "compressive", "inspect", str(given.work / "images")]
    command += ["--out", str(given.work / "inspect.html"), "--table", str(table)]
    command += ["--cache", str(cache), "--encoder", given.encoder, "--device", given.device]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    start = time.monotonic()
    subprocess.run(command, check=True, env=environment)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "date": f"{date.today():%Y-%m-%d}",
        "images": parquet.read_metadata(table).num_rows,
        "encoder": given.encoder,
        "features_from_cache": was_cached,
        "wall_seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_memory_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
        "versions": {name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        **count(planted, table),
    }
    text = json.dumps(result, indent=1) + "\n"
    (given.out / "inspect.json").write_text(text)
    print(text)


def _rows(content: dict[str, Any]) -> dict[str, Any]:
    """Turn lists of JSON into the pairs of (split, number) that they were."""
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            is_pairs = isinstance(value[0][0], list)
            content[key] = [(tuple(a), tuple(b)) if is_pairs else (a, b) for a, b in value]
    return content


if __name__ == "__main__":
    main()

"""Small copies of robustness datasets in the layouts and formats of the real ones."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from compressive.evaluation.datasets.shifts import Shift

# 1000 sorted wnids, as in ImageNet, whose numbers are not 0 to 999.
WNIDS = [f"n{1440764 + 7 * i:08d}" for i in range(1000)]


def put(path: Path, color: tuple[int, int, int] = (10, 20, 30), size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "PNG" if path.suffix == ".png" else "JPEG"
    file = io.BytesIO()
    Image.new("RGB", (size, size), color).save(file, kind)
    path.write_bytes(file.getvalue())


def put_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def answers(shift: Shift) -> dict[str, set[int]]:
    """Return the correct ids of each image by its folder and file."""
    rows = shift.answers.right.tolist()
    names = ["/".join(Path(shift.source.origin(i)).parts[-2:]) for i in range(len(shift.source))]
    return {name: {i for i in row if i >= 0} for name, row in zip(names, rows, strict=True)}


def put_objectnet(root: Path) -> dict[str, set[int]]:
    """Write mapping files with the real counts: 104 classes of 1 id, 6 of 2 and 3 of 3.

    As in the real files, texts have commas and lines are not in the order of PyTorch's ids.
    """
    line_of_id = np.random.default_rng(0).permutation(1000)
    lines = [""] * 1000
    for i, line in enumerate(line_of_id):
        lines[line] = f"thing {i}, object number {i}"
    ids = iter(np.random.default_rng(1).permutation(1000)[:125].tolist())
    sizes = [1] * 104 + [2] * 6 + [3] * 3
    wanted = {f"folder_{k}": {next(ids) for _ in range(size)} for k, size in enumerate(sizes)}
    labels = {f"folder_{k}": f"Label / {k}" for k in range(313)}  # 200 are not in ImageNet
    texts = {
        labels[folder]: "; ".join(f"thing {i}, object number {i}" for i in several)
        for folder, several in wanted.items()
    }
    mappings = root / "mappings"
    put_json(mappings / "folder_to_objectnet_label.json", labels)
    put_json(mappings / "objectnet_to_imagenet_1k.json", texts)
    put_json(
        mappings / "pytorch_to_imagenet_2012_id.json",
        {str(i): int(line) for i, line in enumerate(line_of_id)},
    )
    (mappings / "imagenet_to_label_2012_v2").write_text("\n".join(lines) + "\n")
    return wanted

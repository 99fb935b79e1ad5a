"""Export encoders of six kinds to every format and store the largest difference of features.

The file is written after each encoder. Encoders that it has are skipped.

python benchmarks/export_parity.py PHOTOS --out docs/results/2026-11-17-export/parity.json
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch

from compressive.config import Network
from compressive.encoder import Encoder, save
from compressive.exporting.export import export
from compressive.exporting.formats import EXPORT_FORMATS, CannotRepresent
from compressive.exporting.parity import parity_images
from compressive.networks import build

SIZE, SIDE = 224, 512
BUNDLED = "cifar10-byol-r18"
SOURCES = {
    "ResNet-50": Network(name="resnet50", zero_init_last=False),
    "ResNet-50, official": Network(name="resnet50", variant="official", zero_init_last=False),
    "ResNet-18, width 2": Network(name="resnet18", width=2, zero_init_last=False),
    "ViT-S/16": Network(name="vit_small_patch16_224"),
    "ConvNeXt-T": Network(name="convnext_tiny"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "half": {"half": True},
    "with preprocessing": {"with_preprocessing": True},
}


def random_encoder(folder: Path, settings: Network, photos: Path) -> Path:
    """Save random weights with batch-norm statistics of photographs."""
    torch.manual_seed(0)
    network = build(settings, SIZE)
    for weight in network.parameters():  # training enlarges layer scales and class tokens
        if 0 < weight.abs().max() < 1e-4:
            torch.nn.init.normal_(weight, std=0.1)
    images, _ = parity_images(photos, None)
    inputs = Encoder(network, settings, SIZE, SIDE).preprocess(images)
    with torch.no_grad():
        for _ in range(20):
            network.train()(inputs)
    folder.mkdir()
    return save(folder, network.eval(), settings, SIZE, SIDE)


def measure(place: Path | str, photos: Path, work: Path) -> dict[str, Any]:
    """Return the record of each export, or why it was refused."""
    found: dict[str, Any] = {}
    for to, info in EXPORT_FORMATS.items():
        for variant, options in VARIANTS.items():
            if "with_preprocessing" in options and not info.has_graph:
                continue
            out = work / f"export{info.suffix}"
            name = f"{to}, {variant}" if variant else to
            try:
                done = export(place, to, out, images=photos, **options)
            except CannotRepresent as error:
                found[name] = {"refused": str(error)}
            else:
                record = json.loads(done.record.read_text())
                kept = ("largest_difference", "largest_output", "tolerance", "image_count")
                kept = (*kept, "preprocessing_difference")
                found[name] = {key: record[key] for key in kept if key in record}
                found["versions"] = found.get("versions", {}) | record["versions"]
            print(name, found[name], flush=True)
    return found


def main() -> None:
    """Measure all sources and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    earlier: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    rows, versions = earlier.get("sources", {}), earlier.get("versions", {})
    given.out.parent.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    about["networks"] = {name: asdict(settings) for name, settings in SOURCES.items()}
    with tempfile.TemporaryDirectory() as folder:
        for number, source in enumerate([BUNDLED, *SOURCES]):
            if source in rows:
                continue
            work = Path(folder, str(number))
            work.mkdir()
            print(f"== {source}", flush=True)
            place: Path | str = BUNDLED
            if source in SOURCES:
                place = random_encoder(work / "run", SOURCES[source], given.photos)
            rows[source] = measure(place, given.photos, work)
            versions |= rows[source].pop("versions")
            content = {"about": about, "versions": versions, "sources": rows}
            given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A parser for report pages, and run folders to report on."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from run_files import config_text, metrics_text, record, results_text
from safetensors.numpy import save_file

from compressive.reporting import write_report
from compressive.rundir.predictions_file import predictions_file

SECTIONS = [
    *("summary", "classes", "confusion", "disagreements", "errors", "corruptions", "smoothness"),
    *("reliability", "neighbors", "maps", "views", "figures", "ablation", "paper", "training"),
    *("plane", "differences", "origins"),
]
CLASSES = ["dots", "rings", "<b>grid"]
CHANGES = [
    f"{what}{way}" for what in ("brightness", "contrast", "saturation", "hue") for way in "+-"
]
NEEDS = {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}


class Page(HTMLParser):
    """A parsed report page: sections, links, exact numbers and text; all elements are closed."""

    VOID = frozenset(("meta", "img", "br", "link", "input", "hr"))

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.sections: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.numbers: dict[str, list[float]] = {}
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.addresses += [value or "" for key, value in attrs if key in NEEDS]
        if tag == "section":
            self.sections.append(given["id"] or "")
        if tag == "data":
            self.numbers.setdefault(self.sections[-1], []).append(float(given["value"] or "nan"))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def records(shift: float) -> list[dict[str, Any]]:
    """Return one record of each kind, with numbers that depend on the shift."""
    bins = [[0.3 + shift, 0.25, 100], [0.6, 0.7, 900], [0.95, 0.91, 1400]]
    found = [
        record("logistic", "set", "top-1", 0.7 + shift, low=0.68 + shift, high=0.72 + shift),
        record("logistic", "set", "top-5", 0.9 + shift),
        record("logistic", "set", "brier", 0.3 + shift),
        record("logistic", "set", "ece", 0.01 + shift, protocol={"reliability": bins}),
        record("few labels 1%", "set", "top-1", 0.4 + shift),
        record("kNN 20", "set", "top-1", 0.6 + shift),
        record("geometry", "set", "RankMe", 32.4 + shift),
        record("information", "set", "predictive", 1.5 + shift),
    ]
    for kind in ("gaussian_noise", "fog"):
        cells = [0.6 + shift, 0.5, 0.4, 0.3, 0.2 - shift]
        where, protocol = f"set-C {kind}", {"by_severity": cells}
        found.append(record("corruption", where, "top-1", 0.4, protocol=protocol))
    density = np.exp(-(np.linspace(-1, 2, 100) ** 2)).tolist()
    shape = {"edges": np.linspace(0, 1 + shift, 101).tolist(), "density": density}
    for change in CHANGES:
        more = {"protocol": {"histogram": shape}, "low": 0.3, "high": 0.5}
        found.append(record(f"smoothness {change}", "set test", "lipschitz", 0.4 + shift, **more))
    return found


def journal(count: int, shift: float) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": 10 / step + shift,
            "lr": 0.1,
            "images_per_second": 700.0 * (step > 1),
            "residual": 180 + 5 / step,
            "reducible_residual": 5 / step,
            "predictive": 2 - 2 / step,
            "health": f"ok: rank {step}.0 of 256",
        }
        for step in range(1, count + 1)
    ]
    return [*lines, {"step": count, "probe_accuracy": 0.5 + shift, "knn_accuracy": 0.6}]


def gallery(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def images(*shape: int) -> np.ndarray:
        return random.integers(0, 256, (*shape, 8, 8, 3), dtype=np.uint8)

    return {
        "views": images(2, 5),
        "query": images(3),
        "neighbors": images(3, 4),
        "query_label": np.array([0, 1, 2]),
        "neighbor_label": np.array([[0, 0, 0, 1], [1, 1, 1, 1], [0, 1, 2, 2]]),
        "map": random.normal(size=(60, 2)).astype(np.float32),
        "map_label": np.arange(60) % 3,
    }


def predictions(seed: int) -> dict[str, np.ndarray]:
    """Return predictions for 240 images of three classes, of which the last has 15 images."""
    random = np.random.default_rng(seed)
    label = np.repeat(np.arange(3, dtype=np.int32), (120, 105, 15))
    wrong = random.random(240) < 0.3
    predicted = np.where(wrong, (label + random.integers(1, 3, 240)) % 3, label).astype(np.int32)
    confidence = random.uniform(0.4, 1, 240).astype(np.float32)
    errors = np.flatnonzero(wrong)
    errors = errors[np.argsort(-confidence[errors])][:20].astype(np.int32)
    return {
        "label": label,
        "predicted": predicted,
        "confidence": confidence,
        "error": errors,
        "error_image": random.integers(0, 256, (len(errors), 8, 8, 3), dtype=np.uint8),
    }


def write_run(folder: Path, shift: float = 0.0, *, name: str = "set") -> Path:
    """Write a complete run with the files of `train` and `evaluate`."""
    (folder / "evaluation").mkdir(parents=True)
    settings = {
        "method": "c-simclr",
        "data": {"source": name},
        "network": {"name": "tiny"},
        "bottleneck": {"beta": shift},
        "train": {"epochs": 6},
        "about": {"command": "compressive train x", "device": "a CPU", "versions": {"torch": "3"}},
    }
    (folder / "config.json").write_text(config_text(settings))
    (folder / "metrics.jsonl").write_text(metrics_text(journal(30, shift)))
    (folder / "encoder.safetensors").write_bytes(b"")
    about, skipped = {"device": "cpu"}, ["frost, which needs photographs"]
    results = results_text(records(shift), run=name, about=about, skipped=skipped)
    (folder / "evaluation/results.json").write_text(results)
    words = {"classes": json.dumps(CLASSES), "map_method": "two axes of PCA"}
    save_file(gallery(0), folder / "evaluation/gallery.safetensors", metadata=words)
    words = {"classes": json.dumps(CLASSES), "task": "logistic", "dataset": "set", "images": "i"}
    found = predictions(int(100 * shift))
    save_file(found, folder / "evaluation" / predictions_file("logistic"), metadata=words)
    return folder


def report(tmp_path: Path, *runs: Path) -> Page:
    return Page(write_report(runs, tmp_path / "out" / "report.html"))


def drawings(page: Page) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page.source, re.DOTALL)

"""Accuracies per class, confusions and errors match the stored predictions."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from report_pages import CLASSES, Page, predictions, report, write_run
from run_files import record
from safetensors.numpy import save_file

from compressive.reporting.gallery import png
from compressive.rundir.intervals import wilson_interval
from compressive.rundir.predictions_file import predictions_file

FILE = f"evaluation/{predictions_file('logistic')}"


def part(page: Page, section: str) -> str:
    return page.source.split(f'<section id="{section}"')[1].split("</section>")[0]


def test_class_accuracies_match_the_predictions(tmp_path: Path) -> None:
    page, found = report(tmp_path, write_run(tmp_path / "run")), predictions(0)
    hit = found["predicted"] == found["label"]
    shares = [float(hit[found["label"] == c].mean()) for c in range(3)]
    assert page.numbers["classes"] == pytest.approx(sorted(shares))
    low, high = wilson_interval(shares[0], 120)
    interval = f"[{100 * low:.0f},\N{NO-BREAK SPACE}{100 * high:.0f}]"
    assert interval in part(page, "classes")
    assert "120 images<" in part(page, "classes")


def test_rare_classes_have_too_few_images_to_tell(tmp_path: Path) -> None:
    found = part(report(tmp_path, write_run(tmp_path / "run")), "classes")
    rows = re.findall(r"<tr.*?</tr>", found, re.DOTALL)
    (rare,) = [row for row in rows if "&lt;b&gt;grid" in row]
    assert "15 images: too few images to tell" in rare
    assert "[" not in rare
    assert found.count("too few images to tell") == 1


def test_confusion_matrix_matches_a_count(tmp_path: Path) -> None:
    page, found = report(tmp_path, write_run(tmp_path / "run")), predictions(0)
    counts = np.zeros((3, 3))
    for label, predicted in zip(found["label"], found["predicted"], strict=True):
        counts[label, predicted] += 1
    shares = counts / counts.sum(1, keepdims=True)
    assert page.numbers["confusion"] == pytest.approx([v for v in shares.ravel() if v >= 0.01])


def test_many_classes_list_the_most_frequent_confusions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    label = np.repeat(np.arange(30, dtype=np.int32), 10)
    predicted = label.copy()
    predicted[[0, 1, 2, 10, 11]] = [7, 7, 7, 5, 5]
    arrays = {
        "label": label,
        "predicted": predicted,
        "confidence": np.full(300, 0.5, np.float32),
        "error": np.array([0], np.int32),
        "error_image": np.zeros((1, 8, 8, 3), np.uint8),
    }
    names = [f"class{i}" for i in range(30)]
    about = {"classes": json.dumps(names), "task": "logistic", "dataset": "set", "images": "i"}
    save_file(arrays, run / FILE, metadata=about)
    page = report(tmp_path, run)
    assert page.numbers["confusion"] == [0.3, 0.2]
    text = part(page, "confusion")
    assert text.index("class0 \N{RIGHTWARDS ARROW} class7") < text.index("class1 ")
    assert "matrix" not in text


def test_disagreements_are_errors_of_one_run_only(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{i}", i / 100) for i in range(2)]
    page = report(tmp_path, *runs)
    one, two = predictions(0), predictions(1)
    first, second = part(page, "disagreements").split("<h3>")[1:]
    for text, right, wrong in ((first, two, one), (second, one, two)):
        hit = right["predicted"] == right["label"]
        both = hit & (wrong["predicted"] != wrong["label"])
        assert f"{both.sum()} of 240 images" in text
        shown = [i for i, at in enumerate(wrong["error"]) if hit[at]][:12]
        images = re.findall(r'<img src="(.*?)"', text)
        assert images == [png(wrong["error_image"][i]) for i in shown]


def test_errors_are_shown_by_confidence(tmp_path: Path) -> None:
    page, found = report(tmp_path, write_run(tmp_path / "run")), predictions(0)
    text = part(page, "errors")
    assert re.findall(r'<img src="(.*?)"', text) == [png(i) for i in found["error_image"][:12]]
    at = found["error"][0]
    told = CLASSES[found["predicted"][at]].replace("<", "&lt;").replace(">", "&gt;")
    percent = f"{100 * found['confidence'][at]:.0f}\N{NO-BREAK SPACE}%"
    assert f"predicted {told}, {percent}" in text


def test_results_without_predictions_have_class_accuracies_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / FILE).unlink()
    assert not {"classes", "confusion", "errors"} & set(report(tmp_path, run).sections)
    path = run / "evaluation/results.json"
    content = json.loads(path.read_text())
    recall = {"dots": 0.9, "rings": 0.4}
    protocol = {"per_class": recall}
    content["records"].append(record("logistic", "set", "mean per class", 0.6, protocol=protocol))
    path.write_text(json.dumps(content))
    page = report(tmp_path, run)
    assert page.numbers["classes"] == [0.4, 0.9]
    assert not {"confusion", "errors"} & set(page.sections)


@pytest.mark.parametrize("change", ["other images", "another shape", "truncated"])
def test_predictions_that_do_not_fit_are_left_out(tmp_path: Path, change: str) -> None:
    run, arrays = write_run(tmp_path / "run"), predictions(0)
    images = "other" if change == "other images" else "i"
    if change == "another shape":
        arrays["confidence"] = arrays["confidence"][:-1]
    about = {"classes": json.dumps(CLASSES), "dataset": "set", "images": images}
    save_file(arrays, run / FILE, metadata=about)
    if change == "truncated":
        (run / FILE).write_bytes((run / FILE).read_bytes()[:-9])
    page = report(tmp_path, run)
    assert "confusion" not in page.sections
    assert (Path(FILE).name in page.text) == (change != "other images")


def test_experiments_without_predictions_are_named(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{i}", i / 100) for i in range(3)]
    (runs[1] / FILE).unlink()
    page = report(tmp_path, *runs)
    assert "Predictions of C-SimCLR, beta 0.01 are not stored" in page.text
    assert part(page, "disagreements").count("<h3>") == 2

"""Ablation plots: values match the files, failures stay visible, axes exclude outliers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_pages import Page, drawings, report, write_run
from run_files import record, results_text

from compressive.reporting.summary import failure, outcome
from compressive.reporting.svg import CHART_HEIGHT, CHART_WIDTH, Line, chart, labels
from compressive.rundir.reader import read_runs


def make_run(folder: Path, beta: float, scores: dict[str, float], **changes: Any) -> Path:
    """Write a complete run with these scores, keyed by "task/dataset/metric"; return its folder."""
    run = write_run(folder)
    config = json.loads((run / "config.json").read_text())
    config["bottleneck"]["beta"] = beta
    (run / "config.json").write_text(json.dumps({**config, **changes}))
    names = [(*name.split("/", 2), value) for name, value in scores.items()]
    records = [record(task, dataset, metric, value) for task, dataset, metric, value in names]
    results = results_text(records, about={"data": "set"})
    (run / "evaluation/results.json").write_text(results)
    return run


def scores_of(top1: float, reducible_residual: float) -> dict[str, float]:
    return {"linear/set/top-1": top1, "information/set/reducible_residual": reducible_residual}


def collapsed(folder: Path, beta: float, health: str = "collapse: rank 1.0") -> Path:
    run = make_run(folder, beta, {}, train={"steps": 1000})
    (run / "evaluation/results.json").unlink()
    assert (run / "encoder.safetensors").is_file()  # written from the first step on
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "health": health}) + "\n")
    return run


def find_drawings(page: Page, text: str) -> list[str]:
    """Return the ablation drawings that contain this text."""
    inside = page.source.split('<section id="ablation">')[1].split("</section>")[0]
    found = re.findall(r"<svg.*?</svg>", inside, re.DOTALL)
    return [drawing for drawing in found if text in drawing]


def dots(drawing: str) -> np.ndarray:
    return np.array(re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawing), dtype=float)


def assert_linear(places: np.ndarray, values: Any) -> None:
    """Assert that positions are linear in the values, to the 0.1 precision of the drawing."""
    slope, start = np.polyfit(values, places, 1)
    np.testing.assert_allclose(places, start + slope * np.asarray(values), atol=0.11)


@pytest.mark.slow
def test_curves_show_mean_and_deviation_over_seeds_in_value_order(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    betas, values = [0.3, 0.0, 1.0], random.random((3, 3))
    runs = [
        make_run(tmp_path / f"b{beta}s{seed}", beta, scores_of(values[i, seed], 1.0), seed=seed)
        for i, beta in enumerate(betas)
        for seed in range(3)
    ]
    page = report(tmp_path, *runs)
    drawing, _ = find_drawings(page, "top-1, % against")  # the second is against the residual
    places, order = dots(drawing), np.argsort(betas)
    assert_linear(places[:, 0], [0, 1, 2])
    assert_linear(places[:, 1], values.mean(1)[order])
    bars = np.array(re.findall(r'd="M([\d.]+) ([\d.]+)V([\d.]+)"', drawing), dtype=float)
    np.testing.assert_allclose(bars[:, 0], places[:, 0], atol=0.11)
    scale = np.polyfit(values.mean(1)[order], places[:, 1], 1)[0]
    half = -scale * values.std(1, ddof=1)[order]
    np.testing.assert_allclose(bars[:, 1] - bars[:, 2], 2 * half, atol=0.3)
    text = re.findall(r'text-anchor="middle">([^<]*)</text>', drawing)
    assert text[:4] == ["0", "0.3", "1", "bottleneck.beta"]
    assert "means over 3 seeds" in page.text


def test_ratios_are_plotted_times_100_and_nats_unscaled(tmp_path: Path) -> None:
    """Brier scores are scaled too, as in all tables."""
    scores = {
        "linear/set/top-1": 0.8,
        "linear/set/brier": 0.15,
        "information/set/reducible_residual": 0.15,
    }
    runs = [make_run(tmp_path / f"b{beta}", beta, scores) for beta in (0.0, 1.0)]
    page = report(tmp_path, *runs)
    for text, value in (
        ("top-1, %", 80),
        ("Brier x 100", 15),
        ("reducible residual (nats)", 0.15),
    ):
        drawing = next(
            each for each in find_drawings(page, f"{text} against") if "bottleneck" in each
        )
        ticks = [float(tick) for tick in re.findall(r">(\d+(?:\.\d+)?)</text>", drawing)]
        axis_ticks = [tick for tick in ticks if tick not in (0.0, 1.0)]  # 0 and 1 are beta values
        assert min(axis_ticks) <= value <= max(axis_ticks)
        assert max(axis_ticks) < 3 * value


def test_accuracy_is_plotted_against_residual_with_labels(tmp_path: Path) -> None:
    found = [(0.0, 0.8, 2.0), (0.1, 0.82, 1.5), (1.0, 0.7, 0.2)]
    runs = [make_run(tmp_path / f"{b}", b, scores_of(top, nats)) for b, top, nats in found]
    (drawing,) = find_drawings(report(tmp_path, *runs), "against reducible residual (nats)")
    places = dots(drawing)
    assert_linear(places[:, 0], [nats for _, _, nats in found])
    assert_linear(places[:, 1], [top for _, top, _ in found])
    point_labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">([^<]*)</text>', drawing)
    assert [label for _, _, label in point_labels] == ["0", "0.1", "1"]
    for (x, y, _), place in zip(point_labels, places, strict=True):
        assert np.hypot(float(x) - place[0], float(y) - place[1]) < 35


def test_failed_seeds_are_not_counted_in_the_mean(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{b}{seed}", b, scores_of(0.8, 1.0), seed=seed)
        for b in (0.0, 1.0)
        for seed in (0, 1)
    ]
    third = collapsed(tmp_path / "third", 0.0)
    config = json.loads((third / "config.json").read_text())
    config |= {"seed": 2, "train": json.loads((runs[0] / "config.json").read_text())["train"]}
    (third / "config.json").write_text(json.dumps(config))
    assert "means over 2 seeds" in report(tmp_path, *runs, third).text


@pytest.mark.slow
def test_runs_with_other_protocols_are_not_averaged(tmp_path: Path) -> None:
    """One seed uses held-out images, one Brier score another head, and one run has a residual."""
    random = np.random.default_rng(1)
    values, runs = random.random((3, 3)), []
    for i, beta in enumerate((0.0, 0.1, 1.0)):
        for seed in range(3):
            scores = {"linear/set/top-1": values[i, seed], "linear/set/brier": 0.2}
            runs.append(make_run(tmp_path / f"b{i}s{seed}", beta, scores, seed=seed))
    path = runs[5] / "evaluation/results.json"
    records = [record("linear", "set held out", "top-1", 0.01)]
    path.write_text(results_text(records, about={"data": "set held out"}))
    path = runs[0] / "evaluation/results.json"
    content = json.loads(path.read_text())
    content["records"][1] = record("logistic", "set", "brier", 0.9)
    content["records"].append(record("information", "set", "reducible_residual", 99.0))
    path.write_text(json.dumps(content))

    page = report(tmp_path, *runs)

    (drawing,) = [
        each for each in find_drawings(page, "top-1, % against") if "bottleneck.beta" in each
    ]
    means = [values[0].mean(), values[1, :2].mean(), values[2].mean()]
    assert_linear(dots(drawing)[:, 1], means)
    assert "2 runs were" in page.text
    for text in ("Brier x 100 against", "reducible residual (nats) against"):
        (drawing,) = [each for each in find_drawings(page, text) if "bottleneck.beta" in each]
        assert np.ptp(dots(drawing)[:, 1]) < 0.11  # every averaged value is equal


@pytest.mark.slow
def test_failed_run_is_marked_at_its_setting(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{b}", b, scores_of(0.8 - b, 1.0)) for b in (0.0, 0.1)]
    runs += [collapsed(tmp_path / "one", 1.0), collapsed(tmp_path / "two", 3.0, "nan: loss")]
    page = report(tmp_path, *runs)
    assert "collapsed, at 1" in page.text
    assert "diverged, at 3" in page.text
    (drawing,) = [d for d in find_drawings(page, "top-1, % against bottleneck.beta")]
    crosses = re.findall(r'd="M([\d.]+) [\d.]+l8 8m0 -8l-8 8"', drawing)
    assert len(dots(drawing)) == 2
    assert_linear(np.array([*dots(drawing)[:, 0], *(float(x) + 4 for x in crosses)]), range(4))
    assert "A cross" not in report(tmp_path, *runs[:2]).text


@pytest.mark.slow
def test_runs_with_other_settings_get_separate_lines(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{method}{b}", b, scores_of(0.8 - b, 1 - b), method=method)
        for method in ("c-simclr", "c-byol")
        for b in (0.0, 0.1)
    ]
    page = report(tmp_path, *runs)
    (drawing,) = find_drawings(page, "top-1, % against bottleneck.beta")
    assert re.findall(r"<title>(.*?)</title>", drawing) == ["method c-simclr", "method c-byol"]
    assert drawing.count('<path class="line"') == 2
    assert "method c-byol" in page.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "scores"),
    [
        ([{}, {}], scores_of(0.8, 1.0)),
        ([{"seed": 0}, {"seed": 1}], scores_of(0.8, 1.0)),
        ([{"method": "simclr"}, {"method": "byol"}], scores_of(0.8, 1.0)),
        # The probe does not affect the encoder.
        ([{"probe": {"lr": 1.0}}, {"probe": {"lr": 2.0}}], scores_of(0.8, 1.0)),
        ([{"views": {"blur": True}}, {"views": {"blur": False}}], scores_of(0.8, 1.0)),
        ([{"views": {"size": 32}}, {"views": {"size": 64}}], {}),
    ],
)
def test_ablation_is_absent_without_a_varied_number_or_metric(
    tmp_path: Path, changes: list[dict[str, Any]], scores: dict[str, float]
) -> None:
    runs = [make_run(tmp_path / f"{i}", 0.0, scores, **change) for i, change in enumerate(changes)]
    for run in runs if not scores else ():
        metrics_file = run / "metrics.jsonl"
        lines = [line for line in metrics_file.read_text().splitlines() if "probe_acc" not in line]
        metrics_file.write_text("\n".join(lines))
    assert "ablation" not in report(tmp_path, *runs).sections


@pytest.mark.slow
def test_unevaluated_runs_are_compared_by_held_out_accuracy(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{b}", b, {}) for b in (0.0, 0.1, 1.0)]
    for run, held in zip(runs, (0.7, 0.9, 0.6), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 40, "probe_accuracy": held}) + "\n")
    page = report(tmp_path, *runs)
    assert not find_drawings(page, "top-1")
    drawing, _ = find_drawings(page, "accuracy, % against bottleneck.beta")  # the second is kNN
    assert_linear(dots(drawing)[:, 1], [0.7, 0.9, 0.6])


@pytest.mark.slow
def test_two_varied_settings_make_two_ablations(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{b}{size}", b, scores_of(0.8 - b, 1.0), views={"size": size})
        for b in (0.0, 0.1)
        for size in (32, 64, 96)
    ]
    page = report(tmp_path, *runs)
    (over_beta,) = find_drawings(page, "top-1, % against bottleneck.beta")
    (over_size,) = find_drawings(page, "top-1, % against views.size")
    assert len(re.findall("<title>", over_beta)) == 3
    assert len(re.findall("<title>", over_size)) == 2


def test_outcome_uses_the_dataset_of_the_run(tmp_path: Path) -> None:
    scores = {"linear/other/top-1": 0.1, "linear/set/top-1": 0.8, "corruptions/set-C/top-1": 0.5}
    scores |= {"corruptions/other-C/top-1": 0.2, "logistic/set/brier": 0.3}
    (run,) = read_runs([make_run(tmp_path / "a", 0.0, scores)])
    last = {
        "held-out probe": 0.5,
        "held-out kNN": 0.6,
        "reducible_residual": 5 / 30,
        "predictive": 2 - 2 / 30,
    }  # last values of its metrics
    assert outcome(run) == {"linear": 0.8, "corruptions": 0.5, "Brier": 0.3, **last}


def test_run_failed_if_unhealthy_unfinished_and_unevaluated(tmp_path: Path) -> None:
    run = collapsed(tmp_path / "a", 1.0)
    assert failure(read_runs([run])[0]) == "collapsed"
    results = results_text([record("linear", "set", "top-1", 0.1)])  # evaluated from a checkpoint
    (run / "evaluation/results.json").write_text(results)
    assert failure(read_runs([run])[0]) == ""
    healthy = make_run(tmp_path / "b", 1.0, {}, train={"steps": 1000})
    assert failure(read_runs([healthy])[0]) == ""
    complete = collapsed(tmp_path / "c", 1.0)
    config = json.loads((complete / "config.json").read_text()) | {"train": {"steps": 31}}
    (complete / "config.json").write_text(json.dumps(config))
    assert failure(read_runs([complete])[0]) == "", "a completed run has not failed"


def test_unfinished_run_is_not_plotted(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{b}", b, {}, train={"steps": 31}) for b in (0.0, 0.1, 1.0)]
    for run in runs[:2]:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 31, "loss": 0.5}) + "\n")
    drawing, _ = find_drawings(report(tmp_path, *runs), "accuracy, % against bottleneck.beta")
    assert len(dots(drawing)) == 2


def test_setting_missing_from_older_runs_does_not_split_the_line(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{b}", b, scores_of(0.8 - b, 1.0)) for b in (0.0, 0.1, 0.2)]
    for run in runs[1:]:
        config = json.loads((run / "config.json").read_text()) | {"views": {"strength": 1.0}}
        (run / "config.json").write_text(json.dumps(config))
    (drawing,) = find_drawings(report(tmp_path, *runs), "top-1, % against bottleneck.beta")
    assert len(dots(drawing)) == 3


def paths(drawing: str) -> list[np.ndarray]:
    """Return each unbroken segment of each line."""
    found = []
    for path in re.findall(r'<path class="line" d="([^"]*)"', drawing):
        pieces = filter(None, path.split("M"))
        found += [np.array([p.split() for p in piece.split("L")], float) for piece in pieces]
    return found


def test_axes_exclude_outliers() -> None:
    steps = np.arange(100.0)
    usual = np.column_stack([1 + np.sin(steps), steps])
    far = np.array([[90.0, -500.0], [60.0, 0.0]])
    whole = chart([Line([*map(tuple, usual)], 0, "a")], "x", "y", clip=True)
    cut = chart([Line([*map(tuple, [*far, *usual])], 0, "a")], "x", "y", clip=True)
    (plain,) = paths(whole)
    pieces = paths(cut)
    ends = np.concatenate(pieces)
    assert ends[:, 0].min() >= 57.9
    assert ends[:, 0].max() <= CHART_WIDTH - 9.9
    assert ends[:, 1].min() >= 9.9
    assert ends[:, 1].max() <= CHART_HEIGHT - 37.9
    # The first segment enters the axes; the rest equals the line without outliers.
    np.testing.assert_allclose([p[0] for p in pieces[1:]], plain[:-1], atol=0.11)
    np.testing.assert_allclose([p[1] for p in pieces[1:]], plain[1:], atol=0.11)
    last, first = np.array([60.0, 0.0]), usual[0]
    slope = (first[1] - last[1]) / (first[0] - last[0])
    assert slope == 0  # it enters horizontally from the right
    np.testing.assert_allclose(pieces[0][:, 1], plain[0, 1], atol=0.11)
    assert pieces[0][0, 0] == pytest.approx(CHART_WIDTH - 10, abs=0.11)


def test_line_to_an_outlier_is_clipped_at_the_axes(tmp_path: Path) -> None:
    """The line leaves to an outlier above the axes and returns."""
    inner = np.column_stack([np.arange(101.0), np.arange(101.0) % 7])
    points = np.insert(inner, 50, [60.0, 1e4], axis=0)
    pieces = paths(chart([Line([*map(tuple, points)], 0, "a")], "x", "y", clip=True))
    starts = np.array([piece[0] for piece in pieces])
    known = [place for place in range(101) if place != 50]  # a segment starts at each
    scale = [np.polyfit(points[known, axis], starts[known, axis], 1) for axis in (0, 1)]
    top = (10 - scale[1][1]) / scale[1][0]
    for piece, end, inside in ((pieces[49], 1, points[49]), (pieces[50], 0, points[51])):
        share = (top - inside[1]) / (points[50][1] - inside[1])
        expected = inside + share * (points[50] - inside)
        found = [(piece[end][axis] - scale[axis][1]) / scale[axis][0] for axis in (0, 1)]
        np.testing.assert_allclose(found, expected, atol=0.1)  # positions are rounded to 0.1


def test_training_curves_clip_a_spike(tmp_path: Path) -> None:
    """The first reading in the information plane can be such a spike."""
    run = write_run(tmp_path / "run")
    before = drawings(report(tmp_path, run))
    header, *lines = (run / "metrics.jsonl").read_text().splitlines()
    spike = json.dumps({**json.loads(lines[0]), "step": 0, "loss": 4e4, "reducible_residual": 4e4})
    (run / "metrics.jsonl").write_text("\n".join([header, spike, *lines]))
    after = drawings(report(tmp_path, run))

    def highest(found: list[str], text: str) -> float:
        (drawing,) = [d for d in found if text in d]
        texts = re.findall(r'text-anchor="(?:end|middle)">([\d.]+k?)<', drawing)
        return max(float(text.replace("k", "e3")) for text in texts)

    assert highest(after, '"loss against step') == highest(before, '"loss against step')
    plane = "against reducible_residual"
    assert highest(after, plane) == highest(before, plane) < 10


def test_axis_labels_share_one_unit() -> None:
    assert labels([0.0, 5e3, 1e4, 1.5e4]) == ["0", "5k", "10k", "15k"]
    assert labels([0.0, 2e3, 4e3]) == ["0", "2000", "4000"]
    assert labels([-5e5, 0.0, 1e6]) == ["\N{MINUS SIGN}0.5M", "0", "1M"]
    assert labels([-2e-5, 0.0]) == ["\N{MINUS SIGN}2e\N{MINUS SIGN}5", "0"]


def test_earlier_lines_are_wider() -> None:
    lines = [Line([(0.0, 1.0), (1.0, 2.0)], run, f"r{run}") for run in range(3)]
    widths = [float(w) for w in re.findall(r"--w:([\d.]+)", chart(lines, "x", "y"))]
    assert widths == sorted(widths, reverse=True)
    assert widths[1] - widths[2] >= 0.5
    assert widths[0] <= 4
    assert re.findall(r"--w:([\d.]+)", chart(lines[:1], "x", "y")) == [f"{widths[2]:.2f}"]


def test_accuracy_against_residual_fills_the_axes(tmp_path: Path) -> None:
    """The first and last of three points span the axis except for the margins."""
    found = [(0.0, 0.8, 2.0), (0.1, 0.82, 1.5), (1.0, 0.7, 0.2)]
    runs = [make_run(tmp_path / f"{b}", b, scores_of(top, nats)) for b, top, nats in found]
    (drawing,) = find_drawings(report(tmp_path, *runs), "against reducible residual (nats)")
    places = dots(drawing)
    for axis, values in ((0, [n for _, _, n in found]), (1, [top for _, top, _ in found])):
        assert np.ptp(places[:, axis]) > 100  # otherwise assert_linear would accept equal positions
        assert_linear(places[:, axis], values)


def test_outcome_prefers_linear_evaluation_and_knn_20(tmp_path: Path) -> None:
    scores = {"kNN 200/set/top-1": 0.1, "kNN 20/set/top-1": 0.4, "logistic/set/brier": 0.3}
    scores |= {
        "linear/set/brier": 0.2,
        "few labels 10%/set/top-1": 0.6,
        "few labels 1%/set/top-1": 0.5,
    }
    (run,) = read_runs([make_run(tmp_path / "a", 0.0, scores)])
    found = outcome(run)
    assert (found["kNN"], found["Brier"], found["1 % labels"]) == (0.4, 0.2, 0.5)

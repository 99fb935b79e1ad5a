"""Curves over what varies: the numbers of the files, failures that stay in sight, clean axes."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_pages import Page, drawings, report, write_run
from run_files import record, results_text

from compressive.report.summary import failure, outcome
from compressive.report.svg import CHART_HEIGHT, CHART_WIDTH, Line, chart, labels
from compressive.rundir.reader import read_runs


def made(folder: Path, beta: float, scores: dict[str, float], **changes: Any) -> Path:
    """A whole run at this beta, with these in its evaluation: "task/dataset/metric"."""
    run = write_run(folder)
    config = json.loads((run / "config.json").read_text())
    config["bottleneck"]["beta"] = beta
    (run / "config.json").write_text(json.dumps({**config, **changes}))
    names = [(*name.split("/", 2), value) for name, value in scores.items()]
    records = [record(task, dataset, metric, value) for task, dataset, metric, value in names]
    results = results_text(records, about={"data": "set"})
    (run / "evaluation/results.json").write_text(results)
    return run


def at(top1: float, reducible_residual: float) -> dict[str, float]:
    return {"linear/set/top-1": top1, "information/set/reducible_residual": reducible_residual}


def collapsed(folder: Path, beta: float, health: str = "collapse: rank 1.0") -> Path:
    run = made(folder, beta, {}, train={"steps": 1000})
    (run / "evaluation/results.json").unlink()
    assert (run / "encoder.safetensors").is_file()  # there is one from the first step on
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "health": health}) + "\n")
    return run


def drawn(page: Page, words: str) -> list[str]:
    """Drawings of the ablation that are so described."""
    inside = page.source.split('<section id="ablation">')[1].split("</section>")[0]
    found = re.findall(r"<svg.*?</svg>", inside, re.DOTALL)
    return [drawing for drawing in found if words in drawing]


def dots(drawing: str) -> np.ndarray:
    return np.array(re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawing), dtype=float)


def assert_linear(places: np.ndarray, values: Any) -> None:
    """Places in a drawing are a straight line in the values, to the tenth they are written to."""
    slope, start = np.polyfit(values, places, 1)
    np.testing.assert_allclose(places, start + slope * np.asarray(values), atol=0.11)


@pytest.mark.slow
def test_curves_are_means_and_deviations_over_seeds_in_the_order_of_the_values(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    betas, values = [0.3, 0.0, 1.0], random.random((3, 3))
    runs = [
        made(tmp_path / f"b{beta}s{seed}", beta, at(values[i, seed], 1.0), seed=seed)
        for i, beta in enumerate(betas)
        for seed in range(3)
    ]
    page = report(tmp_path, *runs)
    drawing, _ = drawn(page, "top-1, % against")  # the second against the nats
    places, order = dots(drawing), np.argsort(betas)
    assert_linear(places[:, 0], [0, 1, 2])
    assert_linear(places[:, 1], values.mean(1)[order])
    bars = np.array(re.findall(r'd="M([\d.]+) ([\d.]+)V([\d.]+)"', drawing), dtype=float)
    np.testing.assert_allclose(bars[:, 0], places[:, 0], atol=0.11)
    scale = np.polyfit(values.mean(1)[order], places[:, 1], 1)[0]
    half = -scale * values.std(1, ddof=1)[order]
    np.testing.assert_allclose(bars[:, 1] - bars[:, 2], 2 * half, atol=0.3)
    words = re.findall(r'text-anchor="middle">([^<]*)</text>', drawing)
    assert words[:4] == ["0", "0.3", "1", "bottleneck.beta"]
    assert "means over seeds (3 of a value)" in page.text


def test_shares_are_drawn_times_100_and_nats_as_they_are(tmp_path: Path) -> None:
    """Brier too, as in all tables."""
    scores = {
        "linear/set/top-1": 0.8,
        "linear/set/brier": 0.15,
        "information/set/reducible_residual": 0.15,
    }
    runs = [made(tmp_path / f"b{beta}", beta, scores) for beta in (0.0, 1.0)]
    page = report(tmp_path, *runs)
    for words, value in (
        ("top-1, %", 80),
        ("Brier x 100", 15),
        ("reducible residual (nats)", 0.15),
    ):
        drawing = next(each for each in drawn(page, f"{words} against") if "bottleneck" in each)
        ticks = [float(tick) for tick in re.findall(r">(\d+(?:\.\d+)?)</text>", drawing)]
        beside = [tick for tick in ticks if tick not in (0.0, 1.0)]  # those are beta's
        assert min(beside) <= value <= max(beside)
        assert max(beside) < 3 * value


def test_accuracy_is_drawn_against_the_nats_that_were_kept(tmp_path: Path) -> None:
    found = [(0.0, 0.8, 2.0), (0.1, 0.82, 1.5), (1.0, 0.7, 0.2)]
    runs = [made(tmp_path / f"{b}", b, at(top, nats)) for b, top, nats in found]
    (drawing,) = drawn(report(tmp_path, *runs), "against reducible residual (nats)")
    places = dots(drawing)
    assert_linear(places[:, 0], [nats for _, _, nats in found])
    assert_linear(places[:, 1], [top for _, top, _ in found])
    beside = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">([^<]*)</text>', drawing)
    assert [word for _, _, word in beside] == ["0", "0.1", "1"]
    for (x, y, _), place in zip(beside, places, strict=True):
        assert np.hypot(float(x) - place[0], float(y) - place[1]) < 35


def test_seeds_that_failed_are_not_counted_among_those_of_a_mean(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / f"{b}{seed}", b, at(0.8, 1.0), seed=seed)
        for b in (0.0, 1.0)
        for seed in (0, 1)
    ]
    third = collapsed(tmp_path / "third", 0.0)
    config = json.loads((third / "config.json").read_text())
    config |= {"seed": 2, "train": json.loads((runs[0] / "config.json").read_text())["train"]}
    (third / "config.json").write_text(json.dumps(config))
    assert "means over seeds (2 of a value)" in report(tmp_path, *runs, third).text


@pytest.mark.slow
def test_what_was_judged_otherwise_is_not_averaged(tmp_path: Path) -> None:
    """Two seeds on test images and one on held-out ones; Brier of another head; nats of one run."""
    random = np.random.default_rng(1)
    values, runs = random.random((3, 3)), []
    for i, beta in enumerate((0.0, 0.1, 1.0)):
        for seed in range(3):
            scores = {"linear/set/top-1": values[i, seed], "linear/set/brier": 0.2}
            runs.append(made(tmp_path / f"b{i}s{seed}", beta, scores, seed=seed))
    path = runs[5] / "evaluation/results.json"
    records = [record("linear", "set held out", "top-1", 0.01)]
    path.write_text(results_text(records, about={"data": "set held out"}))
    path = runs[0] / "evaluation/results.json"
    content = json.loads(path.read_text())
    content["records"][1] = record("logistic", "set", "brier", 0.9)
    content["records"].append(record("information", "set", "reducible_residual", 99.0))
    path.write_text(json.dumps(content))

    page = report(tmp_path, *runs)

    (drawing,) = [each for each in drawn(page, "top-1, % against") if "bottleneck.beta" in each]
    means = [values[0].mean(), values[1, :2].mean(), values[2].mean()]
    assert_linear(dots(drawing)[:, 1], means)
    assert "2 runs were judged otherwise" in page.text
    for words in ("Brier x 100 against", "reducible residual (nats) against"):
        (drawing,) = [each for each in drawn(page, words) if "bottleneck.beta" in each]
        assert np.ptp(dots(drawing)[:, 1]) < 0.11  # as all are that count


@pytest.mark.slow
def test_a_collapsed_run_is_marked_at_its_value(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"{b}", b, at(0.8 - b, 1.0)) for b in (0.0, 0.1)]
    runs += [collapsed(tmp_path / "one", 1.0), collapsed(tmp_path / "two", 3.0, "nan: loss")]
    page = report(tmp_path, *runs)
    assert "A cross: collapsed, at 1. A cross: diverged, at 3." in page.text
    (drawing,) = [d for d in drawn(page, "top-1, % against bottleneck.beta")]
    crosses = re.findall(r'd="M([\d.]+) [\d.]+l8 8m0 -8l-8 8"', drawing)
    assert len(dots(drawing)) == 2
    assert_linear(np.array([*dots(drawing)[:, 0], *(float(x) + 4 for x in crosses)]), range(4))
    assert "A cross" not in report(tmp_path, *runs[:2]).text


@pytest.mark.slow
def test_runs_that_differ_otherwise_make_lines_of_their_own(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / f"{method}{b}", b, at(0.8 - b, 1 - b), method=method)
        for method in ("c-simclr", "c-byol")
        for b in (0.0, 0.1)
    ]
    page = report(tmp_path, *runs)
    (drawing,) = drawn(page, "top-1, % against bottleneck.beta")
    assert re.findall(r"<title>(.*?)</title>", drawing) == ["method c-simclr", "method c-byol"]
    assert drawing.count('<path class="line"') == 2
    assert "method c-byol" in page.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "scores"),
    [
        ([{}, {}], at(0.8, 1.0)),
        ([{"seed": 0}, {"seed": 1}], at(0.8, 1.0)),
        ([{"method": "simclr"}, {"method": "byol"}], at(0.8, 1.0)),
        ([{"probe": {"lr": 1.0}}, {"probe": {"lr": 2.0}}], at(0.8, 1.0)),  # not what is learned
        ([{"views": {"blur": True}}, {"views": {"blur": False}}], at(0.8, 1.0)),
        ([{"views": {"size": 32}}, {"views": {"size": 64}}], {}),
    ],
)
def test_no_section_where_no_number_varies_or_nothing_was_measured(
    tmp_path: Path, changes: list[dict[str, Any]], scores: dict[str, float]
) -> None:
    runs = [made(tmp_path / f"{i}", 0.0, scores, **change) for i, change in enumerate(changes)]
    for run in runs if not scores else ():
        journal = run / "metrics.jsonl"
        lines = [line for line in journal.read_text().splitlines() if "probe_acc" not in line]
        journal.write_text("\n".join(lines))
    assert "ablation" not in report(tmp_path, *runs).sections


@pytest.mark.slow
def test_runs_that_were_not_evaluated_are_told_apart_by_labels_held_out(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"{b}", b, {}) for b in (0.0, 0.1, 1.0)]
    for run, held in zip(runs, (0.7, 0.9, 0.6), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 40, "probe_accuracy": held}) + "\n")
    page = report(tmp_path, *runs)
    assert not drawn(page, "top-1")
    drawing, _ = drawn(page, "accuracy, % against bottleneck.beta")  # the second: neighbors
    assert_linear(dots(drawing)[:, 1], [0.7, 0.9, 0.6])


@pytest.mark.slow
def test_two_settings_that_vary_are_two_studies(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / f"{b}{size}", b, at(0.8 - b, 1.0), views={"size": size})
        for b in (0.0, 0.1)
        for size in (32, 64, 96)
    ]
    page = report(tmp_path, *runs)
    (over_beta,) = drawn(page, "top-1, % against bottleneck.beta")
    (over_size,) = drawn(page, "top-1, % against views.size")
    assert len(re.findall("<title>", over_beta)) == 3
    assert len(re.findall("<title>", over_size)) == 2


def test_an_outcome_is_of_the_runs_own_images(tmp_path: Path) -> None:
    scores = {"linear/other/top-1": 0.1, "linear/set/top-1": 0.8, "corruptions/set-C/top-1": 0.5}
    scores |= {"corruptions/other-C/top-1": 0.2, "logistic/set/brier": 0.3}
    (run,) = read_runs([made(tmp_path / "a", 0.0, scores)])
    last = {
        "held-out probe": 0.5,
        "held-out kNN": 0.6,
        "reducible_residual": 5 / 30,
        "predictive": 2 - 2 / 30,
    }  # of its journal
    assert outcome(run) == {"linear": 0.8, "corruptions": 0.5, "Brier": 0.3, **last}


def test_a_run_has_failed_if_it_ended_ill_and_left_nothing(tmp_path: Path) -> None:
    run = collapsed(tmp_path / "a", 1.0)
    assert failure(read_runs([run])[0]) == "collapsed"
    results = results_text([record("linear", "set", "top-1", 0.1)])  # of a checkpoint
    (run / "evaluation/results.json").write_text(results)
    assert failure(read_runs([run])[0]) == ""
    well = made(tmp_path / "b", 1.0, {}, train={"steps": 1000})
    assert failure(read_runs([well])[0]) == ""
    over = collapsed(tmp_path / "c", 1.0)
    config = json.loads((over / "config.json").read_text()) | {"train": {"steps": 31}}
    (over / "config.json").write_text(json.dumps(config))
    assert failure(read_runs([over])[0]) == "", "it came to its end"


def test_a_run_that_is_still_going_is_no_result(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"{b}", b, {}, train={"steps": 31}) for b in (0.0, 0.1, 1.0)]
    for run in runs[:2]:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 31, "loss": 0.5}) + "\n")
    drawing, _ = drawn(report(tmp_path, *runs), "accuracy, % against bottleneck.beta")
    assert len(dots(drawing)) == 2


def test_a_setting_that_older_runs_lack_does_not_part_them(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"{b}", b, at(0.8 - b, 1.0)) for b in (0.0, 0.1, 0.2)]
    for run in runs[1:]:
        config = json.loads((run / "config.json").read_text()) | {"views": {"strength": 1.0}}
        (run / "config.json").write_text(json.dumps(config))
    (drawing,) = drawn(report(tmp_path, *runs), "top-1, % against bottleneck.beta")
    assert len(dots(drawing)) == 3


def paths(drawing: str) -> list[np.ndarray]:
    """Each unbroken stretch of each line."""
    found = []
    for path in re.findall(r'<path class="line" d="([^"]*)"', drawing):
        pieces = filter(None, path.split("M"))
        found += [np.array([p.split() for p in piece.split("L")], float) for piece in pieces]
    return found


def test_axes_end_before_the_few_points_that_lie_far_away() -> None:
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
    # The stretch that enters comes first; what follows is the line as it is without the far ones.
    np.testing.assert_allclose([p[0] for p in pieces[1:]], plain[:-1], atol=0.11)
    np.testing.assert_allclose([p[1] for p in pieces[1:]], plain[1:], atol=0.11)
    last, first = np.array([60.0, 0.0]), usual[0]
    slope = (first[1] - last[1]) / (first[0] - last[0])
    assert slope == 0  # it enters from the right, at the height it comes from
    np.testing.assert_allclose(pieces[0][:, 1], plain[0, 1], atol=0.11)
    assert pieces[0][0, 0] == pytest.approx(CHART_WIDTH - 10, abs=0.11)


def test_a_line_that_leaves_the_axes_ends_at_them_on_its_way(tmp_path: Path) -> None:
    """Up and out to a point far away, and back."""
    inner = np.column_stack([np.arange(101.0), np.arange(101.0) % 7])
    points = np.insert(inner, 50, [60.0, 1e4], axis=0)
    pieces = paths(chart([Line([*map(tuple, points)], 0, "a")], "x", "y", clip=True))
    starts = np.array([piece[0] for piece in pieces])
    known = [place for place in range(101) if place != 50]  # a piece begins at each of these
    scale = [np.polyfit(points[known, axis], starts[known, axis], 1) for axis in (0, 1)]
    top = (10 - scale[1][1]) / scale[1][0]
    for piece, end, inside in ((pieces[49], 1, points[49]), (pieces[50], 0, points[51])):
        share = (top - inside[1]) / (points[50][1] - inside[1])
        expected = inside + share * (points[50] - inside)
        found = [(piece[end][axis] - scale[axis][1]) / scale[axis][0] for axis in (0, 1)]
        np.testing.assert_allclose(found, expected, atol=0.1)  # places are written to a tenth


def test_curves_over_training_leave_a_spike_out_and_keep_the_rest(tmp_path: Path) -> None:
    """An early one, as the first reading of the plane may be."""
    run = write_run(tmp_path / "run")
    before = drawings(report(tmp_path, run))
    header, *lines = (run / "metrics.jsonl").read_text().splitlines()
    spike = json.dumps({**json.loads(lines[0]), "step": 0, "loss": 4e4, "reducible_residual": 4e4})
    (run / "metrics.jsonl").write_text("\n".join([header, spike, *lines]))
    after = drawings(report(tmp_path, run))

    def highest(found: list[str], words: str) -> float:
        (drawing,) = [d for d in found if words in d]
        texts = re.findall(r'text-anchor="(?:end|middle)">([\d.]+k?)<', drawing)
        return max(float(text.replace("k", "e3")) for text in texts)

    assert highest(after, '"loss against step') == highest(before, '"loss against step')
    plane = "against reducible_residual"
    assert highest(after, plane) == highest(before, plane) < 10


def test_an_axis_has_one_unit() -> None:
    assert labels([0.0, 5e3, 1e4, 1.5e4]) == ["0", "5k", "10k", "15k"]
    assert labels([0.0, 2e3, 4e3]) == ["0", "2000", "4000"]
    assert labels([-5e5, 0.0, 1e6]) == ["\N{MINUS SIGN}0.5M", "0", "1M"]
    assert labels([-2e-5, 0.0]) == ["\N{MINUS SIGN}2e\N{MINUS SIGN}5", "0"]


def test_lines_that_later_ones_cover_are_wider() -> None:
    lines = [Line([(0.0, 1.0), (1.0, 2.0)], run, f"r{run}") for run in range(3)]
    widths = [float(w) for w in re.findall(r"--w:([\d.]+)", chart(lines, "x", "y"))]
    assert widths == sorted(widths, reverse=True)
    assert widths[1] - widths[2] >= 0.5
    assert widths[0] <= 4
    assert re.findall(r"--w:([\d.]+)", chart(lines[:1], "x", "y")) == [f"{widths[2]:.2f}"]


def test_accuracy_is_drawn_against_the_nats_that_were_kept_and_spreads(tmp_path: Path) -> None:
    """The first and the last of three are the ends of the axis, but for a margin on both sides."""
    found = [(0.0, 0.8, 2.0), (0.1, 0.82, 1.5), (1.0, 0.7, 0.2)]
    runs = [made(tmp_path / f"{b}", b, at(top, nats)) for b, top, nats in found]
    (drawing,) = drawn(report(tmp_path, *runs), "against reducible residual (nats)")
    places = dots(drawing)
    for axis, values in ((0, [n for _, _, n in found]), (1, [top for _, top, _ in found])):
        assert np.ptp(places[:, axis]) > 100  # this line belongs into assert_linear
        assert_linear(places[:, axis], values)


def test_an_outcome_takes_the_papers_evaluation_and_twenty_neighbors(tmp_path: Path) -> None:
    scores = {"kNN 200/set/top-1": 0.1, "kNN 20/set/top-1": 0.4, "logistic/set/brier": 0.3}
    scores |= {
        "linear/set/brier": 0.2,
        "few labels 10%/set/top-1": 0.6,
        "few labels 1%/set/top-1": 0.5,
    }
    (run,) = read_runs([made(tmp_path / "a", 0.0, scores)])
    found = outcome(run)
    assert (found["kNN"], found["Brier"], found["1 % labels"]) == (0.4, 0.2, 0.5)

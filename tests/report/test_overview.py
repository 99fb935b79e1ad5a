"""The top of the page: verdict, winners and intervals match the comparison and the results."""

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_pages import Page, report, write_run
from run_files import record, results_text

from compressive.reporting import write_report
from compressive.reporting.verdict import verdict_sentence
from compressive.rundir.intervals import mean_part, t_interval
from compressive.rundir.records import ComparisonText

KEY = "logistic/set/top-1"


def experiment(folder: Path, method: str, values: list[float]) -> list[Path]:
    """Write a run for each value of the top-1 accuracy, with seeds 0, 1, ..."""
    runs = []
    for seed, value in enumerate(values):
        run = write_run(folder / f"{method}{seed}")
        config = json.loads((run / "config.json").read_text()) | {"method": method, "seed": seed}
        (run / "config.json").write_text(json.dumps(config))
        records = [
            record("logistic", "set", "top-1", value, low=value - 0.02, high=value + 0.02),
            record("logistic", "set", "ece", 0.01),
        ]
        (run / "evaluation/results.json").write_text(results_text(records))
        runs.append(run)
    return runs


def page_of(tmp_path: Path, runs: list[Path], over: str = "", **verdicts: str) -> Page:
    """Write a page with verdicts on top-1, and on ECE if it is given."""
    keys = {"top1": KEY, "ece": "logistic/set/ece"}
    by_key = {keys[name]: ("1.0", verdict) for name, verdict in verdicts.items()}
    text = ComparisonText("a", "b", [], "note", "", by_key, over) if verdicts else None
    return Page(write_report(runs, tmp_path / "r.html", verdicts=text))


def summary(page: Page) -> str:
    return page.source.split('<section id="summary"')[1].split("</section>")[0]


def sentence(page: Page) -> str:
    (found,) = re.findall(r'<p class="verdict">(.*?)</p>', page.source, re.DOTALL)
    return found


@pytest.mark.parametrize(
    ("verdict", "winner"), [("better", "C-SimCLR"), ("worse", "SimCLR"), ("undecided", "")]
)
def test_winner_is_marked_only_if_the_verdict_supports_it(
    tmp_path: Path, verdict: str, winner: str
) -> None:
    """The second experiment has the higher mean in all cases."""
    runs = experiment(tmp_path, "simclr", [0.7, 0.72]) + experiment(
        tmp_path, "c-simclr", [0.8, 0.9]
    )
    page = page_of(tmp_path, runs, "seeds", top1=verdict)
    assert summary(page).count('class="best"') == bool(winner)
    rows = re.findall(r"<tr>.*?</tr>", summary(page), re.DOTALL)
    marked = [row for row in rows if 'class="best"' in row]
    assert all(f"</i>{winner}<" in row for row in marked)
    assert sentence(page).startswith(f"{winner} is better" if winner else "No winner")
    assert (" in linear" in sentence(page)) == bool(winner)


def test_single_runs_have_no_winner(tmp_path: Path) -> None:
    runs = experiment(tmp_path, "simclr", [0.7]) + experiment(tmp_path, "c-simclr", [0.9])
    page = page_of(tmp_path, runs, "images", top1="networks differ", ece="one number each")
    assert 'class="best"' not in summary(page)
    assert "differ in linear;" in sentence(page)
    assert "one seed" in sentence(page)
    assert "these networks differ" in summary(page)


def test_sentence_starts_with_the_experiment_that_is_better_in_more_metrics() -> None:
    main = {"linear": "worse", "kNN": "worse", "calibration": "better", "smoothness": "undecided"}
    verdicts = ComparisonText("", "", [], "", "", {k: ("", v) for k, v in main.items()}, "seeds")
    found = verdict_sentence(["SimCLR", "BYOL"], verdicts, main)
    assert found.startswith(
        "SimCLR is better than BYOL in linear and kNN, and worse in calibration"
    )
    assert "smoothness" not in found


def test_verdicts_without_a_test_say_so(tmp_path: Path) -> None:
    runs = experiment(tmp_path, "simclr", [0.7]) + experiment(tmp_path, "c-simclr", [0.9])
    page = page_of(tmp_path, runs, "images", top1="too few images")
    assert "too few images to tell" in sentence(page)
    assert summary(page).count("too few images to tell") == 2
    # The others have no value in any run, and no verdict.
    assert summary(page).count("not tested") >= 3 * 7


def test_cells_are_means_over_seeds_with_student_intervals(tmp_path: Path) -> None:
    values = [0.71, 0.74, 0.78]
    page = page_of(tmp_path, experiment(tmp_path, "simclr", values))
    interval = t_interval(float(np.mean(values)), mean_part(values))
    assert interval is not None
    assert page.numbers["summary"][0] == pytest.approx(np.mean(values))
    assert f"[{100 * interval.low:.1f},\N{NO-BREAK SPACE}{100 * interval.high:.1f}]" in summary(
        page
    )
    assert "3 seeds" in summary(page)
    alone = page_of(tmp_path / "alone", experiment(tmp_path / "alone", "simclr", [0.7]))
    assert "[68.0,\N{NO-BREAK SPACE}72.0]" in summary(alone)


def test_page_starts_with_title_date_and_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    path = run / "evaluation/results.json"
    about = {"data": "set", "train_images": 5000, "test_images": 2400, "classes": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"about": about}))
    page = report(tmp_path, run)
    assert "<h1>C-SimCLR on set</h1>" in page.source
    head = page.source.split("<section")[0]
    today = date.today()
    for expected in (f"{today:%B %Y}", "set: 5,000 training images", "2,400 test images", "1 run"):
        assert expected in head
    assert "70.0" in sentence(page)


def test_more_than_two_experiments_have_no_verdict(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{i}", i / 100) for i in range(3)]
    page = report(tmp_path, *runs)
    assert sentence(page).startswith("No verdict")
    assert "<h1>3 variants of C-SimCLR on set</h1>" in page.source


def test_every_card_shows_the_metric_that_most_runs_have(tmp_path: Path) -> None:
    """Two runs have only logistic regression, one has both, and one has neither."""
    runs = [write_run(tmp_path / f"r{i}", i / 100) for i in range(4)]
    both = runs[0] / "evaluation/results.json"
    content = json.loads(both.read_text())
    content["records"].append(record("linear", "set", "top-1", 0.99))
    both.write_text(json.dumps(content))
    (runs[3] / "evaluation/results.json").write_text(results_text([]))
    page = report(tmp_path, *runs)
    cards = page.source.split('<section id="training"')[1].split("</section>")[0]
    cards = re.findall(r'<div class="card.*?</div>', cards, re.DOTALL)
    assert len(cards) == 4
    assert all(card.count("logistic top-1") == 1 and "linear" not in card for card in cards)
    assert [("not tested" in card) for card in cards] == [False, False, False, True]


def test_smoothness_of_older_results_is_the_mean_over_changes(tmp_path: Path) -> None:
    """Newer results have the mean with an interval."""
    run = write_run(tmp_path / "run")
    assert 0.4 in [round(v, 12) for v in report(tmp_path, run).numbers["summary"]]
    path = run / "evaluation/results.json"
    content: dict[str, Any] = json.loads(path.read_text())
    mean = record("smoothness", "set test", "lipschitz", 0.45, low=0.44, high=0.46)
    content["records"].append(mean)
    path.write_text(json.dumps(content))
    page = report(tmp_path, run)
    assert 0.45 in page.numbers["summary"]
    assert "[0.4400,\N{NO-BREAK SPACE}0.4600]" in summary(page)


def test_losses_that_differ_have_charts_of_their_own(tmp_path: Path) -> None:
    """Runs of one method and beta share a chart; another beta gets its own."""
    runs = [write_run(tmp_path / f"r{i}", shift) for i, shift in enumerate((0.0, 0.0, 0.01))]
    source = report(tmp_path, *runs).source
    losses = re.findall(r'aria-label="loss against step: (.*?)"', source)
    assert len(losses) == 2
    assert "(r0)" in losses[0]
    assert "(r1)" in losses[0]
    assert "beta 0.01" in losses[1]
    speeds = re.findall(r'aria-label="images per second against step: (.*?)"', source)
    assert len(speeds) == 1


def test_overlapping_lines_have_different_dashes(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{i}", i / 100) for i in range(3)]
    source = report(tmp_path, *runs).source
    (speed,) = re.findall(r'<svg[^>]*aria-label="images per second.*?</svg>', source, re.DOTALL)
    styles = re.findall(r'<g class="(k\d)"(?: stroke-dasharray="(.*?)")?', speed)
    assert len(styles) == 3
    assert len({color for color, _ in styles}) == len({dash for _, dash in styles}) == 3

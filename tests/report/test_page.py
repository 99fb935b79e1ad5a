"""The report page: tables and plots match the run files, and damaged files are reported."""

import base64
import json
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report_pages import SECTIONS, Page, drawings, gallery, journal, records, report, write_run
from run_files import config_text, metrics_text, record, results_text
from safetensors.numpy import save_file

from compressive.recipes import paper
from compressive.reporting import write_report
from compressive.reporting.gallery import png
from compressive.reporting.svg import MAX_POINTS, Line, chart, thinned, ticks
from compressive.reporting.tables import number_cell
from compressive.rundir.fingerprint import file_fingerprint
from compressive.rundir.records import ComparisonText, Record
from compressive.rundir.versions import UnsupportedFormat

COMPARISONS = {"ablation", "differences", "disagreements"}  # sections that need two runs
PREDICTED = ("classes", "confusion", "errors")  # sections that need predictions


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_complete_runs_have_every_section(tmp_path: Path, count: int) -> None:
    runs = [write_run(tmp_path / f"r{i}", i / 100) for i in range(count)]
    page = report(tmp_path, *runs)
    assert page.sections == [s for s in SECTIONS if count > 1 or s not in COMPARISONS]
    for run in runs:
        assert f"Folder {run.name}." in page.text
    for expected in ("ok: rank 30.0 of 256", "frost, which needs"):
        assert page.text.count(expected) == count
    for expected in ("compressive train x", "a CPU", "compressive e "):  # shared, so shown once
        assert page.text.count(expected) == 1
    pairs = count - 1 if count > 1 else 0
    assert part(page, "corruptions").count('class="heat"') == count + pairs


def test_page_has_no_scripts_or_external_resources(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.01))
    assert page.addresses
    assert all(a.startswith(("data:image/png;base64,", "#")) for a in page.addresses)
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert "://" not in page.source
    assert {a[1:] for a in page.addresses if a[0] == "#"} == set(page.sections) - {"summary"}


def test_tables_match_the_results_files(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.01)
    page = report(tmp_path, a, b)
    one, two = records(0.0), records(0.01)
    pairs = zip(one[:8], two[:8], strict=True)
    assert page.numbers["figures"] == [record["value"] for pair in pairs for record in pair]
    for printed in ("70.0 % [68.0, 72.0]", "71.0 % [69.0, 73.0]", "32.40", "1.510"):
        assert printed in page.text
    cells = [[r["protocol"]["by_severity"] for r in run[8:10]] for run in (one, two)]
    difference = np.subtract(cells[1], cells[0])
    expected = [*np.ravel(cells[0]), *np.ravel(cells[1]), *difference.ravel()]
    assert page.numbers["corruptions"] == expected
    assert "+1.0" in page.text
    assert page.numbers["smoothness"] == [0.4, 0.4 + 0.01] * 8
    assert page.numbers["reliability"] == [0.01, 0.01 + 0.01]
    top1, _, top5, brier = paper.TABLE_1["c-simclr", "r50", 300]
    assert page.numbers["paper"][:3] == [top1, top5, brier]
    assert page.numbers["paper"][3:6] == [0.7, 0.9, 0.3]


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        ({"recipe": "c-simclr/imagenet-r50-1000"}, ("r50", 1000), "ImageNet, ResNet-50, 1000"),
        (
            {"recipe": "c-simclr/imagenet-r50x2-1000"},
            ("r50x2", 1000),
            "of double width, 1000",
        ),
        ({"recipe": "c-simclr/imagenet-r50-7"}, ("r50", 300), "ImageNet, ResNet-50, 300 epochs"),
        ({"train": {"steps": 12, "epochs": 200}}, ("r50", 300), "test_resnet, 12 steps; logistic"),
    ],
)
def test_run_is_compared_with_the_matching_paper_row(
    changes: dict[str, Any], row: tuple[str, int], expected: str, tmp_path: Path
) -> None:
    """The report also states the length of the run itself."""
    run = write_run(tmp_path / "a")
    settings = json.loads((run / "config.json").read_text())
    settings["network"] = {"name": "test_resnet"}
    (run / "config.json").write_text(json.dumps(settings | changes))
    page = report(tmp_path, run)
    top1, _, top5, brier = paper.TABLE_1["c-simclr", *row]
    assert page.numbers["paper"][:3] == [top1, top5, brier]
    assert expected in page.text


def test_html_in_run_files_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'>&<img src=x onerror=y>"
    run = write_run(tmp_path / "<script>\"'&", name=evil)
    results = run / "evaluation/results.json"
    results.write_text(json.dumps({**json.loads(records_text(evil)), "skipped": [evil, "\ud800"]}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "loss": 1, "health": evil}) + "\n")
    page = report(tmp_path, run)
    assert "script" not in page.tags
    assert all(a.startswith(("data:image/png;base64,", "#")) for a in page.addresses)
    assert page.text.count("alert(1)") >= 4
    assert "<b>grid" in page.text
    assert "<b>" not in page.source


def records_text(name: str) -> str:
    found = [{**r, "task": r["task"] + name, "metric": r["metric"]} for r in records(0.0)]
    found += [record(name, name, name, 1.0, command=name)]
    bins = {"reliability": [[0.5, 0.5, 10]]}
    found += [record(name, name, "ece", 1.0, protocol=bins)]
    return results_text(found, run=name, about={name: name})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "message", "absent"),
    [
        ("config.json", "config.json: ", {"paper"}),
        ("metrics.jsonl", "no training curves", {"plane"}),
        ("encoder.safetensors", "encoder.safetensors: ", set()),
        ("evaluation/gallery.safetensors", "no views", {"views", "neighbors", "maps"}),
        (
            "evaluation/results.json",
            "compressive evaluate",
            {*("figures", "reliability", "corruptions", "smoothness", "paper"), *PREDICTED},
        ),
    ],
)
def test_missing_file_is_reported_and_its_sections_are_absent(
    tmp_path: Path, missing: str, message: str, absent: set[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert message not in report(tmp_path, run).text
    (run / missing).unlink()
    page = report(tmp_path, run)
    assert message in page.text
    assert set(SECTIONS) - set(page.sections) == absent | COMPARISONS


def test_results_of_other_weights_are_reported(tmp_path: Path) -> None:
    """This happens if a run is evaluated, trained further and not evaluated again."""
    run = write_run(tmp_path / "run")
    path = run / "evaluation" / "results.json"
    results = json.loads(path.read_text())
    message = "results.json: of other weights"
    save_file({"weight": np.ones(3, np.float32)}, run / "encoder.safetensors")
    now = file_fingerprint(run / "encoder.safetensors")
    for evaluated, reported in ((now, False), ("older", True)):
        results["about"]["weights"] = evaluated
        path.write_text(json.dumps(results))
        assert (message in report(tmp_path, run).text) is reported


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["config.json", "metrics.jsonl", "evaluation/results.json", "evaluation/gallery.safetensors"],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_files_are_reported(tmp_path: Path, file: str, share: float) -> None:
    run = write_run(tmp_path / "run")
    content = (run / file).read_bytes()
    (run / file).write_bytes(content[: int(share * len(content))])
    page = report(tmp_path, run)
    assert f"{Path(file).name}: " in page.text


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "evaluation/results.json"])
@pytest.mark.parametrize("version", [1, 3])
def test_unsupported_formats_are_refused_with_the_writing_version(
    tmp_path: Path, file: str, version: int
) -> None:
    """Format 1, compressive 0.1, wrote no version at all."""
    run = write_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["about"]["versions"]["compressive"] = "0.7"
    (run / "config.json").write_text(json.dumps(config))
    assert "summary" in report(tmp_path, run).sections
    text = (run / file).read_text()
    removed = {"metrics.jsonl": '{"format_version": 2}\n'}.get(file, '"format_version": 2, ')
    assert removed in text
    new = "" if version == 1 else removed.replace("2", str(version))
    (run / file).write_text(text.replace(removed, new))
    with pytest.raises(UnsupportedFormat) as caught:
        report(tmp_path, run)
    for expected in (str(run / file), "compressive 0.7", f"format {version}", "format 2"):
        assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_metrics_lines_are_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    whole = report(tmp_path, run)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 31, "loss": 5.0, "hea\n\xff\x00\n[1]\n{"step": NaN, "loss": "a"}')
        file.write(b'\n{"step": 32, "loss": 1e308}\n{"step": 33, "loss": 1%s}' % (b"0" * 400))
    page = report(tmp_path, run)
    assert "metrics.jsonl: 4 damaged" in page.text
    assert "33 steps" in page.text
    assert drawings(page) == drawings(whole)


def test_invalid_values_are_dropped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    bad = [
        record("linear", "set", "top-1", float("nan")),
        record("linear", "set", "top-5", 0.5, low="x", n=None, of=None, protocol=None),
        record("linear", "set", "ece", 0.5, protocol={"reliability": [[1], "a", None]}),
        record("smoothness x", "set", "lipschitz", 0.5, protocol={"histogram": {"edges": [1]}}),
        record("corruption", "C fog", "top-1", 0.5, protocol={"by_severity": [0.5, None]}),
        record("corruption", "C fog", "top-1", 0.5, protocol={"by_severity": 7}),
        {"task": "linear"},
        "text",
    ]
    (run / "evaluation/results.json").write_text(results_text(bad))
    (run / "config.json").write_text(config_text({"method": ["list"], "about": 3}))
    odd = {**gallery(0), "views": np.zeros((2, 2)), "query": np.zeros((9, 4, 4, 3), np.uint8)}
    odd["map"] = np.full((4, 2), np.nan, np.float32)
    save_file(odd, run / "evaluation/gallery.safetensors", metadata={"classes": "{"})
    page = report(tmp_path, run)
    assert "4 records" in page.text
    assert "views of" in page.text
    assert page.numbers["figures"] == [0.5]
    assert page.sections == ["summary", "figures", "training", "plane", "origins"]
    (run / "evaluation/results.json").write_text(results_text([], skipped="no"))
    assert "results.json: damaged" in report(tmp_path, run).text


def test_outliers_do_not_stretch_axes_and_the_last_point_is_marked() -> None:
    """The first reading is ten times as far away as all others; then the last one is."""
    usual = [(1 + 0.01 * i, 0.1 * i) for i in range(50)]
    far = (9.0, 2.0)

    def plot(points: list[tuple[float, float]]) -> tuple[float, int]:
        svg = chart([Line(points, 0, "a")], "x", "y", ends=True, clip=True)
        path = re.search(r'class="line" d="(.*?)"', svg)
        assert path is not None
        xs = [float(x) for x in re.findall(r"[ML]([\d.]+) ", path[1])]
        return sorted(xs)[len(xs) // 2], svg.count('class="dot"')

    middle, dots = plot([far, *usual])
    assert middle > 150  # of 350; 67 if the axes include the first reading
    assert dots == 1
    middle, dots = plot([*usual, far])
    assert middle < 100
    assert dots == 1


def test_results_on_different_images_are_marked(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    assert "not the same images" not in report(tmp_path, a, b).text
    results = b / "evaluation/results.json"
    results.write_text(results.read_text().replace('"of": "o"', '"of": "other"'))
    assert report(tmp_path, a, b).text.count("not the same images") == 5  # groups of metrics


def test_run_with_only_a_config_has_a_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(config_text({"method": "simclr"}))
    page = report(tmp_path, run)
    assert page.sections == ["summary", "training", "origins"]
    assert "not tested" in page.text


def test_evaluation_is_suggested_only_for_finished_runs(tmp_path: Path) -> None:
    """An encoder exists from the first step on, so it does not imply a finished run."""
    run = write_run(tmp_path / "run")
    assert (run / "encoder.safetensors").is_file()
    (run / "evaluation/results.json").unlink()
    config = json.loads((run / "config.json").read_text())
    for steps, is_over in ((1000, False), (30, True)):
        config["train"] = {"steps": steps}
        (run / "config.json").write_text(json.dumps(config))
        page = report(tmp_path, run)
        assert ("step 30 of 1,000" in page.text) != is_over
        assert ("compressive evaluate" in part(page, "training")) == is_over


def test_origins_list_shared_values_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    config = json.loads((runs[1] / "config.json").read_text())
    config["about"]["device"] = "a GPU"
    (runs[1] / "config.json").write_text(json.dumps(config))
    origins = report(tmp_path, *runs).text.split("How the runs were made")[1]
    shared, a, b = re.split(r" C-SimCLR \([ab]\) (?=folder)", origins)
    assert "command compressive train x" in shared
    assert "device" not in shared.replace("evaluation: device", "")
    assert "a CPU" in a
    assert "a GPU" in b


def test_reliability_dot_area_is_proportional_to_its_share(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "run"))
    drawing = next(svg for svg in drawings(page) if "accuracy against confidence" in svg)
    radii = np.array([float(r) for r in re.findall(r'r="([\d.]+)"', drawing)])
    np.testing.assert_allclose(radii**2 / (radii**2).sum(), np.array([1, 9, 14]) / 24, atol=0.02)


def test_evaluation_folder_without_a_run_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    page = report(tmp_path, run / "evaluation")
    assert {"figures", "maps"} < set(page.sections)
    assert "config.json" not in page.text


def test_invalid_runs_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "r.html"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report([tmp_path / "nowhere"], out)
    for runs, message in (
        ([tmp_path / "empty"], "is no run"),
        ([run / "config.json"], "is not a folder"),
        ([run, run], "named twice"),
        ([], "no run to report"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            write_report(runs, out)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="is a folder"):
        write_report([run], tmp_path)
    assert not out.exists()


@pytest.mark.slow
def test_runs_with_equal_names_are_labeled_by_folder(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"seed{i}" / "run") for i in range(2)]
    page = report(tmp_path, *runs, write_run(tmp_path / "other"))
    for name in ("seed0/run", "seed1/run", "other"):
        assert f"C-SimCLR ({name})" in page.text


def test_embedded_images_match_the_gallery(tmp_path: Path) -> None:
    image = gallery(1)["query"][0]
    content = base64.b64decode(png(image).removeprefix("data:image/png;base64,"))
    with Image.open(BytesIO(content)) as opened:
        np.testing.assert_array_equal(np.asarray(opened), image)
    page = report(tmp_path, write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.01))
    views, near = 2 * 5, 3 * (1 + 4)
    assert part(page, "views").count("<img") == views  # identical views appear once
    assert part(page, "neighbors").count("<img") == 2 * near
    assert page.source.count('class="tile yes"') == 2 * 9
    assert page.source.count('class="tile no"') == 2 * 3


def test_loss_curve_matches_the_values(tmp_path: Path) -> None:
    """Positions read back from the loss curve are linear in the values."""
    page = report(tmp_path, write_run(tmp_path / "run"))
    (drawing,) = [svg for svg in drawings(page) if "loss against step" in svg]
    path = re.findall(r'<path class="line" d="M([^"]*)"', drawing)[0]
    points = np.array([[float(v) for v in p.split()] for p in path.split("L")])
    lines = [line for line in journal(30, 0.0) if "loss" in line]
    for column, key in enumerate(("step", "loss")):
        values = [line[key] for line in lines]
        slope, start = np.polyfit(values, points[:, column], 1)
        np.testing.assert_allclose(points[:, column], start + slope * np.array(values), atol=0.1)
        assert slope * (1 if key == "step" else -1) > 0  # y decreases upwards in SVG


@pytest.mark.parametrize("low", [0.0, -3.7, 1e-6, 185.9, -1e7])
@pytest.mark.parametrize("span", [1e-5, 0.3, 1.0, 4e6])
def test_ticks_are_few_and_within_the_axis(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-6 * span <= t <= low + 1.000001 * span for t in found)


def test_long_lines_are_downsampled_by_mean() -> None:
    points = [(float(i), float(i % 2)) for i in range(10 * MAX_POINTS)]
    found = thinned(points)
    assert len(found) == MAX_POINTS
    np.testing.assert_allclose(np.array(found)[:, 1], 0.5)
    np.testing.assert_allclose(np.array(found)[:, 0], np.arange(MAX_POINTS) * 10 + 4.5)


@pytest.mark.slow
def test_throughput_is_downsampled_by_median_with_axis_from_zero(tmp_path: Path) -> None:
    """Two readings in every other ten are three times too fast, so means would oscillate."""
    run = write_run(tmp_path / "run")
    rates = [2100.0 if step % 20 < 2 else 700.0 for step in range(10 * MAX_POINTS)]
    lines = [{"step": step, "images_per_second": rate} for step, rate in enumerate(rates)]
    (run / "metrics.jsonl").write_text(metrics_text(lines))
    (drawing,) = [d for d in drawings(report(tmp_path, run)) if "images per second" in d]
    path = re.findall(r'<path class="line" d="M([^"]*)"', drawing)[0].split("L")
    assert len(path) == MAX_POINTS
    assert len({point.split()[1] for point in path}) == 1
    assert '>0</text><line class="grid"' in drawing


def add_records(run: Path, *more: dict[str, Any]) -> Path:
    results = run / "evaluation/results.json"
    content = json.loads(results.read_text())
    content["records"] += more
    results.write_text(json.dumps(content))
    return run


def part(page: Page, section: str) -> str:
    """Return the HTML source of a section."""
    return page.source.split(f'<section id="{section}"')[1].split("</section>")[0]


def test_verdicts_match_compare(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("one", "other")]
    lines = [
        ("linear", "87.8", "89.5", "1.7 [1.0, 2.3]", "better"),
        ("kNN <20>", "87.6", "87.5", "-0.1 [-0.2, 0.0]", "undecided"),
        ("nll", "0.30", "0.35", "0.05 [0.01, 0.09]", "worse (seeds)"),
    ]
    verdicts = ComparisonText("one", "other", lines, "on set; over seeds", "b is <better>")
    page = Page(write_report(runs, tmp_path / "r.html", verdicts=verdicts))
    assert page.sections[page.sections.index("figures") - 1] == "verdicts"
    found = part(page, "verdicts")
    apart = "-0.1 [-0.2, 0.0]".replace("-", "\N{MINUS SIGN}")
    for expected in (*lines[0][:4], "kNN &lt;20&gt;", "on set; over seeds."):
        assert expected in found
    assert apart in page.text
    assert '<td class="ok">better</td>' in found
    assert '<td class="ill">worse (seeds)</td>' in found
    assert "<td>undecided</td>" in found
    assert '<a href="#verdicts">' in page.source


def test_legend_names_only_plotted_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, shift) for name, shift in (("plain", 0.0), ("rich", 0.01))]
    lines = [line for line in journal(30, 0.0) if "loss" in line]
    kept = [{"step": line["step"], "loss": line["loss"]} for line in lines]
    (runs[0] / "metrics.jsonl").write_text(metrics_text(kept))
    page = report(tmp_path, *runs)
    legends = {
        name: re.findall(r'<p class="legend">.*?</p>', part(page, name), re.DOTALL)[0]
        for name in ("training", "plane", "reliability", "smoothness")
    }
    assert "C-SimCLR, beta 0.01" in legends["plane"]
    assert "C-SimCLR, beta 0.0<" not in legends["plane"]
    for name in ("training", "reliability", "smoothness"):
        assert "C-SimCLR, beta 0.0<" in legends[name]
        assert "C-SimCLR, beta 0.01" in legends[name]


@pytest.mark.slow
def test_corruption_mean_names_its_types_and_head(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run, rate in zip(runs, (3.2, 0.4), strict=True):
        head = {"head": "linear, 40 epochs", "chosen": {"learning_rate_for_256": rate}}
        mean = {**head, "types": 14, "left_out": ["frost"]}
        extra = {**head, "by_severity": [0.5] * 5}
        add_records(
            run,
            record("corruptions", "set-C", "top-1", 0.4, protocol=mean),
            record("extra corruption", "set-C spatter", "top-1", 0.5, protocol=extra),
        )
    text = report(tmp_path, *runs).text
    expected = "set-C is over 14 types \N{MULTIPLICATION SIGN} 5 severities, without frost; spatter"
    assert text.count(expected) == 1
    assert "linear, 40 epochs, learning rate for 256: 3.2 (C-SimCLR (a))" in text
    assert "linear, 40 epochs, learning rate for 256: 0.4 (C-SimCLR (b))" in text
    page = report(tmp_path, runs[0])
    assert "learning rate for 256: 3.2." in page.text


def test_nearly_empty_reliability_bins_are_not_plotted(tmp_path: Path) -> None:
    bins = [[0.1, 0.9, 1], [0.3, 0.25, 2], [0.6, 0.7, 900], [0.95, 0.91, 1097]]
    protocol = {"reliability": bins}
    run = add_records(
        write_run(tmp_path / "run"), record("linear", "set", "ece", 0.1, protocol=protocol)
    )
    drawing = drawings_in(report(tmp_path, run), "reliability")[1]
    assert drawing.count("<circle") == 3


def drawings_in(page: Page, section: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", part(page, section), re.DOTALL)


@pytest.mark.parametrize(
    ("metric", "value", "printed"),
    [
        ("brier", 0.145, "14.5"),
        ("ece", 0.016, "1.6"),
        ("uniformity", -3.05, "\N{MINUS SIGN}3.050"),
        ("RankMe", 357.6435, "357.64"),
        ("RankMe", 1357.6, "1,357.60"),
        ("top-1", 0.902, "90.2\N{NO-BREAK SPACE}%"),
    ],
)
def test_number_format_keeps_zeros_sign_and_unit(metric: str, value: float, printed: str) -> None:
    assert number_cell(Record(**record("linear", "set", metric, value))).text == printed


@pytest.mark.slow
def test_numbers_use_no_break_spaces_and_minus_signs(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.01)
    page = report(tmp_path, a, b)
    interval = "[68.0,\N{NO-BREAK SPACE}72.0]"
    assert f"top-1 70.0\N{NO-BREAK SPACE}% {interval}" in part(page, "training")
    assert f"70.0\N{NO-BREAK SPACE}%</data> <small>{interval}" in part(page, "summary")
    assert ">\N{MINUS SIGN}1.0</data>" in part(page, "corruptions")
    assert not re.search(r">-\d", page.source)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"of": "others"}, {"protocol": {"head": "another"}}])
def test_corruptions_of_other_images_or_heads_have_no_difference(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.01)
    path = b / "evaluation/results.json"
    content = json.loads(path.read_text())
    for each in content["records"]:
        if each["task"] == "corruption":
            each["protocol"] |= change.get("protocol", {})
            each["of"] = change.get("of", each["of"])
    path.write_text(json.dumps(content))
    page = report(tmp_path, a, b)
    assert page.text.count("set-C: accuracy, %") == 2
    assert "set-C: minus" not in page.text


@pytest.mark.slow
def test_differences_state_the_color_scale(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", 0.01)
    c = write_run(tmp_path / "c", 0.02)
    page = report(tmp_path, a, b, c)
    assert page.text.count("full color at 2.0") == 2
    assert '--v:0.500"' in part(page, "corruptions")


def test_metrics_show_direction_and_definition(tmp_path: Path) -> None:
    on = {"on": "h, centered; exp of the entropy"}
    run = add_records(
        write_run(tmp_path / "run"), record("geometry", "set", "effective rank", 9.0, protocol=on)
    )
    text = report(tmp_path, run).text.split("All metrics")[2]
    for expected in (
        "top-1 \N{UPWARDS ARROW}",
        "brier \N{MULTIPLICATION SIGN} 100 \N{DOWNWARDS ARROW}",
        "RankMe 32.40",
    ):
        assert expected in text
    assert "effective rank of h, centered 9.000" in text
    for expected in ("Brier score", "expected calibration error", "projections r"):
        assert text.count(expected) == 1
    assert "negative log-likelihood" not in text  # the results have no nll


def test_invariance_is_in_the_summary_and_in_one_table(tmp_path: Path) -> None:
    values = {"": 0.0452, " hue+": 0.0284, " hue-": 0.0304}
    tasks = {f"invariance{change}": value for change, value in values.items()}
    metric = "relative_distance"
    records = [record(task, "set", metric, value) for task, value in tasks.items()]
    run = write_run(tmp_path / "run")
    assert "Color invariance" not in report(tmp_path, run).text  # no column if no run has it
    page = report(tmp_path, add_records(run, *records))
    assert "Color invariance" in page.text
    assert 0.0452 in page.numbers["summary"]
    text = page.text.split("All metrics")[2]
    for change in ("", "hue+, ", "hue-, "):
        assert f"{change}{metric} \N{DOWNWARDS ARROW}" in text
    assert text.count("invariance") == 1
    assert text.count("in percent of the mean distance between two images") == 1


def test_origins_omit_empty_rows_and_format_commands_as_code(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["about"]["commit"] = ""
    (run / "config.json").write_text(json.dumps(config))
    origins = part(report(tmp_path, run), "origins")
    assert "commit" not in origins
    for command in ("compressive train x", "compressive e"):
        assert f"<code>{command}</code>" in origins
    assert "<code>a CPU" not in origins


def test_report_does_not_import_torch(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "r.html"
    code = (
        "import sys; from pathlib import Path; from compressive.reporting import write_report\n"
        "write_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "print(sorted({'torch', 'timm', 'torchvision'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), str(out)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    assert out.is_file()


def test_adaptive_beta_has_curves(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert "Adaptive beta" not in report(tmp_path, run).text
    names = ("effective_beta", *(f"effective_beta_p{q}" for q in (10, 50, 90)))
    lines = [dict.fromkeys(names, step / 10) | {"step": step} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text(metrics_text(lines))
    text = report(tmp_path, run).text
    for title in ("mean over images", "10 % of images", "median over images", "90 % of images"):
        assert f"Adaptive beta, {title}" in text


def test_information_plane_has_nats_on_both_axes(tmp_path: Path) -> None:
    page = report(tmp_path, write_run(tmp_path / "run"))
    lines = [line for line in journal(30, 0.0) if "predictive" in line]
    for key in ("reducible_residual", "residual"):
        label = f'aria-label="predictive (nats) against {key} (nats)'
        (drawing,) = [svg for svg in drawings(page) if label in svg]
        path = re.findall(r'<path class="line" d="M([^"]*)"', drawing)[0]
        # Segments beyond the axes are clipped; the last points are well inside.
        points = np.array([[float(v) for v in p.split()] for p in re.split("[LM]", path)])
        values = [line[key] for line in lines]
        assert values[-1] < values[-10]
        # Smaller residuals are to the left, unlike later steps; larger values are higher.
        assert points[-1, 0] < points[-10, 0]
        assert points[-1, 1] < points[-10, 1]


def test_reliability_diagram_has_confidence_on_the_x_axis(tmp_path: Path) -> None:
    """The bins of `records` have confidence 0.3, 0.6, 0.95 and accuracy 0.25, 0.7, 0.91."""
    page = report(tmp_path, write_run(tmp_path / "run"))
    (drawing,) = [svg for svg in drawings(page) if "accuracy against confidence" in svg]
    path = re.findall(r'<path class="line" d="M([^"]*)"', drawing)[0]
    x, y = np.array([[float(v) for v in p.split()] for p in path.split("L")]).T
    grid = re.findall(r'<path class="grid" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawing)
    left, low, right, high = map(float, grid[0])
    np.testing.assert_allclose((x - left) / (right - left), [0.3, 0.6, 0.95], atol=1e-3)
    np.testing.assert_allclose((y - low) / (high - low), [0.25, 0.7, 0.91], atol=1e-3)


def test_headline_prefers_linear_evaluation(tmp_path: Path) -> None:
    """`records` has logistic regression at 70 %. The paper's protocol is linear, here at 55 %."""
    run = add_records(write_run(tmp_path / "run"), record("linear", "set", "top-1", 0.55))
    page = report(tmp_path, run)
    assert "linear top-1 55.0" in page.text
    assert page.numbers["paper"][3] == 0.55


def test_histogram_marks_its_mean(tmp_path: Path) -> None:
    """The mean is 0.4, the right edge of the 10th of 25 bars from 0 to 1."""
    page = report(tmp_path, write_run(tmp_path / "run"))
    found = [svg for svg in drawings(page) if "density against local Lipschitz" in svg]
    assert len(found) == 8
    for drawing in found:
        path = re.findall(r'<path class="line" d="M([^"]*)"', drawing)[0].split("L")
        (mark,) = re.findall(r'<line class="mean" x1="([\d.]+)"', drawing)
        assert abs(float(mark) - float(path[19].split()[0])) <= 0.11


def test_progress_is_the_step_of_the_last_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    settings = json.loads((run / "config.json").read_text()) | {"train": {"steps": 100}}
    (run / "config.json").write_text(json.dumps(settings))
    (run / "checkpoints").mkdir()
    for step in (20, 25):
        (run / "checkpoints" / f"step_{step:08d}.safetensors").write_bytes(b"")
    assert "step 25 of 100" in report(tmp_path, run).text

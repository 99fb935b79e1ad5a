"""The predictions in docs/scale.md are those of the simulator, which follows from its inputs."""

import importlib.util
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from result_tables import table_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def simulate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate", ROOT / "benchmarks" / "simulate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulate"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_document_has_the_output_of_the_script(
    simulate: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py"])
    simulate.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) == 18
    text = (ROOT / "docs" / "scale.md").read_text()
    assert [line for line in lines if f"\n{line}\n" not in text] == []


def test_calibration_points_are_reproduced(simulate: ModuleType) -> None:
    machine, job = simulate.Machine(), simulate.Job(batch=256)
    found = simulate.predict(machine, job, 1)
    assert found.step == pytest.approx(72.95)
    bare = replace(machine, overhead=1.0)
    assert simulate.predict(bare, replace(job, batch=512), 1).network == pytest.approx(169.3)
    assert simulate.predict(bare, replace(job, batch=64), 1).network == pytest.approx(
        21.7, abs=0.05
    )


def test_points_outside_the_calibration_are_predicted_within_three_percent(
    simulate: ModuleType,
) -> None:
    for name, guess, real in simulate.held_out_points():
        assert guess == pytest.approx(real, rel=0.03), name


def test_statements_of_the_document(simulate: ModuleType) -> None:
    machine, job = simulate.Machine(), simulate.Job()
    eight, many = (simulate.predict(machine, job, gpus) for gpus in (8, 64))
    assert round(100 * eight.network / eight.step) == 97
    assert round(100 * many.norms / many.step) == 19
    slow = simulate.predict(replace(machine, latency=250e-6), job, 64)
    assert round(100 * slow.norms / slow.step) == 53
    few = replace(machine, cores_per_machine=64)
    decoded = simulate.predict(few, replace(job, loading="cpu"), 8)
    assert (round(decoded.loading), decoded.bottleneck) == (236, "loading")
    large = simulate.predict(machine, replace(job, batch=16_384), 64)
    assert round(100 * large.norms / large.step) == 7
    assert round(100 * large.gathering / large.step) == 3
    # 512 x 7/8 images of 196,608 bytes at 300 GB/s
    assert eight.loading == pytest.approx(0.2936, abs=1e-4)


def test_slow_links_are_the_first_bottleneck(simulate: ModuleType) -> None:
    """260 MB of gradients need longer than the backward pass if links have 1 GB/s."""
    job = simulate.Job()
    slow = replace(simulate.Machine(), internode=1e9)
    found = simulate.predict(slow, job, 64)
    assert found.bottleneck == "gradients"
    expected = 0.05 + 1e3 * 2 * 63 / 64 * 4 * 33e6 / 1e9 - 0.6 * found.network
    assert found.gradients == pytest.approx(expected)
    assert simulate.predict(slow, job, 8) == simulate.predict(simulate.Machine(), job, 8)
    assert simulate.predict(slow, replace(job, batch=16_384), 8).bottleneck == "memory"


def test_scaling_page_has_the_measured_rows() -> None:
    folder = ROOT / "docs" / "results"
    lines = (folder / "2026-11-18-scaling" / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    text = (folder / "2026-11-18-scaling.md").read_text().split("\n## The loss on an H200")[0]
    assert len(rows) > 30
    for row in rows:
        if row.get("task") == "index":
            continue
        first = row.get("task") or f"{row['batch']:,}"
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
        column = (
            (128, 2048, 8192).index(row["dim"]) if "dim" in row else len(str(row["images"])) - 5
        )
        seconds = row["seconds"]
        cell = f"{seconds:.3f}" if seconds < 1 else f"{seconds:.1f}"
        assert line.split("|")[2 + column].strip() == f"{cell} ({row['megabytes']:,.0f})"


def test_scaling_page_has_the_rows_of_the_gpu() -> None:
    page = ROOT / "docs" / "results" / "2026-11-18-scaling.md"
    lines = (page.with_suffix("") / "h200.jsonl").read_text().splitlines()
    environment, *rows = map(json.loads, lines)
    assert environment["environment"]["gpu"] == "NVIDIA H200"
    table = {row["batch"]: row for row in table_rows(page, "## The loss on an H200", "batch")}
    cells = sum(len(row) - 1 for row in table.values())
    assert len(rows) == cells == 12
    for row in rows:
        column = "dimension 128" if row["dim"] == 128 else f"{row['dim']:,}"
        expected = f"{1e3 * row['seconds']:,.1f} ({row['megabytes']:,.0f})"
        assert table[f"{row['batch']:,}"][column] == expected


def test_comparison_with_processes_follows_from_the_measurement(simulate: ModuleType) -> None:
    folder = ROOT / "docs" / "results" / "2026-11-18-scaling"
    found = json.loads((folder / "gloo.json").read_text())
    for page in (ROOT / "docs" / "scale.md", folder.with_suffix(".md")):
        assert "\n".join(simulate.comparison(found)) in page.read_text()
    _, *predicted = simulate.compare(found)
    assert len(predicted) == 4
    for world, batch, guess, real in predicted:
        assert guess == pytest.approx(real, rel=0.1), (world, batch)


@pytest.mark.parametrize("page", ["scale.md", "elastic.md"])
def test_commands_of_claims_select_tests_that_exist(page: str) -> None:
    """Files must exist, and one of the markers of a command be in each file of tests."""
    text = (ROOT / "docs" / page).read_text()
    commands = re.findall(r"`((?:pytest|python) [^`]+)`", text)
    assert len(commands) > 4
    for command in commands:
        words = shlex.split(command)
        (path,) = [ROOT / word for word in words if word.endswith(".py")]
        assert path.is_file(), command
        if "-m" in words:
            markers = words[words.index("-m") + 1].split(" or ")
            content = path.read_text()
            assert any(f"mark.{each}" in content or "not " in each for each in markers), command

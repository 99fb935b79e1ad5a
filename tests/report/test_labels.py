"""Runs are labeled by method and by the settings that differ; pages have no absolute paths."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_pages import report, write_run

from compressive.reporting.labels import label_runs, method_name
from compressive.reporting.shareable import without_paths
from compressive.rundir.reader import read_runs


def write_with(folder: Path, **changes: Any) -> Path:
    """Write a run with other settings, given as SECTION=dict or NAME=value."""
    run = write_run(folder)
    config = json.loads((run / "config.json").read_text())
    for name, value in changes.items():
        config[name] = config.get(name, {}) | value if isinstance(value, dict) else value
    (run / "config.json").write_text(json.dumps(config))
    return run


def labels_of(*runs: Path) -> list[str]:
    return list(label_runs(read_runs(runs)).names)


def test_labels_show_the_settings_that_differ(tmp_path: Path) -> None:
    runs = [
        write_with(tmp_path / "a", bottleneck={"beta": 0.1}, optim={"warmup_epochs": 1}),
        write_with(tmp_path / "b", bottleneck={"beta": 0.2}, optim={"warmup_epochs": 1}),
        write_with(tmp_path / "c", method="simclr", bottleneck={"beta": 9.0}),
    ]
    expected = ["C-SimCLR, beta 0.1", "C-SimCLR, beta 0.2", "SimCLR"]
    assert labels_of(*runs) == expected
    longer = write_with(tmp_path / "d", method="byol", train={"epochs": 12})
    assert labels_of(runs[2], longer) == ["SimCLR, epochs 6", "BYOL, epochs 12"]


def test_settings_with_equal_last_names_are_written_in_full(tmp_path: Path) -> None:
    runs = [
        write_with(tmp_path / f"r{i}", optim={"warmup_epochs": i}, bottleneck={"warmup_epochs": i})
        for i in range(2)
    ]
    for label in labels_of(*runs):
        assert "optim.warmup_epochs" in label
        assert "bottleneck.warmup_epochs" in label


def test_seeds_form_one_experiment(tmp_path: Path) -> None:
    """Settings that do not change what is learned do not matter, as in `compare`."""
    runs = [
        write_with(tmp_path / "a", seed=0, train={"device": "cpu"}),
        write_with(tmp_path / "b", method="simclr", seed=0),
        write_with(tmp_path / "c", seed=1, train={"device": "cuda"}),
    ]
    found = label_runs(read_runs(runs))
    assert found.names == ["C-SimCLR, seed 0", "SimCLR", "C-SimCLR, seed 1"]
    assert [(each.label, list(each.runs)) for each in found.experiments] == [
        ("C-SimCLR", [0, 2]),
        ("SimCLR", [1]),
    ]
    assert found.of == [0, 1, 0]


def test_folder_name_is_used_only_if_nothing_else_differs(tmp_path: Path) -> None:
    same = [write_with(tmp_path / name, seed=0) for name in ("one", "two")]
    assert labels_of(*same) == ["C-SimCLR, seed 0 (one)", "C-SimCLR, seed 0 (two)"]
    bare = write_run(tmp_path / "three")
    (bare / "config.json").unlink()
    assert labels_of(bare) == ["three"]


@pytest.mark.parametrize(
    ("method", "expected"),
    [("simclr", "SimCLR"), ("c-moco-v3", "C-MoCo v3"), ("c-own", "c-own")],
)
def test_methods_are_written_as_in_papers(method: str, expected: str) -> None:
    assert method_name(method) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/me/data/set", "\N{HORIZONTAL ELLIPSIS}/set"),
        ("/data", "\N{HORIZONTAL ELLIPSIS}/data"),
        ("C:\\Users\\me\\set", "\N{HORIZONTAL ELLIPSIS}/set"),
        ("run --data=/a/b --out ../c/d", "run --data=\N{HORIZONTAL ELLIPSIS}/b --out ../c/d"),
        ("kappa |z| / ||dx||, 1/2 of (a)/b", "kappa |z| / ||dx||, 1/2 of (a)/b"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
    ],
)
def test_absolute_paths_are_shortened(text: str, expected: str) -> None:
    assert without_paths(text) == expected
    assert without_paths({"a": [text]}) == {"a": [expected]}


def test_page_has_no_absolute_paths(tmp_path: Path) -> None:
    place = "/home/someone/photos"
    run = write_with(tmp_path / "run", data={"source": place})
    results = run / "evaluation/results.json"
    text = results.read_text().replace("compressive e", f"compressive e {place}")
    results.write_text(text.replace('"set', f'"{place}'))
    (run / "encoder.safetensors").unlink()
    source = report(tmp_path, run).source
    assert "photos" in source
    assert "someone" not in source
    assert str(tmp_path) not in source

"""The live view shows the numbers in the files, even if damaged, and does not import torch."""

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_files import config_text, metrics_text
from tiny import silent, sorted_photos, tiny

from compressive.cli.watch import frame, sparkline, watch
from compressive.config import Config
from compressive.train.loop import pretrain


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on 40 images in batches of 8 for 3 epochs."""
    out = tmp_path_factory.mktemp("runs") / "a"
    config = tiny("train.steps=0", "train.epochs=3", "data.cache_on_device=yes")
    pretrain(config, out, display=silent())
    return out


def text_of(run: Path) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(frame(run))
    return console.export_text()


def write_run(folder: Path, lines: list[dict[str, Any]], end: str = "") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config_text(asdict(Config())))
    (folder / "metrics.jsonl").write_text(metrics_text(lines) + end)
    return folder


@pytest.mark.slow
def test_finished_run_is_shown_with_its_metrics(run: Path) -> None:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    read = {name: value for line in lines for name, value in line.items()}
    text = text_of(run)
    assert "c-simclr" in text
    assert sorted_photos().name in text
    assert "step 16 of 16" in text  # 40 * 3 // 8 + 1
    assert "finished" in text
    assert "100%" in text
    for shown in (
        f"{read['loss']:.3f}",
        f"{read['residual']:.1f} nats",
        f"{read['predictive']:.2f} nats",
        f"{read['knn_accuracy']:.1%}",
        f"{read['probe_accuracy']:.1%}",
        f"positive_cosine {read['positive_cosine']:.4g}",
        f"lr {read['lr']:.4g}",
        read["health"][:30],
    ):
        assert shown in text


def test_partial_or_damaged_line_is_skipped(tmp_path: Path) -> None:
    lines = [{"step": 5, "loss": 2.0}, {"step": 10, "loss": 1.25, "images_per_second": 1234.5}]
    run = write_run(
        tmp_path / "a", lines, end='[1]\n{"loss": 7}\n\x00\x00\n{"step": 15, "loss": 0.'
    )
    text = text_of(run)
    assert "step 10" in text
    assert "1.250" in text
    assert "1,234 images/s" in text


def test_new_run_without_metrics_is_shown(tmp_path: Path) -> None:
    """There is no checkpoint that records the number of images, and no metrics line."""
    run = write_run(tmp_path / "a", [])
    assert "step 0 " in text_of(run)
    assert "no metrics yet" in text_of(run)
    assert " of " not in text_of(run)
    (run / "metrics.jsonl").unlink()
    assert "no metrics yet" in text_of(run)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step_00000000.safetensors").write_bytes(b"cut")
    assert "step 0 " in text_of(run)


def test_adaptive_beta_is_shown_with_its_quantiles(tmp_path: Path) -> None:
    betas = {"effective_beta": 0.4, "effective_beta_p10": 0.1, "effective_beta_p90": 0.9}
    text = text_of(write_run(tmp_path / "a", [{"step": 1, "loss": 1.0, "beta": 1.0, **betas}]))
    for name, value in betas.items():
        assert f"{name} {value}" in text
    assert "effective_beta_p50" not in text


def test_nonfinite_loss_is_left_out_of_the_curve(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None, "health": "nan: loss"}]
    text = text_of(write_run(tmp_path / "a", lines))
    assert "1.000" in text
    assert "nan: loss" in text


def test_total_steps_and_remaining_time_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [{"step": 100, "loss": 1.0, "images_per_second": 64.0}])
    config = json.loads((run / "config.json").read_text())
    config["train"] |= {"steps": 200, "batch_size": 64 * 60}
    (run / "config.json").write_text(json.dumps(config))
    assert "step 100 of 200" in text_of(run)
    assert "1 h 40 min left" in text_of(run)  # 100 steps of a minute each
    assert "50%" in text_of(run)
    assert "finished" not in text_of(run)


@pytest.mark.parametrize(
    ("ago", "words"), [(12, "12 s"), (200, "3 min"), (7500, "2 h 5 min"), (270_000, "3 d 3 h")]
)
def test_time_since_the_last_line_is_shown(tmp_path: Path, ago: int, words: str) -> None:
    run = write_run(tmp_path / "a", [{"step": 1, "loss": 1.0}])
    then = time.time() - ago - 0.5  # half a second of slack for a slow machine
    os.utime(run / "metrics.jsonl", (then, then))
    assert f"{words} ago" in text_of(run)


def test_sparkline_spans_minimum_to_maximum() -> None:
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0.0, 1.0] * 40, width=40) == "▁" * 40  # each cell is a mean of two
    assert len(sparkline(range(1000), width=40)) == 40
    assert sparkline([5.0]) == "▁"


def test_folder_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} .*config\.json"):
        frame(tmp_path)
    with pytest.raises(FileNotFoundError, match="/nothing "):
        frame(tmp_path / "nothing")
    for content in ("{", "[]", config_text({}), config_text({"train": {}})):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="is damaged") as error:
            frame(tmp_path)
        assert "\n" not in str(error.value)


def test_watch_draws_until_the_run_ends(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [{"step": 1, "loss": 3.0}])
    config = json.loads((run / "config.json").read_text())
    config["train"]["steps"] = 3
    (run / "config.json").write_text(json.dumps(config))

    def step(_: float) -> None:
        """Append one line, as a run would."""
        lines = (run / "metrics.jsonl").read_text()
        number = len(lines.splitlines())  # one line is the header
        more = json.dumps({"step": number, "loss": 3.0 / number})
        (run / "metrics.jsonl").write_text(f"{lines}{more}\n")

    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    watch(run, console=console, sleep=step)
    drawn = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(f"step {n} of 3" in drawn for n in (1, 2, 3))
    assert "1.500" in drawn


def test_watch_draws_once_with_once_or_without_a_terminal(run: Path) -> None:
    for once, terminal in ((True, True), (False, False)):
        console = Console(width=100, file=io.StringIO(), force_terminal=terminal)
        watch(run, once, console)
        drawn = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert drawn.count("16 of 16") == 1


def test_watch_does_not_import_torch(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from compressive.cli.watch import watch\n"
        f"watch(Path({str(run)!r}), once=True)\n"
        "sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 16 of 16" in done.stdout


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"data": []}, {}),
        ({}, {"health": 3}),
        ({}, {"loss": 10**400, "images_per_second": 1e308}),
        ({}, {"step": 10**400}),
        ({}, {"loss": float("nan"), "images_per_second": float("inf")}),
        ({"train": {"batch_size": 8, "steps": "many"}}, {}),
    ],
)
def test_invalid_values_are_tolerated(
    tmp_path: Path, change: dict[str, Any], line: dict[str, Any]
) -> None:
    run = write_run(tmp_path / "run", [{"step": 3, "loss": 0.5}, {"step": 4, **line}])
    config = json.loads((run / "config.json").read_text()) | change
    (run / "config.json").write_text(json.dumps(config))
    assert "0.500" in text_of(run)


@pytest.mark.parametrize("batch", [0, "8", [8], None])
def test_invalid_batch_size_is_one_line(tmp_path: Path, batch: object) -> None:
    run = write_run(tmp_path / "run", [])
    settings = {"method": "byol", "train": {"batch_size": batch}}
    (run / "config.json").write_text(config_text(settings))
    with pytest.raises(ValueError, match=r"config\.json .*batch"):
        frame(run)


def test_watch_ends_for_a_stopped_run_but_not_a_resumed_one(tmp_path: Path) -> None:
    lines = [{"step": 3, "images_per_second": 9.0}, {"step": 3, "stopped": "requested"}]
    run = write_run(tmp_path / "run", lines)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    watch(run, console=console)  # returns immediately
    text = console.file.getvalue()  # pyright: ignore
    assert "stopped; " in text
    assert " left" not in text
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n')
    assert "stopped; " not in text_of(run)


def test_watch_ends_for_a_failed_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 3, "health": "collapse: rank 1"}])
    now = time.time()
    os.utime(run / "metrics.jsonl", (now - 600, now - 600))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    watch(run, console=console)  # returns immediately
    assert "collapse: rank 1" in console.file.getvalue()  # pyright: ignore

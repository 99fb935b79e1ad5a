"""The live view: the numbers of the files, whatever state they are in, and no torch."""

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
from tiny import journal, silent, sorted_photos, tiny

from compressive.cli.watch import frame, sparkline, watch
from compressive.config import Config
from compressive.train.loop import pretrain


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images in batches of 8 for 3 epochs."""
    out = tmp_path_factory.mktemp("runs") / "a"
    config = tiny("train.steps=0", "train.epochs=3", "data.cache_on_device=yes")
    pretrain(config, out, display=silent())
    return out


def text_of(run: Path) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(frame(run))
    return console.export_text()


def made(folder: Path, lines: list[dict[str, Any]], end: str = "") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config_text(asdict(Config())))
    (folder / "metrics.jsonl").write_text(metrics_text(lines) + end)
    return folder


@pytest.mark.slow
def test_it_shows_the_numbers_of_a_finished_run(run: Path) -> None:
    lines = journal(run)
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


def test_a_half_written_or_damaged_line_is_skipped(tmp_path: Path) -> None:
    lines = [{"step": 5, "loss": 2.0}, {"step": 10, "loss": 1.25, "images_per_second": 1234.5}]
    run = made(tmp_path / "a", lines, end='[1]\n{"loss": 7}\n\x00\x00\n{"step": 15, "loss": 0.')
    text = text_of(run)
    assert "step 10" in text
    assert "1.250" in text
    assert "1,234 images/s" in text


def test_what_is_not_there_yet_is_not_shown(tmp_path: Path) -> None:
    """No checkpoint has said how many images there are, and no line has been written."""
    run = made(tmp_path / "a", [])
    assert "step 0 " in text_of(run)
    assert "no metrics yet" in text_of(run)
    assert " of " not in text_of(run)
    (run / "metrics.jsonl").unlink()
    assert "no metrics yet" in text_of(run)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step_00000000.safetensors").write_bytes(b"cut")
    assert "step 0 " in text_of(run)


def test_an_adaptive_beta_is_shown_with_its_quantiles(tmp_path: Path) -> None:
    betas = {"effective_beta": 0.4, "effective_beta_p10": 0.1, "effective_beta_p90": 0.9}
    text = text_of(made(tmp_path / "a", [{"step": 1, "loss": 1.0, "beta": 1.0, **betas}]))
    for name, value in betas.items():
        assert f"{name} {value}" in text
    assert "effective_beta_p50" not in text


def test_what_was_not_finite_leaves_no_hole_in_a_curve(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None, "health": "nan: loss"}]
    text = text_of(made(tmp_path / "a", lines))
    assert "1.000" in text
    assert "nan: loss" in text


def test_steps_give_the_total_and_speed_the_time_left(tmp_path: Path) -> None:
    run = made(tmp_path / "a", [{"step": 100, "loss": 1.0, "images_per_second": 64.0}])
    config = json.loads((run / "config.json").read_text())
    config["train"] |= {"steps": 200, "batch_size": 64 * 60}
    (run / "config.json").write_text(json.dumps(config))
    assert "step 100 of 200" in text_of(run)
    assert "1 h 40 min left" in text_of(run)  # 100 steps of a minute
    assert "50%" in text_of(run)
    assert "finished" not in text_of(run)


@pytest.mark.parametrize(
    ("ago", "words"), [(12, "12 s"), (200, "3 min"), (7500, "2 h 5 min"), (270_000, "3 d 3 h")]
)
def test_it_shows_the_time_since_the_last_line(tmp_path: Path, ago: int, words: str) -> None:
    run = made(tmp_path / "a", [{"step": 1, "loss": 1.0}])
    then = time.time() - ago - 0.5  # half a second for a slow machine
    os.utime(run / "metrics.jsonl", (then, then))
    assert f"{words} ago" in text_of(run)


def test_a_sparkline_spans_least_to_greatest() -> None:
    assert sparkline(range(8)) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([0.0, 1.0] * 40, width=40) == "▁" * 40  # each a mean of two
    assert len(sparkline(range(1000), width=40)) == 40
    assert sparkline([5.0]) == "▁"


def test_a_folder_that_is_no_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no folder of a run: .* no config\.json"):
        frame(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing is not there"):
        frame(tmp_path / "nothing")
    for content in ("{", "[]", config_text({}), config_text({"train": {}})):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="is damaged") as error:
            frame(tmp_path)
        assert "\n" not in str(error.value)


def test_it_draws_until_the_run_is_over(tmp_path: Path) -> None:
    run = made(tmp_path / "a", [{"step": 1, "loss": 3.0}])
    config = json.loads((run / "config.json").read_text())
    config["train"]["steps"] = 3
    (run / "config.json").write_text(json.dumps(config))

    def step(_: float) -> None:
        """The run goes on while nobody looks."""
        lines = (run / "metrics.jsonl").read_text()
        number = len(lines.splitlines())  # one line is the header
        more = json.dumps({"step": number, "loss": 3.0 / number})
        (run / "metrics.jsonl").write_text(f"{lines}{more}\n")

    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    watch(run, console=console, sleep=step)
    drawn = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(f"step {n} of 3" in drawn for n in (1, 2, 3))
    assert "1.500" in drawn


def test_it_draws_once_if_asked_or_without_a_terminal(run: Path) -> None:
    for once, terminal in ((True, True), (False, False)):
        console = Console(width=100, file=io.StringIO(), force_terminal=terminal)
        watch(run, once, console)
        drawn = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert drawn.count("16 of 16") == 1


def test_a_frame_needs_no_torch(run: Path) -> None:
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
def test_odd_files_are_drawn_as_far_as_they_go(
    tmp_path: Path, change: dict[str, Any], line: dict[str, Any]
) -> None:
    run = made(tmp_path / "run", [{"step": 3, "loss": 0.5}, {"step": 4, **line}])
    config = json.loads((run / "config.json").read_text()) | change
    (run / "config.json").write_text(json.dumps(config))
    assert "0.500" in text_of(run)


@pytest.mark.parametrize("batch", [0, "8", [8], None])
def test_a_batch_that_is_no_number_is_one_line(tmp_path: Path, batch: object) -> None:
    run = made(tmp_path / "run", [])
    settings = {"method": "byol", "train": {"batch_size": batch}}
    (run / "config.json").write_text(config_text(settings))
    with pytest.raises(ValueError, match=r"config\.json is damaged: .*batch"):
        frame(run)


def test_it_ends_for_a_run_that_was_stopped_and_not_for_one_that_goes_on(tmp_path: Path) -> None:
    lines = [{"step": 3, "images_per_second": 9.0}, {"step": 3, "stopped": "requested"}]
    run = made(tmp_path / "run", lines)
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    watch(run, console=console)  # comes back at once
    text = console.file.getvalue()  # pyright: ignore
    assert "stopped; " in text
    assert " left" not in text
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.0}\n')
    assert "stopped" not in text_of(run)


def test_it_ends_for_a_run_that_gave_up(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [{"step": 3, "health": "collapse: rank 1"}])
    now = time.time()
    os.utime(run / "metrics.jsonl", (now - 600, now - 600))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    watch(run, console=console)  # comes back at once
    assert "collapse: rank 1" in console.file.getvalue()  # pyright: ignore

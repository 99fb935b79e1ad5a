"""metrics.jsonl has each step once, and TensorBoard shows the views and direction statistics."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import silent, tiny

from compressive.augment.ops import colors, normalize
from compressive.rundir.metrics_log import MetricsLogger, read_metrics
from compressive.train.loop import pretrain

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised inside tensorboard
VIEWS = "views of the same images, in pairs"


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    header, *found = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert header == {"format_version": 2}
    assert read_metrics(folder / "metrics.jsonl") == (found, 0)
    return found


def test_lines_are_valid_json_and_flushed(tmp_path: Path) -> None:
    journal = MetricsLogger(tmp_path / "run")
    values = {"loss": 0.1, "rate": math.nan, "knn": None, "top": math.inf, "text": 'ok: "ü"'}
    journal.write(7, values)
    expected = {"step": 7, "loss": 0.1, "rate": None, "knn": None, "top": None, "text": 'ok: "ü"'}
    assert lines(tmp_path / "run") == [expected]
    journal.close()


def test_resumed_log_has_every_step_once(tmp_path: Path) -> None:
    journal = MetricsLogger(tmp_path)
    for step in range(0, 100, 10):
        journal.write(step, {"loss": step / 7})
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "lo')  # killed here
    journal = MetricsLogger(tmp_path, step=55)
    for step in range(60, 120, 10):
        journal.write(step, {"loss": step / 7})
    journal.close()
    assert lines(tmp_path) == [{"step": s, "loss": s / 7} for s in range(0, 120, 10)]
    MetricsLogger(tmp_path, step=110).close()
    assert len(lines(tmp_path)) == 12
    MetricsLogger(tmp_path).close()
    assert lines(tmp_path) == [{"step": 0, "loss": 0.0}]


def test_tensorboard_shows_the_resumed_history(tmp_path: Path) -> None:
    journal = MetricsLogger(tmp_path, tensorboard=True)
    for step in (10, 20, 30):
        journal.write(step, {"loss": float(step), "text": "ok", "bad": math.nan})
    journal.close()
    journal = MetricsLogger(tmp_path, step=20, tensorboard=True)
    journal.write(30, {"loss": 3.5})
    journal.close()
    shown = events(tmp_path)
    assert shown.Tags()["scalars"] == ["loss"]
    found = [(event.step, event.value) for event in shown.Scalars("loss")]
    assert found == [(10, 10.0), (20, 20.0), (30, 3.5)]


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"images": 0, "histograms": 0, "scalars": 0}
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance=everything)
    found.Reload()
    return found


def test_tensorboard_shows_views_and_direction_histograms(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 3, 3, 8, 8, generator=random)
    r = torch.randn(40, 16, generator=random)
    journal = MetricsLogger(tmp_path, tensorboard=True)
    journal.draw(5, x, y, r)
    journal.close()
    shown = events(tmp_path)
    (image,) = shown.Images(VIEWS)
    assert image.step == 5
    picture = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))
    tiles = np.split(picture, 6, axis=1)
    for place, view in enumerate((x[0], y[0], x[1], y[1], x[2], y[2])):  # views in pairs
        expected = view.permute(1, 2, 0).numpy() * 255
        # TensorBoard truncates to bytes.
        np.testing.assert_allclose(tiles[place], expected, rtol=0, atol=1)
    units = (r / r.norm(dim=1, keepdim=True)).double().numpy()
    cosines = [units[i] @ units[j] for i in range(40) for j in range(i)]
    deviations = np.std(units, axis=0, ddof=1) * 4
    for name, values in (
        ("cosine of different images", cosines),
        ("deviation of each axis over uniform", deviations),
    ):
        (event,) = shown.Histograms(f"directions/{name}")
        found = event.histogram_value
        assert found.num == len(values)
        assert (found.min, found.max) == pytest.approx((min(values), max(values)), abs=1e-6)
        assert found.sum == pytest.approx(sum(values), abs=1e-4)


def test_large_views_are_downscaled_and_tensorboard_is_optional(tmp_path: Path) -> None:
    x = torch.rand(1, 3, 200, 200)
    for tensorboard in (False, True):
        journal = MetricsLogger(tmp_path, tensorboard=tensorboard)
        journal.draw(1, x, x, torch.randn(2, 4))
        journal.close()
        assert (tmp_path / "tensorboard").exists() == tensorboard
    (image,) = events(tmp_path).Images(VIEWS)
    assert Image.open(io.BytesIO(image.encoded_image_string)).size == (192, 96)


def test_colors_inverts_normalize() -> None:
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(colors(normalize(images)), images, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_run_draws_images_from_first_log_point_to_end(tmp_path: Path) -> None:
    config = tiny("train.tensorboard=true", "train.log_every=2", "train.steps=6")
    pretrain(config, tmp_path, display=silent())
    shown = events(tmp_path)
    steps = [image.step for image in shown.Images(VIEWS)]
    assert steps[0] == 2
    assert steps[-1] == 6
    assert [event.step for event in shown.Histograms(shown.Tags()["histograms"][0])] == steps

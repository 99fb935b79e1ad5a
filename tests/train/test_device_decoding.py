"""A run that decodes on the device: same weights, same reports, bitwise resume."""

import signal
from pathlib import Path

import pytest
from device_decoders import StandIn
from image_kinds import encoded, picture
from tiny import Written, differences, journal, last, noise, silent, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import Config
from compressive.data import loaders
from compressive.rundir.folder import open_folder, read_config
from compressive.train import loop
from compressive.train.loop import pretrain
from compressive.train.run import Run


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 24 files in two classes: JPEG, and some PNG, progressive or damaged."""
    place = tmp_path_factory.mktemp("photos")
    for i in range(24):
        part = place / "ab"[i % 2]
        part.mkdir(exist_ok=True)
        image = noise(20 + i % 5, 24, seed=i)
        if i % 8 == 3:
            image.save(part / f"{i:02}.png")
        else:
            data = encoded("JPEG", image, progressive=i % 8 == 4, subsampling=i % 3)
            (part / f"{i:02}.jpg").write_bytes(data[:-40] if i in (6, 9, 22) else data)
    return place


def settings(photos: Path, *changes: str) -> Config:
    return tiny(f"data.source={photos}", "data.cache_on_device=no", "train.steps=6", *changes)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Use a stand-in for nvJPEG if the setting is yes."""
    stand_in = StandIn()

    def choose(source: object, device: object, setting: str, *, is_cached: bool) -> object:
        return stand_in.decoder if setting == "yes" else None

    monkeypatch.setattr(loaders, "choose_decoder", choose)
    return stand_in


def test_run_equals_one_that_decodes_on_the_cpu_and_resumes_bitwise(
    photos: Path, tmp_path: Path, decoder: StandIn
) -> None:
    """The stand-in has the pixels of the CPU. 6 steps of 8 images are two epochs."""
    cpu = settings(photos, "data.decode_on_device=no")
    pretrain(cpu, tmp_path / "cpu", display=silent())
    assert decoder.calls == []
    config, whole, out = settings(photos, "data.decode_on_device=yes"), Written(), tmp_path / "run"
    pretrain(config, tmp_path / "whole", display=whole)
    assert sum(decoder.calls) > 6 * 4
    assert sum("decode_on_device" in line for line in whole.said) == 1
    run = Run(config, out, silent(), resume=True)
    run.restore()
    for _ in range(3):  # a stop request takes effect after a step
        loop.train(run, [signal.SIGTERM])
    assert loop.finish(run).step == 3
    run.close()
    said = Written()
    pretrain(config, out, display=said)
    assert any("resuming from step 3 of 6" in line for line in said.said)
    states = {name: last(tmp_path / name) for name in ("cpu", "whole", "run")}
    assert differences(states["run"], states["whole"]) == []
    assert differences(states["whole"], states["cpu"]) == []
    losses = [
        [line["loss"] for line in journal(tmp_path / name) if "loss" in line]
        for name in ("cpu", "whole")
    ]
    assert losses[0] == losses[1]
    reports = [(tmp_path / name / "unreadable.txt").read_text() for name in ("cpu", "whole")]
    assert reports[0] == reports[1]
    assert reports[0].count("\n") == 3


def test_setting_is_recorded_and_cannot_change_when_resuming(
    photos: Path, tmp_path: Path, decoder: StandIn
) -> None:
    """Another decoder has other pixels, so that the run would not be the same."""
    config = settings(photos, "data.decode_on_device=yes", "train.steps=1")
    pretrain(config, tmp_path, display=silent())
    assert read_config(tmp_path).data.decode_on_device == "yes"
    other = settings(photos, "data.decode_on_device=no", "train.steps=1")
    with pytest.raises(ValueError, match=r"data\.decode_on_device = yes, not no"):
        open_folder(tmp_path, other, resume=True)


def test_missing_gpu_is_one_line(photos: Path, tmp_path: Path) -> None:
    words = ["pretrain", str(photos), "--out", str(tmp_path), "--device", "cpu", "--steps", "1"]
    words += ["--set", "data.decode_on_device=yes", "--backbone", "test_resnet"]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 2
    assert "data.decode_on_device=yes needs an NVIDIA GPU" in run.output
    assert "Traceback" not in run.output


def test_wrong_value_is_rejected_before_images_are_read(tmp_path: Path) -> None:
    picture(9, 9).save(tmp_path / "a.png")
    words = ["pretrain", str(tmp_path), "--set", "data.decode_on_device=gpu"]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 2
    assert "data.decode_on_device" in run.output

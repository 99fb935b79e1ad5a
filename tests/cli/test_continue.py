"""A finished run is continued in a new folder; conflicts name only settings that were given."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from command_line import error_line, run
from tiny import last, photos

from compressive.rundir.folder import read_config
from compressive.train.health import HealthStatus

SMALL = "--backbone test_resnet --image-size 16 --batch-size 4 --device cpu"
SMALL += " --set network.hidden_dim=16 --set network.projection_dim=8 --set train.tensorboard=false"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 8 images and a run of 2 epochs on them."""
    folder = tmp_path_factory.mktemp("continue")
    images, out = photos(folder / "photos", 8), folder / "a"
    done = run(f"pretrain {images} {SMALL} --method c-byol --epochs 2 --out {out}")
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def finished(shared: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return the folder of images, and a copy of the run."""
    return shared / "photos", Path(shutil.copytree(shared / "a", tmp_path / "a"))


def test_printed_command_continues_a_run(finished: tuple[Path, Path]) -> None:
    images, out = finished
    message = error_line(f"pretrain {images} {SMALL} --method c-byol --epochs 4 --out {out}")
    assert re.search(r"train\.epochs.* 2.* 4", message)
    assert "warmup" not in message  # derived from the epochs
    found = re.search(r"compressive (pretrain .*)$", message)
    assert found is not None
    assert f"--continue-from {out} --out {out}-4" in found[1]
    result = run(found[1])
    assert result.exit_code == 0, result.output
    longer = out.with_name("a-4")
    before, now = last(out), last(longer)
    assert (before["step"], now["step"]) == (5, 9)
    assert read_config(longer).method == "c-byol"
    lines = (longer / "metrics.jsonl").read_text().splitlines()
    assert '"step": 5' not in "".join(lines)  # it starts after the steps of the other run
    again = run(found[1])
    assert again.exit_code == 0, again.output
    assert "already finished" in again.stdout


def test_continued_run_starts_with_weights_target_and_moments(
    finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped at once has saved the state of the other one."""
    images, out = finished
    monkeypatch.setattr("compressive.train.loop.train", lambda *_: HealthStatus("ok", ""))
    more = f"pretrain {images} --epochs 4 --continue-from {out} --out {out}-b"
    assert run(more).exit_code == 130
    before, now = last(out), last(out.with_name("a-b"))
    assert now["step"] == before["step"] == 5
    names = before["learner"].keys()
    assert any("target" in name for name in names)
    assert all(torch.equal(before["learner"][name], now["learner"][name]) for name in names)
    moments = before["optimizer"]["state"]
    assert moments
    for key, state in moments.items():
        for name, value in state.items():
            again = now["optimizer"]["state"][key][name]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(again))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--epochs 2", "--epochs"),
        ("--epochs 4 --method byol", "method c-byol byol"),
        ("--epochs 4 --batch-size 2", "train.batch_size 4 2"),
        ("--epochs 4 --backbone resnet18", "network.name test_resnet resnet18"),
        ("--epochs 4 --recipe simclr/quickstart", "recipe continue_from"),
    ],
)
def test_run_with_other_weights_or_no_steps_left_is_not_continued(
    options: str, words: str, finished: tuple[Path, Path]
) -> None:
    images, out = finished
    message = error_line(f"pretrain {images} {options} --continue-from {out} --out {out}-b")
    assert all(word in message for word in words.split()), message
    assert not out.with_name("a-b").exists()


def test_conflict_lists_all_given_settings_and_suggests_another_folder(
    finished: tuple[Path, Path],
) -> None:
    images, out = finished
    message = error_line(f"pretrain {images} --image-size 32 --seed 1 --lr 0.7 --out {out}")
    given = "seed", "views.size", "optim.lr", "network.name", "method"
    assert all(f"{name} = " in message for name in given)
    assert "views.blur" not in message
    assert "--out" in message
    assert "delete" not in message

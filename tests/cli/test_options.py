"""Options of commands: shorthands of settings, suggestions, help, completion and labels."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import error_line, run
from PIL import Image
from tiny import photos
from typer.testing import CliRunner

from compressive.cli import completion
from compressive.cli.app import app
from compressive.cli.terminal import print_warning
from compressive.config import METHODS, Config, flat, override
from compressive.data.decode import Unreadable, decode
from compressive.data.sources import open_source
from compressive.evaluation.tasks import SUITES, TASKS
from compressive.recipes.options import OPTIONS, as_changes, option_of
from compressive.rundir.folder import read_config

RUN = CliRunner()
PROGRAM: Any = typer.main.get_command(app)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_options_set_and_record_settings(tmp_path: Path) -> None:
    images, out = photos(tmp_path / "photos", 8), tmp_path / "run"
    given = {"--method": "simclr", "--backbone": "test_resnet", "--image-size": 16, "--lr": 0.01}
    given |= {"--batch-size": 4, "--epochs": 7, "--steps": 1, "--seed": 3, "--labels": "none"}
    given |= {"--device": "cpu", "--precision": "float32", "--workers": 1}
    words = " ".join(f"{name} {value}" for name, value in given.items())
    result = run(f"pretrain {images} {words} --set train.tensorboard=false --out {out}")
    assert result.exit_code == 0, result.output
    found = flat(read_config(out))
    for name, value in given.items():
        assert found[OPTIONS[name[2:].replace("-", "_")]] == value
    assert found["optim.warmup_epochs"] == 0.7  # derived from --epochs
    about = json.loads((out / "config.json").read_text())["about"]
    assert about["given"] == sorted(
        {*OPTIONS.values(), "train.tensorboard"} - {"network.weights", "train.track"}
    )
    assert result.stdout.splitlines()[-1] == f"next: compressive evaluate {out}"


def test_every_option_of_a_setting_exists() -> None:
    of = {param.name: param for param in PROGRAM.commands["pretrain"].params}
    assert {*OPTIONS.values()} <= flat(Config()).keys()
    for option, setting in OPTIONS.items():
        assert option_of(setting) in of[option].opts


def test_option_and_contradicting_change_are_rejected() -> None:
    message = error_line("pretrain builtin --recipe simclr/quickstart --lr 0.1 --set optim.lr=0.2")
    assert re.search(r"--lr 0\.1 .*optim\.lr=0\.2", message)
    assert as_changes({"lr": 0.1, "seed": None}, ["optim.lr=1e-1"]) == [
        "optim.lr=0.1",
        "optim.lr=1e-1",
    ]


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("pretrain x --model resnet50", "--backbone"),
        ("pretrain x --arch resnet50", "--backbone"),
        ("pretrain x --bs 3", "--batch-size"),
        ("pretrain x --learning-rate 3", "--lr"),
        ("pretrain x --learning-rate=3", "--lr"),
        ("pretrain x --img-size 3", "--image-size"),
        ("pretrain x --gpu 0", "--device"),
        ("pretrain x --num-workers 3", "--workers"),
        ("pretrain x --output a", "--out"),
        ("pretrain x --epoch 3", "--epochs"),
        ("evaluate x --arch a", "--network"),
        ("evaluate x --limit 3", "--max-images"),
        ("sweep x --seed 3", "--seeds"),
    ],
)
def test_unknown_option_names_the_right_one(line: str, option: str) -> None:
    message = error_line(line)
    assert line.split()[2].partition("=")[0] in message
    assert f" {option}?" in message


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--epochs", "--set train.epochs="),
        ("--bs", "--set train.batch_size="),
        ("--foo", "--help"),
    ],
)
def test_sweep_names_the_setting_of_an_option_of_pretrain(option: str, hint: str) -> None:
    message = error_line(f"sweep x {option} 3")
    assert option in message
    assert hint in message


def test_unknown_option_without_a_similar_one_names_the_help() -> None:
    assert "pretrain --help" in error_line("pretrain x --zzz 3")


@pytest.mark.parametrize(
    ("line", "wrong", "hint"),
    [
        ("--verson", "--verson", "did you mean --version?"),
        ("--foo recipes", "--foo", "--help` lists all"),
        ("-- --foo", "--foo", "--help` lists all"),
    ],
)
def test_unknown_global_option_is_one_line(line: str, wrong: str, hint: str) -> None:
    message = error_line(line)
    assert message.startswith(f"no option {wrong}; ")
    assert message.endswith(hint)


def test_unknown_command_names_the_nearest() -> None:
    assert "'pretain'" in error_line("pretain x")
    assert "pretrain?" in error_line("pretain x")
    assert "recipes" in error_line("zzz")
    assert "recipes?" in error_line("-- recipe")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("learning_rate", "optim.lr"),
        ("train.batch", "train.batch_size"),
        ("bs", "train.batch_size"),
        ("network.arch", "network.name"),
        ("method.name", "method"),
        ("views.img_size", "views.size"),
        ("train.num_workers", "data.workers"),
        ("otpim.lr", "optim.lr"),
        ("bottleneck.bta", "bottleneck.beta"),
    ],
)
def test_unknown_setting_names_the_right_one(name: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.* {right}\\?"):
        override(Config(), f"{name}=1")
    assert f" {right}?" in error_line(f"settings {name}")


# --- help and completion ------------------------------------------------------------------------


@pytest.mark.parametrize("command", PROGRAM.commands)
def test_help_has_examples_of_valid_commands(command: str) -> None:
    result = RUN.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    lines = [line.strip() for line in result.stdout.splitlines()]
    shown = lines[lines.index("Examples:") + 1 :]
    found = [line for line in shown if line]
    assert len(found) >= 2
    for line in found:
        program, name, *words = shlex.split(line)
        assert (program, name) == ("compressive", command)
        PROGRAM.commands[name].make_context(name, words)


def test_help_lists_methods_tasks_and_suites() -> None:
    pretrain, evaluate = (
        RUN.invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
        for name in ("pretrain", "evaluate")
    )
    assert all(name in pretrain for name in METHODS)
    assert all(name in evaluate for name in (*TASKS, *SUITES, "calibration"))
    assert "Training" in pretrain  # a panel


def test_completion_of_values() -> None:
    assert completion.complete_recipe("c-simclr/q") == ["c-simclr/quickstart"]
    assert completion.complete_tasks("knn,lin") == ["knn,linear"]
    assert "knn,knn" not in completion.complete_tasks("knn,")
    assert completion.complete_setting("optim.lr") == ["optim.lr="]
    assert completion.complete_setting("views.policy=b") == ["views.policy=byol"]
    assert completion.complete_setting("views.blur=") == ["views.blur=true", "views.blur=false"]
    assert completion.complete_setting("optim.lr=") == []
    assert completion.complete_method("c-b") == ["c-byol"]
    assert completion.complete_data("b") == ["builtin"]
    assert completion.complete_data("./b") == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("compressive pre", "pretrain"),
        ("compressive pretrain x --recipe c-byol/imagenet-r50-3", "c-byol/imagenet-r50-300"),
        ("compressive pretrain x --set network.w", "network.width="),
        ("compressive evaluate x --tasks cor", "corruptions"),
        ("compressive recipes c-simclr/q", "c-simclr/quickstart"),
        ("compressive settings opt", "optim.lr"),
    ],
)
def test_shell_completes(line: str, found: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    env = {"_COMPRESSIVE_COMPLETE": "complete_bash", **words}
    result = RUN.invoke(app, [], env=env, prog_name="compressive")
    assert found in result.stdout.split()


# --- labels and data ----------------------------------------------------------------------------

SMALL = "--steps 1 --backbone test_resnet --image-size 16 --set train.tensorboard=false"
SMALL += " --set network.hidden_dim=16 --set network.projection_dim=8"


def test_folders_named_after_dates_can_be_ignored(tmp_path: Path) -> None:
    for name in ("2019/05", "2020/01"):
        photos(tmp_path / "album" / name, 6)
    result = run(f"pretrain {tmp_path / 'album'} {SMALL} --out {tmp_path / 'a'}")
    assert re.search(r"^note: .*2019, 2020.*--labels none", result.stdout, re.MULTILINE)
    assert "in 2 classes" in result.stdout
    result = run(f"pretrain {tmp_path / 'album'} {SMALL} --labels none --out {tmp_path / 'b'}")
    assert result.exit_code == 0, result.output
    assert "classes" not in result.stdout
    assert "2019" not in result.stdout
    skipped = error_line(f"evaluate {tmp_path / 'b'} --tasks knn")
    assert "labels" in skipped
    assert "--labels" in error_line(f"evaluate {tmp_path / 'b'} --labels all --tasks knn")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.7z", "unpack"),
        ("a.zip", "zip archive"),
        ("a.tar.gz", "damaged"),
        ("a.json", "folder"),
        ("a.csv", "column path"),
        ("a.jpg", "single image"),
        ("a.mp4", "ffmpeg"),
        ("a.xyz", "parquet"),
    ],
)
def test_unsupported_file_says_what_to_do(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    message = error_line(f"pretrain {tmp_path / name} --recipe simclr/quickstart")
    assert str(tmp_path / name) in message
    assert words in message


def test_missing_folder_lists_only_similar_names(tmp_path: Path) -> None:
    for name in ("photos", "thesis"):
        (tmp_path / name).mkdir()
    message = error_line(f"pretrain {tmp_path / 'photo'} --recipe simclr/quickstart")
    assert "photos" in message
    assert "thesis" not in message
    message = error_line(f"pretrain {tmp_path / 'nosuch'} --recipe simclr/quickstart")
    assert "thesis" not in message


def test_large_images_are_reported_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PIL warns of an attack above its own limit, which is below data.max_pixels."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = photos(tmp_path, 1) / "000.png"
    assert decode(path.read_bytes(), 1000).shape == (3, 24, 24)
    with pytest.raises(Unreadable, match=r"576 pixels.*data\.max_pixels is 300"):
        decode(path.read_bytes(), 300)
    print_warning("an attack", Image.DecompressionBombWarning, "PIL/Image.py", 1)
    assert capsys.readouterr().err == ""


def test_videos_are_counted_in_a_note(tmp_path: Path) -> None:
    photos(tmp_path, 3)
    for name in ("a.mp4", "b.MOV"):
        (tmp_path / name).touch()
    with pytest.warns(UserWarning, match=r"\.mp4 1, \.mov 1|\.mov 1, \.mp4 1"):
        assert len(open_source(tmp_path)) == 3


def test_archive_in_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "images.zip").write_bytes(b"x")
    assert "images.zip" in error_line(f"pretrain {tmp_path} --recipe simclr/quickstart")

"""The folder of a run: what it remembers, and what is refused in one line."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from run_files import config_text
from tiny import tiny

from compressive.config import Config, flat, override
from compressive.rundir import folder as folders
from compressive.rundir.folder import FREE, open_folder, read_config, write_config

CPU = torch.device("cpu")


def written(folder: Path, config: Config) -> Path:
    write_config(folder, config, CPU)
    return folder


def refusal(folder: Path, config: Config, *, resume: bool = True) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        open_folder(folder, config, resume=resume)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_config_json_has_every_setting_and_where_it_was_made(tmp_path: Path) -> None:
    config = tiny("method=c-byol", "bottleneck.target_residual=2", "seed=7")
    found = json.loads((written(tmp_path / "a" / "b", config) / "config.json").read_text())
    about = found.pop("about")
    assert found.pop("format_version") == 2
    assert found == asdict(config)
    assert torch.__version__.startswith(about["versions"]["torch"])  # it may add +cu132
    assert set(about["versions"]) == {"compressive", "torch", "torchvision", "timm", "numpy"}
    assert all(re.match(r"\d+\.\d+", version) for version in about["versions"].values())
    assert re.fullmatch(r"([0-9a-f]{7,40}\+?)?", about["commit"])
    assert {"started", "command", "device", "python", "platform"} < about.keys()
    assert read_config(tmp_path / "a" / "b") == config


@pytest.mark.slow
def test_images_are_found_again_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    config = tiny("data.source=photos")
    found = read_config(written(tmp_path / "a", config)).data.source
    assert found == str(tmp_path / "photos")
    assert open_folder(tmp_path / "a", config, resume=True)
    (tmp_path / "others").mkdir()
    told = refusal(tmp_path / "a", tiny("data.source=others", "train.epochs=9"))
    assert f"holds a run with data.source = {found}, not {tmp_path / 'others'}, train.epo" in told
    nowhere = read_config(written(tmp_path / "b", tiny("data.source=torchvision:CIFAR10")))
    assert nowhere.data.source == "torchvision:CIFAR10"


def test_the_commit_is_that_of_our_source_tree(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    words = ["git", "-C", str(root), "rev-parse", "HEAD"]
    head = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    about = json.loads((written(tmp_path, tiny()) / "config.json").read_text())["about"]
    assert head.startswith(about["commit"].removesuffix("+"))
    assert about["commit"]


def test_a_new_or_empty_folder_is_begun_and_a_run_goes_on(tmp_path: Path) -> None:
    config = tiny()
    (tmp_path / "empty").mkdir()
    assert not open_folder(tmp_path / "new", config, resume=True)
    assert not open_folder(tmp_path / "empty", config, resume=False)
    assert open_folder(written(tmp_path / "new", config), config, resume=True)


@pytest.mark.slow
def test_another_setting_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, tiny())
    message = refusal(tmp_path, tiny("optim.lr=0.7"))
    assert message == (
        f"{tmp_path} holds a run with optim.lr = 0.2, not 0.7; give the same settings to go on "
        "with it, choose another --out, or delete it"
    )
    many = refusal(
        tmp_path,
        tiny(
            "seed=1",
            "optim.lr=0.7",
            "train.batch_size=4",
            "views.size=8",
            "network.projection_dim=4",
        ),
    )
    assert "seed = 0, not 1" in many
    assert " and 2 more; " in many
    three = refusal(tmp_path, tiny("seed=1", "optim.lr=0.7", "train.batch_size=4"))
    assert "seed = 0, not 1" in three
    assert "more" not in three


@pytest.mark.slow
def test_settings_that_change_nothing_learned_may_change(tmp_path: Path) -> None:
    """Each of them, and none of the others."""
    config = tiny()
    written(tmp_path, config)
    other = {
        **{
            "recipe": "x",
            "data.source": "elsewhere",
            "data.cache_on_device": "no",
            "data.workers": "3",
        },
        **{"train.device": "cuda", "train.save_every": "2", "train.log_every": "5"},
        **{"train.tensorboard": "true", "health.max_restarts": "9", "health.spike_sigma": "9"},
        **{
            "health.collapse_std": "0.3",
            "health.min_participation_ratio": "3",
            "probe.every_epochs": "7",
        },
    }
    assert set(other) == FREE <= set(flat(config))
    for name, value in other.items():
        changed = override(config, f"{name}={value}")
        assert changed != config
        assert open_folder(tmp_path, changed, resume=True)
    for name in (
        "train.batch_size=4",
        "train.epochs=3",
        "probe.holdout=0.2",
        "train.precision=bf16",
    ):
        assert name.split("=")[0] in refusal(tmp_path, override(config, name))


def test_no_resume_refuses_what_is_there(tmp_path: Path) -> None:
    written(tmp_path, tiny())
    message = refusal(tmp_path, tiny(), resume=False)
    assert message == f"{tmp_path} already holds a run; choose another --out, or delete it"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    message = refusal(tmp_path, tiny())
    assert message == f"{tmp_path} is not empty and holds no run; choose another --out"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_config_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no folder of a run: it has no config\.json$"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"seed": ')
    assert "config.json is damaged: " in refusal(tmp_path, tiny())
    (tmp_path / "config.json").write_bytes(b'{"seed": "\xff"}')
    assert "config.json is damaged: " in refusal(tmp_path, tiny())
    (tmp_path / "config.json").write_text(config_text({"sead": 1}))
    told = refusal(tmp_path, tiny())
    assert told.startswith(f"{tmp_path / 'config.json'}: no setting 'sead'")
    assert "did you mean seed?" in told


@pytest.mark.parametrize("version", [None, 1, 3])
def test_a_run_of_another_format_is_refused_with_the_version_that_wrote_it(
    version: int | None, tmp_path: Path
) -> None:
    path = written(tmp_path, tiny()) / "config.json"
    config = json.loads(path.read_text())
    about = {"versions": {"compressive": "0.1.5"}}
    path.write_text(json.dumps(config | {"format_version": version, "about": about}))
    message = refusal(tmp_path, tiny())
    for words in (str(path), "compressive 0.1.5", f"format {version or 1}", "format 2"):
        assert words in message


def test_what_a_kill_left_of_the_first_write_is_no_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / ".config.json.123.partial").write_text("{")
    assert open_folder(tmp_path, tiny(), resume=True) is False


@pytest.mark.parametrize(
    ("called", "first"),
    [
        ("/somewhere/bin/compressive", "compressive"),
        (str(Path(folders.__file__).parents[1] / "__main__.py"), "compressive"),
        ("train.py", "train.py"),
    ],
)
def test_a_command_can_be_given_again(
    called: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "evaluate", "my run"])
    assert folders.command() == f"{first} evaluate 'my run'"

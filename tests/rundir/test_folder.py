"""A run folder records its settings, and conflicting settings are rejected with one line."""

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


def test_config_json_has_all_settings_and_the_environment(tmp_path: Path) -> None:
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
def test_data_source_is_stored_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    config = tiny("data.source=photos")
    found = read_config(written(tmp_path / "a", config)).data.source
    assert found == str(tmp_path / "photos")
    assert open_folder(tmp_path / "a", config, resume=True)
    (tmp_path / "others").mkdir()
    message = refusal(tmp_path / "a", tiny("data.source=others", "train.epochs=9"))
    assert re.search(rf"data\.source.* {found}.* {tmp_path / 'others'}.*train\.epochs", message)
    nowhere = read_config(written(tmp_path / "b", tiny("data.source=torchvision:CIFAR10")))
    assert nowhere.data.source == "torchvision:CIFAR10"


def test_recorded_commit_is_the_source_trees(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout")
    words = ["git", "-C", str(root), "rev-parse", "HEAD"]
    head = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    about = json.loads((written(tmp_path, tiny()) / "config.json").read_text())["about"]
    assert head.startswith(about["commit"].removesuffix("+"))
    assert about["commit"]


def test_empty_folder_starts_and_existing_run_resumes(tmp_path: Path) -> None:
    config = tiny()
    (tmp_path / "empty").mkdir()
    assert not open_folder(tmp_path / "new", config, resume=True)
    assert not open_folder(tmp_path / "empty", config, resume=False)
    assert open_folder(written(tmp_path / "new", config), config, resume=True)


@pytest.mark.slow
def test_changed_setting_is_rejected_by_name(tmp_path: Path) -> None:
    written(tmp_path, tiny())
    message = refusal(tmp_path, tiny("optim.lr=0.7"))
    assert re.search(rf"^{tmp_path} .*optim\.lr.* 0\.2.* 0\.7;.*--out", message)
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
    assert re.search(r"\bseed\b.* 0.* 1.* 2 more; ", many)
    three = refusal(tmp_path, tiny("seed=1", "optim.lr=0.7", "train.batch_size=4"))
    assert re.search(r"\bseed\b.* 0.* 1\b", three)
    assert "more" not in three


@pytest.mark.slow
def test_settings_without_effect_on_weights_may_change(tmp_path: Path) -> None:
    """Cover all of them, and a few that may not change."""
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
        "train.track": "trackio",
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


def test_no_resume_rejects_an_existing_run(tmp_path: Path) -> None:
    written(tmp_path, tiny())
    message = refusal(tmp_path, tiny(), resume=False)
    assert re.search(f"^{tmp_path} .*holds a run.*--out", message)


def test_folder_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("important")
    message = refusal(tmp_path, tiny())
    assert re.search(f"^{tmp_path} .*not empty.*--out", message)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_unreadable_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} .*config\.json$"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"seed": ')
    assert "config.json is damaged: " in refusal(tmp_path, tiny())
    (tmp_path / "config.json").write_bytes(b'{"seed": "\xff"}')
    assert "config.json is damaged: " in refusal(tmp_path, tiny())
    (tmp_path / "config.json").write_text(config_text({"sead": 1}))
    message = refusal(tmp_path, tiny())
    assert re.search(f"^{tmp_path / 'config.json'}: .*'sead'.*seed\\?", message)


@pytest.mark.parametrize("version", [None, 1, 3])
def test_other_format_error_names_the_writing_version(version: int | None, tmp_path: Path) -> None:
    path = written(tmp_path, tiny()) / "config.json"
    config = json.loads(path.read_text())
    about = {"versions": {"compressive": "0.1.5"}}
    path.write_text(json.dumps(config | {"format_version": version, "about": about}))
    message = refusal(tmp_path, tiny())
    for words in (str(path), "compressive 0.1.5", f"format {version or 1}", "format 2"):
        assert words in message


def test_partial_first_write_does_not_block_a_new_run(tmp_path: Path) -> None:
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
def test_recorded_command_can_be_rerun(
    called: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "evaluate", "my run"])
    assert folders.command() == f"{first} evaluate 'my run'"

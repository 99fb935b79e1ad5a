"""A damaged weights file is reported by every reader and never used."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import noise, silent, sorted_photos, tiny
from typer.testing import CliRunner

import compressive
from compressive import weights
from compressive.cli.app import app
from compressive.encoder import pack
from compressive.evaluation.frozen_model import open_model
from compressive.pretrained.source import resolve
from compressive.rundir.checksum import CHECKSUM_KEY
from compressive.rundir.files import ENCODER
from compressive.train.loop import pretrain

CPU = torch.device("cpu")
SHIPPED = "cifar10-byol-r18"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    pretrain(tiny("train.steps=1"), out, display=silent())
    return out


def flip_exponent_bit(path: Path) -> Path:
    """Multiply the last float of a file by a power of two."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 2
    path.write_bytes(content)
    return path


def rewrite_metadata(path: Path, **changes: str | None) -> Path:
    """Write the same tensors with other metadata; None removes an entry."""
    with safe_open(path, "pt") as file:
        entries = {k: v for k, v in {**file.metadata(), **changes}.items() if v is not None}
    save_file(load_file(path), path, entries)
    return path


def test_flipped_bit_in_encoder_is_reported(run: Path, tmp_path: Path) -> None:
    path = flip_exponent_bit(Path(shutil.copy(run / ENCODER, tmp_path)))
    for use in (
        lambda: compressive.load(path),
        lambda: open_model(str(path), CPU),
        lambda: resolve(path),
        lambda: pack(path, tmp_path / "packed"),
    ):
        with pytest.raises(ValueError, match=r"is damaged: .* checksum; restore it") as caught:
            use()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("command", ["evaluate", "embed"])
def test_commands_exit_with_code_2_for_a_damaged_encoder(
    command: str, run: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(run, tmp_path / "run")
    flip_exponent_bit(out / ENCODER)
    words = {
        "evaluate": ["--tasks", "knn"],
        "embed": [str(sorted_photos()), "--out", str(tmp_path / "features.npz")],
    }
    result = CliRunner().invoke(app, [command, str(out), *words[command], "--device", "cpu"])
    assert result.exit_code == 2, result.output
    assert f"{out / ENCODER} is damaged" in result.output
    assert not (out / "evaluation" / "results.json").exists()
    assert not (tmp_path / "features.npz").exists()


def test_changed_preprocessing_in_encoder_metadata_is_reported(run: Path, tmp_path: Path) -> None:
    """A flipped bit in the size or side would change features without changing a weight."""
    path = Path(shutil.copy(run / ENCODER, tmp_path))
    content = path.read_bytes()
    assert content.count(b'"antialias":"false"') == 1
    path.write_bytes(content.replace(b'"side":"16"', b'"side":"17"'))
    with pytest.raises(ValueError, match="is damaged"):
        compressive.load(path)


def test_encoder_of_the_current_format_without_checksum_is_reported_as_damaged(
    run: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(run / ENCODER, tmp_path))
    assert compressive.load(path).feature_dim == 96
    with pytest.raises(ValueError, match="is damaged"):
        compressive.load(rewrite_metadata(path, **{CHECKSUM_KEY: None}))


def test_third_party_and_format_2_files_are_read_without_checksum(
    run: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(run / ENCODER, tmp_path))
    rewrite_metadata(path, **{CHECKSUM_KEY: None, "format_version": "2"})
    assert compressive.load(path).feature_dim == 96
    packed = pack(path, tmp_path / "packed.safetensors")
    with safe_open(packed, "pt") as file:
        assert file.metadata()["format_version"] == "5"
        assert CHECKSUM_KEY in file.metadata()
    save_file(load_file(path), path)
    assert open_model(str(path), CPU, network="test_resnet").feature_dim == 96


def test_flipped_bit_in_shipped_encoder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = weights.find(SHIPPED)
    assert found is not None
    assert compressive.load(SHIPPED).feature_dim == 512
    path = flip_exponent_bit(Path(shutil.copy(found, tmp_path)))
    monkeypatch.setattr(weights, "WEIGHTS", tmp_path)
    with pytest.raises(ValueError, match=r"is damaged: .*; install the package again") as caught:
        compressive.load(SHIPPED)
    assert str(path) in str(caught.value)


def test_intact_encoder_gives_unchanged_features(run: Path) -> None:
    """Verifying the checksum must not change weights."""
    stored, loaded = load_file(run / ENCODER), compressive.load(run).network.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)
    assert compressive.load(run).preprocess(noise(16, 16)).shape == (1, 3, 16, 16)

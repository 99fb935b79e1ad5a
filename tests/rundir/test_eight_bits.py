"""Encoders with 8 bits per weight: rounding, features, damaged files and the command."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import Network
from compressive.encoder import load, pack, save
from compressive.evaluation.features import network_fingerprint
from compressive.evaluation.frozen_model import open_model
from compressive.networks import build
from compressive.pretrained.source import resolve
from compressive.rundir.checksum import CHECKSUM_KEY, file_checksum
from compressive.rundir.eight_bits import SCALE_SUFFIX, from_int8, to_int8
from compressive.rundir.fingerprint import file_fingerprint
from compressive.rundir.versions import UnsupportedFormat

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = Network(name="test_resnet")
LARGE = 2**16  # weights; smaller kernels have 16 bits


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = build(SETTINGS, 32)
    for _ in range(2):
        network(torch.randn(8, 3, 32, 32))
    return save(tmp_path_factory.mktemp("whole"), network.eval(), SETTINGS, 32, 40)


@pytest.fixture
def small(whole: Path, tmp_path: Path) -> Path:
    return pack(whole, tmp_path / "small.safetensors", {"seed": "3"}, bits=8)


def kernels() -> np.ndarray:
    """Return channels of different magnitudes; the third has zeros only."""
    values = np.random.default_rng(0).normal(size=(5, 3, 2, 2)).astype(np.float32)
    return values * np.array([1, 1e-4, 0, 30, 1e-20], np.float32).reshape(-1, 1, 1, 1)


def rewrite(path: Path, tensors: dict[str, Tensor], **changes: str) -> Path:
    """Write other tensors and metadata with a checksum that fits them."""
    with safe_open(path, "pt") as file:
        metadata = {**file.metadata(), **changes}
    metadata[CHECKSUM_KEY] = file_checksum(metadata, tensors)
    save_file(tensors, path, metadata)
    return path


def test_integers_and_scales_equal_a_naive_loop() -> None:
    values = kernels()
    integers, scales = to_int8(values, "conv")
    assert integers.dtype == np.int8
    for channel, some in enumerate(values):
        scale = np.float32(max(abs(float(x)) for x in some.flat) / 127)
        assert scales[channel] == scale
        for found, x in zip(integers[channel].flat, some.flat, strict=True):
            assert found == (round(float(x) / float(scale)) if scale else 0)
    assert np.abs(integers).max(axis=(1, 2, 3)).tolist() == [127, 127, 0, 127, 127]


def test_round_trip_error_is_at_most_half_a_step() -> None:
    values = kernels()
    integers, scales = to_int8(values, "conv")
    found = from_int8({"conv": integers, "conv" + SCALE_SUFFIX: scales}, Path("file"))
    assert found.keys() == {"conv"}
    assert found["conv"].dtype == np.float32
    error = np.abs(found["conv"].astype(np.float64) - values)
    steps = scales.astype(np.float64).reshape(-1, 1, 1, 1)
    assert (error <= steps * (0.5 + 1e-5)).all()
    assert error.max() > 0.4 * steps.max()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e33, 1e-30])
def test_values_that_do_not_fit_are_rejected(value: float) -> None:
    values = np.full((2, 3), value, np.float32)
    with pytest.raises(ValueError, match=r"^conv1 .*8 bits") as caught:
        to_int8(values, "conv1")
    assert "\n" not in str(caught.value)


def test_only_large_kernels_have_8_bits(whole: Path, small: Path) -> None:
    before, after = load_file(whole), load_file(small)
    scales = {name for name in after if name.endswith(SCALE_SUFFIX)}
    assert after.keys() - scales == before.keys()
    for name, value in before.items():
        if value.ndim < 2:
            assert torch.equal(after[name], value)
        elif value.numel() < LARGE:
            assert after[name].dtype == torch.float16
        else:
            assert after[name].dtype == torch.int8
            scales.remove(name + SCALE_SUFFIX)
    assert not scales
    assert {value.dtype for value in after.values()} >= {torch.int8, torch.float16}
    assert small.stat().st_size < 0.45 * whole.stat().st_size  # most kernels are small here


def test_every_reader_returns_the_same_float32_weights(whole: Path, small: Path) -> None:
    stored, encoder = load_file(small), load(small)
    state = encoder.network.state_dict()
    assert state.keys() == load_file(whole).keys()
    for name, value in state.items():
        if stored[name].dtype == torch.int8:
            scale = stored[name + SCALE_SUFFIX].reshape(-1, *[1] * (value.ndim - 1))
            assert torch.equal(value, stored[name].float() * scale)
    inputs = torch.randn(4, 3, 32, 32)
    model = open_model(str(small), torch.device("cpu"))
    torch.testing.assert_close(model.network(inputs), encoder(inputs), rtol=1e-4, atol=1e-5)
    found = resolve(str(small)).backbone.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert file_fingerprint(small) == network_fingerprint(encoder.network)
    with safe_open(small, "pt") as file:
        assert file.metadata()["seed"] == "3"


def test_features_stay_close(whole: Path, small: Path) -> None:
    inputs = torch.randn(8, 3, 32, 32)
    before, after = load(whole)(inputs), load(small)(inputs)
    assert torch.cosine_similarity(before, after).min() > 0.9998
    assert not torch.equal(before, after)


def test_packing_again_changes_no_weight(small: Path, tmp_path: Path) -> None:
    again = load(pack(small, tmp_path / "again.safetensors", bits=8)).network.state_dict()
    for name, value in load(small).network.state_dict().items():
        torch.testing.assert_close(again[name], value, rtol=3e-7, atol=0)


@pytest.mark.parametrize("bits", [4, 0, 64])
def test_other_numbers_of_bits_are_rejected(bits: int, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"bits must be .*16, 8, got {bits}"):
        pack(whole, tmp_path / "a.safetensors", bits=bits)


def damages() -> dict[str, Any]:
    """Return functions that damage the tensors of a file, given the name of a kernel."""
    key = SCALE_SUFFIX
    return {
        "missing": lambda file, name: file.pop(name + key),
        "orphan": lambda file, name: file.update({f"conv9{key}": torch.ones(2)}),
        "of float": lambda file, name: file.update({name: file[name].float()}),
        "short": lambda file, name: file.update({name + key: file[name + key][1:].clone()}),
        "double": lambda file, name: file.update({name + key: file[name + key].double()}),
        "nan": lambda file, name: file[name + key].fill_(torch.nan),
        "negative": lambda file, name: file[name + key].neg_(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", damages())
def test_scales_that_do_not_fit_are_reported(kind: str, small: Path) -> None:
    """The checksum fits, so a program that writes such files wrongly wrote this one."""
    tensors = load_file(small)
    name = next(name for name, value in tensors.items() if value.dtype == torch.int8)
    damages()[kind](tensors, name)
    rewrite(small, tensors)
    for use in (lambda: load(small), lambda: resolve(str(small)), lambda: file_fingerprint(small)):
        with pytest.raises(ValueError, match="is damaged") as caught:
            use()
        assert str(small) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_flipped_bit_is_reported(small: Path) -> None:
    content = bytearray(small.read_bytes())
    content[-1] ^= 1
    small.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        load(small)


def test_newer_format_is_refused(small: Path) -> None:
    rewrite(small, load_file(small), format_version="6")
    with pytest.raises(UnsupportedFormat, match=r"format 6.*format 5") as caught:
        load(small)
    assert "\n" not in str(caught.value)


def test_command_writes_a_file_and_prints_the_difference(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.safetensors"
    done = CliRunner().invoke(app, ["pack-encoder", str(whole), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "8 images of builtin" in done.output
    assert f"{out.stat().st_size / 1e6:.1f} MB" in done.output
    assert load(out).feature_dim == load(whole).feature_dim
    for changes, named in (
        ({"--out": str(out)}, "exists"),
        ({"--out": "small.pth"}, ".safetensors"),
        ({"--bits": "4"}, "--bits must be 8 or 16, got 4"),
    ):
        options = {"--out": str(tmp_path / "b.safetensors")} | changes
        words = [word for pair in options.items() for word in pair]
        done = CliRunner().invoke(app, ["pack-encoder", str(whole), *words])
        assert done.exit_code == 2
        assert named in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == [out]

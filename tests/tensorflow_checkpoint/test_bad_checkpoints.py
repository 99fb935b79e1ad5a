"""Damaged, incomplete and foreign checkpoints: one line, exit code 2, nothing written."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import error_line
from conftest import GOLDEN
from tensorflow_files import ENDING, Claimed, message, number, table, write_bundle

from compressive.config import Network
from compressive.networks import build
from compressive.tensorflow_checkpoint import names
from compressive.tensorflow_checkpoint.object_graph import GRAPH, ObjectGraph
from compressive.tensorflow_checkpoint.official_model import OfficialModel
from compressive.tensorflow_checkpoint.table import entries
from compressive.tensorflow_checkpoint.tensor_bundle import TensorBundle

STEM = f"model/_resnet/{names.STEM_KERNEL}{ENDING}"
LAST = f"model/_resnet/block_groups/3/layers/1/conv2d_bn_layers/3/bn/moving_variance{ENDING}"


@cache
def resnet18() -> dict[str, Claimed]:
    """Return the variables of a ResNet-18 without values."""
    with torch.device("meta"):
        weights = build(Network(name="resnet18", variant="official"), 224).state_dict()
    found = {}
    for name, path in names.backbone_paths((2, 2, 2, 2), bottleneck=False).items():
        shape = tuple(weights[name].shape)
        shape = (*shape[2:], shape[1], shape[0]) if len(shape) == 4 else shape
        found[f"model/_resnet/{path}{ENDING}"] = Claimed(shape, 4 * int(np.prod(shape)))
    return found


def refused(tmp_path: Path, place: Path) -> str:
    """Return the error line of a conversion that must write nothing."""
    out = tmp_path / "out"
    line = error_line(f"convert {place} --out {out}/e.safetensors --heads {out}/h.safetensors")
    assert not out.exists()
    return line


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return the prefix of a copy of the golden checkpoint."""
    shutil.copytree(GOLDEN / "tensorflow" / "exported" / "variables", tmp_path / "exported")
    return tmp_path / "exported" / "variables"


def index_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def data_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.data-00000-of-00001")


def test_missing_shard_is_named(tmp_path: Path, copied: Path) -> None:
    data_of(copied).unlink()
    assert "variables.data-00000-of-00001 is missing" in refused(tmp_path, copied)


def test_missing_index_is_named(tmp_path: Path, copied: Path) -> None:
    index_of(copied).unlink()
    assert "variables.index is missing" in refused(tmp_path, data_of(copied))
    assert "no .index file" in refused(tmp_path, copied.parent)


@pytest.mark.parametrize("kept", [0, 10, 47, 48, 1000, -1])
def test_truncated_index_is_refused(tmp_path: Path, copied: Path, kept: int) -> None:
    index_of(copied).write_bytes(index_of(copied).read_bytes()[:kept])
    assert "truncated" in refused(tmp_path, copied)


@pytest.mark.parametrize("kept", [0, 1, 1000, 100_000, -1])
def test_truncated_data_is_refused(copied: Path, kept: int) -> None:
    data_of(copied).write_bytes(data_of(copied).read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"data-00000-of-00001 is truncated"):
        assert OfficialModel(copied).encoder_weights() | OfficialModel(copied).head_weights()


@pytest.mark.parametrize("place", [0, 5, 1000])
def test_flipped_bit_in_the_object_graph_is_refused(
    tmp_path: Path, copied: Path, place: int
) -> None:
    content = bytearray(data_of(copied).read_bytes())
    content[TensorBundle(copied).entries[GRAPH].offset + place] ^= 4
    data_of(copied).write_bytes(content)
    assert "damaged" in refused(tmp_path, copied)


def test_flipped_bit_in_every_tensor_is_refused(copied: Path) -> None:
    bundle = TensorBundle(copied)
    content = bytearray(data_of(copied).read_bytes())
    for entry in bundle.entries.values():
        content[entry.offset + entry.size // 2] ^= 1
    data_of(copied).write_bytes(content)
    for name, entry in list(bundle.entries.items())[::5]:
        read = bundle.text if entry.dtype == 7 else bundle.tensor
        with pytest.raises(ValueError, match="damaged"):
            read(name)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.pth", b"PK\x03\x04" + bytes(100), "PyTorch"),
        ("old.pth", b"\x80\x02\x8a\x0al" + bytes(100), "PyTorch"),
        ("checkpoint.tar.gz", b"\x1f\x8b\x08" + bytes(100), "tar xf"),
        ("weights.h5", b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        ("notes.txt", b"hello", "not a TensorFlow checkpoint"),
        ("empty", b"", "not a TensorFlow checkpoint"),
        ("random.index", bytes(range(256)), "random.index is not the index"),
    ],
)
def test_other_files_are_named(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert expected in refused(tmp_path, tmp_path / name)


def test_missing_path_is_named(tmp_path: Path) -> None:
    assert f"no TensorFlow checkpoint at {tmp_path}/a" in refused(tmp_path, tmp_path / "a")


def test_folder_with_several_checkpoints_needs_the_state_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for name in ("ckpt-1", "ckpt-2"):
        write_bundle(folder / name, resnet18() | {STEM: Claimed((1, 2))})
    line = refused(tmp_path, folder)
    assert "2 checkpoints: ckpt-1, ckpt-2" in line
    (folder / "checkpoint").write_text('model_checkpoint_path: "/elsewhere/ckpt-2"\n')
    assert f"{folder}/ckpt-2: the stem" in refused(tmp_path, folder)
    (folder / "checkpoint").write_text('model_checkpoint_path: "ckpt-9"\n')
    assert "2 checkpoints" in refused(tmp_path, folder)


def _nan(shape: tuple[int, ...]) -> Any:
    values = np.zeros(shape, np.float32)
    values.flat[-1] = np.nan
    return values


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing variable": (lambda t: t.pop(LAST), "lacks 1 variables of _resnet, such as block_gro"),
    "unknown variable": (
        lambda t: t.update({f"model/_resnet/se_layer/kernel{ENDING}": Claimed((1,))}),
        "1 unknown variables in _resnet, such as se_layer/kernel",
    ),
    "wrong shape": (
        lambda t: t.update({LAST: Claimed((513,), 4 * 513)}),
        "moving_variance must have the shape [512], got [513]",
    ),
    "wrong depth": (
        lambda t: [t.pop(name) for name in list(t) if "block_groups/3" in name],
        "a ResNet of [2, 2, 2] basic blocks",
    ),
    "narrow stem": (lambda t: t.update({STEM: Claimed((7, 7, 3, 32))}), "got [7, 7, 3, 32]"),
    "NaN": (lambda t: t.update({STEM: _nan((7, 7, 3, 64))}), "kernel has values that are not fin"),
    "no data": (lambda t: None, "is truncated"),
    "wrong size": (
        lambda t: t.update({STEM: Claimed((7, 7, 3, 64), 2**60)}),
        "must have 37,632 bytes, got 1,152,921,504,606,846,976",
    ),
    "data type": (
        lambda t: t.update({STEM: Claimed((7, 7, 3, 64), 37_632, dtype=8)}),
        "TensorFlow's data type 8",
    ),
    "missing second shard": (
        lambda t: t.update({STEM: Claimed((7, 7, 3, 64), 37_632, shard=7)}),
        "data-00007-of-00001 is missing",
    ),
    "other model": (
        lambda t: [t.update({n.replace("_resnet", "net"): t.pop(n)}) for n in list(t)],
        "has no '_resnet' among its objects (model)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_checkpoints_that_do_not_fit_are_one_line(change: str, tmp_path: Path) -> None:
    apply, expected = CHANGES[change]
    tensors: dict[str, Any] = dict(resnet18())
    apply(tensors)
    assert expected in refused(tmp_path, write_bundle(tmp_path / "ckpt", tensors))


def test_unknown_part_is_refused_with_heads(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {STEM: np.ones((1, 1, 2, 2), np.float32)}
    tensors[f"model/_kappa_head/dense/kernel{ENDING}"] = np.ones((2, 2), np.float32)
    model = OfficialModel(write_bundle(tmp_path / "ckpt", tensors))
    assert model.unknown_heads == ("_kappa_head",)
    with pytest.raises(ValueError, match="'_kappa_head'"):
        model.head_weights()


def test_tensor_of_huge_claimed_size_is_not_allocated(tmp_path: Path) -> None:
    claimed = {"a": Claimed((2**21, 2**20), 2**43), "b": Claimed((2**62, 2**62, 4), 1)}
    bundle = TensorBundle(write_bundle(tmp_path / "ckpt", claimed))
    for name in claimed:
        with pytest.raises(ValueError, match=r"truncated|must have"):
            bundle.tensor(name)


def test_checkpoint_of_tensorflow_1_is_named(tmp_path: Path) -> None:
    prefix = write_bundle(tmp_path / "ckpt", {"base_model/conv2d/kernel": Claimed((1,))}, graph=b"")
    assert "TensorFlow 1" in refused(tmp_path, prefix)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({b"a": b""}, "without the header"),
        ({b"": number(1, 1) + number(2, 1)}, "big-endian"),
        ({b"": number(1, 10**9)}, "1,000,000,000 shards"),
        ({b"": number(1, 1), b"a": message(2, message(2, number(1, -5)))}, "[-5]"),
        ({b"": number(1, 1), b"\xff": b""}, "damaged"),
        ({b"": number(1, 1), b"a": message(2, 9 * message(2, b""))}, "[0, 0, 0, 0, 0, 0, 0, 0]"),
        ({b"": b"\x0b"}, "wire type 3"),
        ({b"": number(1, 1) + b"\x1a\x7f"}, "127 bytes, but 0 are left"),
    ],
)
def test_invalid_index_is_one_line(
    tmp_path: Path, content: dict[bytes, bytes], expected: str
) -> None:
    (tmp_path / "ckpt.index").write_bytes(table(content))
    assert expected in refused(tmp_path, tmp_path / "ckpt")


@pytest.mark.parametrize(
    "entry",
    [b"\x01\x00\x00", b"\x00\x05\x00ab", b"\x00\x01\x09ab"],
    ids=["shared prefix", "key", "value"],
)
def test_entry_beyond_its_block_is_refused(entry: bytes) -> None:
    with pytest.raises(ValueError, match="beyond its block"):
        list(entries(entry + bytes(4) + b"\x01\x00\x00\x00"))


def test_object_graph_may_have_cycles_but_no_missing_objects() -> None:
    back = message(1, message(1, number(1, 0) + message(2, "parent")))
    graph = ObjectGraph(message(1, message(1, number(1, 1) + message(2, "child"))) + back)
    assert graph.find(0, "child/parent/child") == 1
    assert graph.keys(0) == {}
    for missing in (1, -1):
        with pytest.raises(ValueError, match="does not have"):
            ObjectGraph(message(1, message(1, number(1, missing) + message(2, "child"))))


def test_long_keys_do_not_fill_memory(tmp_path: Path) -> None:
    """Every key is the one before and one byte: a megabyte of them would need a terabyte."""
    keys = {b"": number(1, 1)} | {b"a" * i: b"" for i in range(1, 3000)}
    (tmp_path / "ckpt.index").write_bytes(table(keys, restart=10**6))
    assert "too long" in refused(tmp_path, tmp_path / "ckpt")


def test_compressed_index_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ckpt.index").write_bytes(table({b"": number(1, 1)}, compression=1))
    assert "it is compressed" in refused(tmp_path, tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--out encoder.pth", "out must be a file with the ending .safetensors, got encoder.pth"),
        ("--out a.safetensors --heads a.safetensors", "a.safetensors twice"),
        ("--out a.safetensors --heads b", "heads must be a file"),
    ],
)
def test_outputs_are_checked_first(options: str, expected: str) -> None:
    assert expected in error_line(f"convert nothing-here {options}")

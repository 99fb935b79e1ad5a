"""Random changes give ValueError, a missing shard, or the right result; never another exception."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorflow_files import ENDING, graph_of, table, write_bundle

from compressive.tensorflow_checkpoint import names
from compressive.tensorflow_checkpoint.object_graph import GRAPH, ObjectGraph
from compressive.tensorflow_checkpoint.official_model import OfficialModel
from compressive.tensorflow_checkpoint.table import entries, read_table
from compressive.tensorflow_checkpoint.tensor_bundle import TensorBundle

VARIABLES = GOLDEN / "tensorflow" / "exported" / "variables"
FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1)
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def flipped(content: bytes, flips: list[tuple[float, int]]) -> bytes:
    """Change bytes at relative places."""
    changed = bytearray(content)
    for place, value in flips:
        changed[int(place * len(changed))] ^= value
    return bytes(changed)


@cache
def golden_entries() -> dict[str, object]:
    return dict(TensorBundle(VARIABLES / "variables").entries)


@settings(SHARED_FOLDER, max_examples=40)
@given(flips=FLIPS)
def test_changed_golden_index(flips: list[tuple[float, int]], tmp_path: Path) -> None:
    content = (VARIABLES / "variables.index").read_bytes()
    (tmp_path / "ckpt.index").write_bytes(flipped(content, flips))
    with suppress(ValueError):
        assert TensorBundle(tmp_path / "ckpt").entries == golden_entries()


@settings(SHARED_FOLDER, max_examples=30)
@given(size=st.integers(0, 6000), more=st.binary(max_size=60))
def test_cut_golden_index(size: int, more: bytes, tmp_path: Path) -> None:
    content = (VARIABLES / "variables.index").read_bytes()[:size]
    (tmp_path / "ckpt.index").write_bytes(content + more)
    with pytest.raises(ValueError, match=r"ckpt\.index"):
        TensorBundle(tmp_path / "ckpt")


def variables() -> Iterator[tuple[str, np.ndarray]]:
    """Yield the variables of a network with one block, and of a head."""
    random = np.random.RandomState(0)
    for path in names.backbone_paths((1,), bottleneck=False).values():
        shape = (1, 1, 2, 2) if path.endswith("kernel") else (2,)
        yield f"model/_resnet/{path}{ENDING}", np.abs(random.randn(*shape)).astype(np.float32)
    for path in names.mlp_paths((0, 1)).values():
        shape = (2, 2) if path.endswith("kernel") else (2,)
        yield f"model/_projection_head/{path}{ENDING}", np.ones(shape, np.float32)
    yield f"global_step{ENDING}", np.array(5)


def read_all(prefix: Path) -> None:
    """Use everything that a conversion uses."""
    model = OfficialModel(prefix)
    assert len(model.methods) in (1, 2)
    assert model.step is None or isinstance(model.step, int)
    with suppress(ValueError):
        assert model.network
    for weight in (*model.encoder_weights().values(), *model.head_weights().values()):
        assert weight.isfinite().all()


def test_unchanged_checkpoint_is_read(tmp_path: Path) -> None:
    read_all(write_bundle(tmp_path / "ckpt", dict(variables())))


@settings(SHARED_FOLDER, max_examples=30)
@given(flips=FLIPS)
def test_changed_object_graph_with_a_right_checksum(
    flips: list[tuple[float, int]], tmp_path: Path
) -> None:
    tensors = dict(variables())
    with suppress(ValueError):
        read_all(write_bundle(tmp_path / "ckpt", tensors, graph=flipped(graph_of(tensors), flips)))


@settings(SHARED_FOLDER, max_examples=30)
@given(flips=FLIPS, which=st.integers(0, 10**6))
def test_changed_entry_with_a_right_checksum(
    flips: list[tuple[float, int]], which: int, tmp_path: Path
) -> None:
    index = tmp_path / "ckpt.index"
    if not (tmp_path / "good").exists():
        write_bundle(tmp_path / "ckpt", dict(variables()))
        shutil.copy(index, tmp_path / "good")
    content = read_table(tmp_path / "good")
    name = sorted(content)[which % len(content)]
    content[name] = flipped(content[name], flips)
    index.write_bytes(table(content))
    with suppress(ValueError, FileNotFoundError):  # of another shard
        read_all(tmp_path / "ckpt")


@given(st.binary(max_size=200))
def test_random_blocks_and_graphs(content: bytes) -> None:
    with suppress(ValueError):
        list(entries(content))
    with suppress(ValueError):
        assert ObjectGraph(content).parent_of(GRAPH) is None

"""Checkpoints are restored bitwise or rejected; a path never holds a partial file."""

import json
import logging
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compressive.optim import LARS, parameter_groups
from compressive.rundir import checkpoint, files
from compressive.rundir.checksum import checksum


def same(a: Any, b: Any) -> bool:
    """Compare type, order and every bit of a tensor; -0.0 is not 0.0, and NaN equals NaN."""
    if isinstance(a, Tensor):
        raw = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    return a == b


def round_trip(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    checkpoint.save(path, state)
    return checkpoint.load(path, "cpu")


# --- round trips -----------------------------------------------------------------------------

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from([(2, 3), (), (0, 4), (1,)]).map(torch.randn)
)  # fmt: skip
KEYS = st.text(max_size=4) | st.integers(-2, 3)
STATES = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
        ),
    ),
)


@pytest.mark.slow
@given(STATES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_any_state_round_trips(tmp_path: Path, state: dict[str, Any]) -> None:
    assert same(round_trip(tmp_path / "a.safetensors", state), state)


def test_comparison_detects_differences() -> None:
    assert not same({"a": -0.0}, {"a": 0.0})
    assert not same({"a": torch.zeros(2)}, {"a": -torch.zeros(2)})
    assert not same({"a": [1]}, {"a": (1,)})
    assert not same({1: 0}, {"1": 0})
    assert not same({"a": 1}, {"a": True})


@pytest.mark.parametrize("dtype", checkpoint.DTYPES, ids=str)
def test_every_bit_pattern_of_every_dtype_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    """Random bytes viewed as numbers include NaN payloads."""
    data = torch.randint(256 if dtype != torch.bool else 2, (64, 8), dtype=torch.uint8)
    state = {"x": data.view(dtype), "scalar": data.view(dtype)[0, 0]}
    path = tmp_path / "a.safetensors"
    assert same(round_trip(path, state), state)
    theirs = load_file(path)  # sorted by name
    assert same({name: theirs[name] for name in state}, state), "safetensors' reader differs"


def test_views_and_memory_formats_round_trip(tmp_path: Path) -> None:
    block = torch.randn(4, 3, 8, 8)
    state = {
        "whole": block,
        "part": block[1:3, :, ::2],
        "again": block,
        "transposed": block[0, 0].T,
        "channels last": block.to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "parameter": nn.Parameter(torch.randn(3)),
    }
    loaded = round_trip(tmp_path / "a.safetensors", state)
    assert same(loaded, state)
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.data_ptr() % 64 == 0, "still at its offset in the file"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_loaded_tensors_are_not_memory_mapped(tmp_path: Path) -> None:
    """safetensors maps the file, so deleting it would not free its disk space."""
    path = tmp_path / "mapped.safetensors"
    state = round_trip(path, {"w": torch.randn(1000)})
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert state["w"].std() > 0


def test_clashing_names_are_kept_apart(tmp_path: Path) -> None:
    one, two, three = torch.randn(3, 2)
    state = {"a": {"b": one}, "a.b": two, "x": {1: one, "1": three}, "__metadata__": two}
    assert same(round_trip(tmp_path / "a.safetensors", state), state)


def test_rng_states_round_trip(tmp_path: Path) -> None:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    expected = random.random(), torch.rand(3)
    loaded = round_trip(tmp_path / "a.safetensors", state)
    random.setstate(loaded["python"])
    torch.set_rng_state(loaded["torch"])
    assert same((random.random(), torch.rand(3)), expected)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "lars": lambda groups: LARS(groups, lr=0.3),
}


def training(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    model = model.to(memory_format=torch.channels_last)
    return model, OPTIMIZERS[name](parameter_groups(model, weight_decay=1e-4))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_bitwise(name: str, tmp_path: Path) -> None:
    model, optimizer = training(name)
    steps(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    loaded = round_trip(tmp_path / "a.safetensors", state)
    assert same(loaded["optimizer"], state["optimizer"])
    steps(model, optimizer, range(3, 6))

    other, resumed = training(name)
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    steps(other, resumed, range(3, 6))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(2), r"state\.a\.1 .*ndarray"),
        ({1.5: 0}, r"state\.a\.1 .*keys.* 1\.5"),
        (torch.zeros(2, dtype=torch.complex64), r"state\.a\.1 .*dense and real"),
        (torch.zeros(2, 2).to_sparse(), r"state\.a\.1 .*dense and real"),
    ],
)
def test_unsupported_value_is_named_and_keeps_the_old_file(
    value: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"old": 1})
    with pytest.raises(ValueError, match=words):
        checkpoint.save(path, {"a": [0, value]})
    assert checkpoint.load(path) == {"old": 1}


@pytest.mark.slow
def test_oversized_header_is_never_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match=r"header of 100 MB"):
        checkpoint.save(path, {"a": "x" * 100_000_000})
    assert not path.exists()


# --- rejected files --------------------------------------------------------------------------


def names_path_in_one_line(error: BaseException, path: Path) -> bool:
    return str(path) in str(error) and "\n" not in str(error)


def test_truncated_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"w": torch.randn(50), "n": 3})
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoint.Damaged, match="delete it") as caught:
            checkpoint.load(path)
        assert names_path_in_one_line(caught.value, path)
    path.write_bytes(whole + b"x")
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load(path)


def test_any_flipped_bit_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {"w": torch.randn(50), "n": 3, "step": 1234})
    whole = path.read_bytes()
    begin = whole.index(b"1234", whole.index(b'"state"'))
    for place in (begin, begin + 3, len(whole) - 200, len(whole) - 77, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(checkpoint.Damaged, match="checksum"):
            checkpoint.load(path)
    path.write_bytes(whole[:-64] + bytes(64))  # as after a power cut without fsync
    with pytest.raises(checkpoint.Damaged, match="checksum"):
        checkpoint.load(path)


def rewrite_header(path: Path, **changes: str | None) -> None:
    """Rewrite the file with changed header fields."""
    with safe_open(path, "pt") as file:
        header = {k: v for k, v in {**file.metadata(), **changes}.items() if v is not None}
    save_file(load_file(path), path, header)


@pytest.mark.parametrize("version", ["3", None])
def test_other_formats_are_not_reported_as_damaged(version: str | None, tmp_path: Path) -> None:
    """Format 1, of compressive 0.1, had no key of this name."""
    path = tmp_path / "step_00000001.safetensors"
    checkpoint.save(path, {"w": torch.randn(5)})
    rewrite_header(path, format_version=version)
    with pytest.raises(ValueError, match=rf"format {version or 1}\b.*format 2\b") as newer:
        checkpoint.load(path)
    with pytest.raises(ValueError, match=rf"format {version or 1}\b"):
        checkpoint.latest(tmp_path)  # falling back here would lose progress
    config = {"about": {"versions": {"compressive": "0.7"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"compressive 0\.7 "):
        checkpoint.load(path)
    save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no checkpoint") as foreign:
        checkpoint.load(path)
    for caught in (newer, foreign):
        assert not isinstance(caught.value, checkpoint.Damaged)
        assert names_path_in_one_line(caught.value, path)
    torch.save({"w": torch.zeros(2)}, path)
    with pytest.raises(checkpoint.Damaged, match="damaged"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "header", [{"state": None}, {"state": '{"tensor": "gone"}'}, {"state": "["}]
)
def test_invalid_header_is_damaged(header: dict[str, str | None], tmp_path: Path) -> None:
    """The checksum is valid."""
    path = tmp_path / "a.safetensors"
    checkpoint.save(path, {})
    crc = checksum(header["state"] or "", {})
    rewrite_header(path, **header, crc32=crc)
    with pytest.raises(checkpoint.Damaged, match="header"):
        checkpoint.load(path)


def test_missing_checkpoint_error_lists_existing_ones(tmp_path: Path) -> None:
    checkpoint.save_step(tmp_path, 7, {})
    with pytest.raises(FileNotFoundError, match=r"step_00000008.*step_00000007"):
        checkpoint.load(tmp_path / "step_00000008.safetensors")
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors.* none"):
        checkpoint.load(tmp_path / "nowhere" / "a.safetensors")


# --- the folder --------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_last_two_are_kept_and_later_steps_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.latest(folder) is None
    (tmp_path / "checkpoints").mkdir()
    (folder / "notes.txt").write_text("mine")
    for step in (90, 100, 99_999_999, 100_000_000):  # the last has one more digit
        path = checkpoint.save_step(folder, step, {"step": step})
        assert checkpoint.latest(folder) == (path, {"step": step})
        assert checkpoint.step_of(path) == step
    assert names(folder) == [
        "notes.txt",
        "step_100000000.safetensors",
        "step_99999999.safetensors",
    ]
    rewound = checkpoint.save_step(folder, 95, {"step": 95})
    assert checkpoint.steps(folder) == [rewound]


def test_damaged_checkpoints_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = checkpoint.save_step(tmp_path, 1, {"w": torch.randn(9)})
    second = checkpoint.save_step(tmp_path, 2, {"w": torch.randn(9)})
    second.write_bytes(second.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[0] == first
    (record,) = caplog.records
    assert re.search(f"^skipped: {second} .*damaged.*header.*delete it", record.getMessage())
    first.write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 checkpoints .*damaged"):
        checkpoint.latest(tmp_path)


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path: Path) -> None:
    for left in (".step_00000003.safetensors.123.partial", ".config.json.7.partial"):
        (tmp_path / left).write_bytes(b"half")
    checkpoint.save_step(tmp_path, 4, {})
    assert names(tmp_path) == [".config.json.7.partial", "step_00000004.safetensors"]
    (tmp_path / ".other.json.8.partial").touch()  # another process may be writing it
    files.write_text(tmp_path / "config.json", "{}")
    assert names(tmp_path) == [".other.json.8.partial", "config.json", "step_00000004.safetensors"]


def test_text_files_have_default_permissions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.json"
    files.write_text(path, json.dumps({"name": "Größe"}, ensure_ascii=False))
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "Größe"}
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


# --- failures of the machine -----------------------------------------------------------------

FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from compressive.rundir import checkpoint
folder = Path(sys.argv[1])
checkpoint.save_step(folder, 1, {"w": torch.arange(9.0)})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoint.save_step(folder, 2, {"w": torch.zeros(10_000)})
except OSError as error:
    print(error.errno, error)
"""


@pytest.mark.slow
def test_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """A limit on the file size replaces a full disk: the same write fails in the same way."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    errno, line = run.stdout.rstrip("\n").split(" ", 1)
    assert errno == "27"
    path = tmp_path / "step_00000002.safetensors"
    assert re.search(rf"^\[Errno 27\] .*{path} \(0\.0 MB\): File too large; ", line)
    assert names(tmp_path) == ["step_00000001.safetensors"]
    assert same(checkpoint.load(tmp_path / names(tmp_path)[0]), {"w": torch.arange(9.0)})


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from compressive.rundir import checkpoint

def save_for_ever(path, n):
    while True:
        n += 1
        checkpoint.save(path, {"n": n, "w": torch.full((100_000,), float(n))})

torch.set_num_threads(1)
path, n, left = Path(sys.argv[1]), 0, 0
checkpoint.save(path, {"n": 0, "w": torch.zeros(100_000)})
for _ in range(25):
    child = os.fork()
    if child == 0:
        save_for_ever(path, n)
    time.sleep(random.uniform(0.005, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    state = checkpoint.load(path)
    assert state["n"] >= n and torch.equal(state["w"], torch.full((100_000,), float(state["n"])))
    n, left = state["n"], left + (len(os.listdir(path.parent)) > 1)
print(n, left)
"""


@pytest.mark.slow
def test_killed_save_leaves_a_complete_file(tmp_path: Path) -> None:
    """Send SIGKILL 25 times at random moments of a loop of saves."""
    command = [sys.executable, "-c", KILLS, str(tmp_path / "a.safetensors")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    saved, left = map(int, run.stdout.split())
    assert saved > 0
    assert left > 0, "no kill hit a save, so nothing was tested"

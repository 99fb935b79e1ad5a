"""Hugging Face's hub is read through fsspec; a file system in memory takes its place here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from s3_server import write_parquet, write_tar

from compressive.data.sources import open_source
from compressive.storage import backend as backend_module
from compressive.storage.address import hide_secrets, is_remote, split_address
from compressive.storage.backend import StorageError, attempt, read_range
from compressive.storage.file_systems import FsspecBackend


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MemoryFileSystem]:
    system = MemoryFileSystem()
    monkeypatch.setattr(backend_module, "_hub", lambda: system)
    backend_module._backend.cache_clear()
    monkeypatch.setenv("COMPRESSIVE_CACHE", str(tmp_path / "cache"))
    for name in ("quick", "patient"):
        monkeypatch.setitem(backend_module.WAITS, name, (0.01,) * 2)
    yield system
    system.store.clear()
    backend_module._backend.cache_clear()


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_shards_on_the_hub_equal_local_ones(
    hub: MemoryFileSystem, tmp_path: Path, kind: str
) -> None:
    write = {"tar": write_tar, "parquet": write_parquet}[kind]
    local = write(tmp_path / f"set/train-0.{kind}", range(12))
    hub.pipe_file(f"/datasets/user/name/data/train-0.{kind}", local.read_bytes())
    one, other = open_source("hf://datasets/user/name"), open_source(tmp_path / "set")
    assert len(one) == len(other) == 12
    assert one.classes == other.classes
    for i in range(12):
        assert torch.equal(one.image(i), other.image(i))
    assert one.origin(0).startswith(f"hf://datasets/user/name/data/train-0.{kind}:")


def test_an_answer_that_is_too_short_is_requested_again(
    hub: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = write_parquet(tmp_path / "set/train-0.parquet", range(12))
    hub.pipe_file("/datasets/user/name/train-0.parquet", local.read_bytes())
    whole, calls = hub.cat_file, []

    def short_at_first(path: str, **where: int) -> bytes:
        calls.append(path)
        return whole(path, **where)[: 100 if len(calls) % 2 else None]

    monkeypatch.setattr(hub, "cat_file", short_at_first)
    source = open_source("hf://datasets/user/name")
    assert torch.equal(source.image(11), open_source(tmp_path / "set").image(11))
    assert len(calls) > 1
    backend, path = FsspecBackend(hub), "/datasets/user/name/train-0.parquet"
    monkeypatch.setattr(hub, "cat_file", lambda *_, **__: bytes(100))
    with pytest.raises(StorageError, match="100 of 1,000 bytes"):
        read_range(backend, path, 0, 1000, "s3://bucket/a", "never")


def test_a_missing_repository_is_one_line(hub: MemoryFileSystem) -> None:
    with pytest.raises(StorageError, match="hf://datasets/user/none does not exist"):
        open_source("hf://datasets/user/none")


def test_uploads_replace_and_delete_objects(hub: MemoryFileSystem, tmp_path: Path) -> None:
    backend = FsspecBackend(hub)
    (tmp_path / "a").write_bytes(b"12345")
    backend.upload(tmp_path / "a", "/x/a")
    assert backend.read("/x/a", 1, 3) == b"234"
    assert [each.size for each in backend.entries("/x")[0]] == [5]
    backend.delete("/x/a")
    assert backend.stat("/x/a") is None


def test_temporary_errors_are_retried_with_increasing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(backend_module.time, "sleep", waits.append)
    answers = iter([OSError("reset"), TimeoutError("late"), 7])

    def action() -> int:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    assert attempt(action, "s3://bucket/a") == 7
    assert len(waits) == 2
    assert waits[0] < waits[1]


def test_permanent_errors_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module.time, "sleep", pytest.fail)

    def action() -> None:
        raise OSError("AWS Error ACCESS_DENIED during GetObject operation")

    with pytest.raises(StorageError, match="AWS_ACCESS_KEY_ID"):
        attempt(action, "s3://bucket/a")


def test_messages_hide_the_values_of_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very/secret")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    assert hide_secrets("got very/secret and hf_abcdef\nmore") == (
        "got $AWS_SECRET_ACCESS_KEY and $HF_TOKEN"
    )

    def action() -> None:
        raise OSError("server said very/secret")

    with pytest.raises(StorageError) as caught:
        attempt(action, "s3://bucket/a", "never")
    assert "very/secret" not in str(caught.value)


def test_addresses() -> None:
    assert is_remote("s3://bucket/a")
    assert is_remote("S3://bucket/a")
    assert not is_remote("runs/s3")
    assert split_address("s3://bucket//a/b/") == ("s3", "bucket/a/b")
    for wrong in ("s3://", "s3://bucket/../x", "hf://datasets/user", "s3://key:secret@bucket/x"):
        with pytest.raises(ValueError, match="address"):
            split_address(wrong)

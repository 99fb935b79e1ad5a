"""Shards and runs on a fake of Google Cloud Storage equal local ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gcs_server import GCS_BUCKET, Gcs, gcs_server
from s3_server import write_parquet, write_tar

from compressive.data.sources import open_source
from compressive.storage import backend as backend_module
from compressive.storage.backend import StorageError
from compressive.storage.mirror import Mirror, check_writable


@pytest.fixture(scope="module")
def server() -> Iterator[Gcs]:
    with gcs_server() as made:
        yield made


@pytest.fixture
def gcs(server: Gcs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gcs:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
    monkeypatch.setenv("COMPRESSIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(backend_module, "_CONNECT", 0.2)
    for name in ("quick", "patient"):
        monkeypatch.setitem(backend_module.WAITS, name, (0.01,) * 2)
    backend_module._backend.cache_clear()
    server.fail_with(0)
    return server


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_shards_in_subfolders_equal_local_ones(gcs: Gcs, tmp_path: Path, kind: str) -> None:
    write = {"tar": write_tar, "parquet": write_parquet}[kind]
    for i in range(2):
        local = write(tmp_path / f"set/data/train-{i}.{kind}", range(12 * i, 12 * i + 12))
        gcs.put(f"{kind}/data/train-{i}.{kind}", local.read_bytes())
    one, other = open_source(f"gs://{GCS_BUCKET}/{kind}"), open_source(tmp_path / "set")
    assert len(one) == len(other) == 24
    assert one.classes == other.classes
    for i in (0, 11, 12, 23):
        assert torch.equal(one.image(i), other.image(i))
    assert one.origin(0).startswith(f"gs://{GCS_BUCKET}/{kind}/data/train-0.{kind}:")


def test_a_replaced_object_is_read_again(gcs: Gcs, tmp_path: Path) -> None:
    for start in (0, 12):  # the same size and time, but another etag
        local = write_tar(tmp_path / f"{start}/a.tar", range(start, start + 12))
        gcs.put("again/a.tar", local.read_bytes())
        backend_module._backend.cache_clear()
        found = open_source(f"gs://{GCS_BUCKET}/again")
        assert torch.equal(found.image(0), open_source(local).image(0))


def test_a_folder_is_mirrored_and_downloaded(gcs: Gcs, tmp_path: Path) -> None:
    folder, address = tmp_path / "run", f"gs://{GCS_BUCKET}/runs/a"
    check_writable(address)
    files = {"config.json": b"{}", "checkpoints/1": b"x" * 3_000_000, "empty": b""}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    mirror = Mirror(address, folder)
    mirror.push()
    assert {name: gcs.get(f"runs/a/{name}") for name in files} == files
    other = Mirror(address, tmp_path / "copy")
    other.pull(other.objects())
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in files} == files
    (folder / "checkpoints/1").unlink()
    mirror.push()
    assert "runs/a/checkpoints/1" not in gcs.names()
    assert "runs/a/config.json" in gcs.names()


@pytest.mark.parametrize(
    ("place", "status", "expected"),
    [
        ("gs://nowhere/a", 0, "no bucket nowhere"),
        (f"gs://{GCS_BUCKET}/none", 0, "does not exist"),
        (f"gs://{GCS_BUCKET}/a", 403, "GOOGLE_APPLICATION_CREDENTIALS"),
        (f"gs://{GCS_BUCKET}/a", 401, "GOOGLE_APPLICATION_CREDENTIALS"),
        pytest.param(f"gs://{GCS_BUCKET}/a", 503, "cannot be reached", marks=pytest.mark.slow),
    ],
)
def test_problems_are_one_line(gcs: Gcs, place: str, status: int, expected: str) -> None:
    gcs.fail_with(status)
    with pytest.raises(StorageError, match=expected) as caught:
        open_source(place)
    assert "\n" not in str(caught.value)

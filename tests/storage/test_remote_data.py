"""Shards on a real S3 server give the same images, runs and results as local ones."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from s3_server import (
    BUCKET,
    KEY,
    S3,
    SECRET,
    call,
    environment,
    put_folder,
    running_server,
    use_server,
    write_parquet,
    write_tar,
)
from tiny import CHANGES, differences, journal, last, silent, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import override
from compressive.data.fingerprint import DatasetFingerprint, file_states
from compressive.data.source import Source
from compressive.data.sources import open_source
from compressive.storage import backend as backend_module
from compressive.storage.backend import StorageError
from compressive.train.loop import pretrain

DATA = f"s3://{BUCKET}/shards"


server = pytest.fixture(scope="module")(running_server)


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    use_server(server, monkeypatch, tmp_path / "cache")
    server.fault, server.every = "", 1
    server.requests.clear()
    for name in ("quick", "patient"):
        monkeypatch.setitem(backend_module.WAITS, name, (0.01,) * 3)
    return server


def shards(kind: str, folder: Path) -> Path:
    """Write two train shards and a test shard."""
    write = {"tar": write_tar, "parquet": write_parquet}[kind]
    parts = {"train-00000": range(20), "train-00001": range(20, 40), "test-00000": range(40, 60)}
    for name, seeds in parts.items():
        write(folder / f"{name}.{kind}", seeds)
    return folder


def assert_equal(one: Source, other: Source) -> None:
    assert len(one) == len(other)
    assert one.classes == other.classes
    assert one.labels is not None
    assert other.labels is not None
    assert torch.equal(one.labels, other.labels)
    for i in range(len(one)):
        assert torch.equal(one.image(i), other.image(i))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_remote_shards_equal_local_ones(s3: S3, tmp_path: Path, kind: str, split: str) -> None:
    folder = shards(kind, tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/{kind}")
    remote = open_source(f"s3://{BUCKET}/{kind}", split)
    local = open_source(folder, split)
    assert_equal(remote, local)
    assert DatasetFingerprint(remote).of() == DatasetFingerprint(local).of()
    assert remote.origin(3).startswith(f"s3://{BUCKET}/{kind}/{split}-00000.{kind}:")
    name = f"s3://{BUCKET}/{kind}/{split}-00000.{kind}"
    assert_equal(open_source(name), open_source(folder / f"{split}-00000.{kind}"))
    sizes = {Path(path).name: size for path, (size, _) in file_states(remote).items()}
    assert sizes == {Path(path).name: size for path, (size, _) in file_states(local).items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_run_on_remote_shards_resumes_bitwise_equal_to_a_local_run(
    s3: S3, tmp_path: Path, kind: str
) -> None:
    folder = shards(kind, tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/run-{kind}")
    changes = ("train.steps=6", "data.cache_on_device=no")
    local = override(tiny(*changes), f"data.source={folder}")
    remote = override(local, f"data.source=s3://{BUCKET}/run-{kind}")
    pretrain(local, tmp_path / "local", display=silent())
    # A process that dies after three steps, then an empty cache.
    code = (
        "import os, sys; from tiny import silent; from compressive.train import loop\n"
        "from compressive.rundir.folder import read_config; step = loop.train_step\n"
        "def limited(run, batches):\n"
        "    if run.step == 3: run.save(); os._exit(9)\n"
        "    return step(run, batches)\n"
        "loop.train_step = limited; from compressive.config import from_dict; import json\n"
        "loop.pretrain(from_dict(json.loads(sys.argv[1])), sys.argv[2], display=silent())\n"
    )
    words = [sys.executable, "-c", code, json.dumps(asdict(remote)), str(tmp_path / "remote")]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    env = {**os.environ, **environment(s3, tmp_path / "other"), "PYTHONPATH": paths}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stderr
    assert last(tmp_path / "remote")["step"] == 3
    outcome = pretrain(remote, tmp_path / "remote", display=silent())
    assert outcome.step == 6
    one, other = last(tmp_path / "local"), last(tmp_path / "remote")
    for state in (one, other):
        state.pop("image_files")  # holds the times of the files
    assert differences(one, other) == []
    assert journal(tmp_path / "local") == journal(tmp_path / "remote")


def test_a_local_run_resumes_on_the_same_shards_in_a_bucket(s3: S3, tmp_path: Path) -> None:
    folder = shards("tar", tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/moved")
    config = override(tiny("train.steps=2"), f"data.source={folder}")
    pretrain(config, tmp_path / "run", display=silent())
    same = override(config, f"data.source=s3://{BUCKET}/moved")
    assert pretrain(same, tmp_path / "run", display=silent()).step == 2


def test_changed_shards_are_detected_when_a_run_is_resumed(s3: S3, tmp_path: Path) -> None:
    folder = shards("tar", tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/changed")
    place = f"s3://{BUCKET}/changed"
    before = DatasetFingerprint(open_source(place)).with_file_times()
    assert DatasetFingerprint(open_source(place)).with_file_times() == before
    config = override(tiny("train.steps=2"), f"data.source={place}")
    pretrain(config, tmp_path / "run", display=silent())
    write_tar(folder / "train-00001.tar", range(60, 80))
    put_folder(s3, folder, f"{BUCKET}/changed")
    assert DatasetFingerprint(open_source(place)).with_file_times() != before
    with pytest.raises(ValueError, match=r"train-00001\.tar"):
        pretrain(config, tmp_path / "run", display=silent())


def test_the_fingerprint_for_caches_changes_with_the_version_of_an_object(
    s3: S3, tmp_path: Path
) -> None:
    data = bytearray(write_tar(tmp_path / "train-0.tar", range(5)).read_bytes())
    prints = []
    for last_byte in (0, 1):  # after the end of the archive: equal size and equal images
        data[-1] = last_byte
        call(s3, "PUT", f"/{BUCKET}/version/train-0.tar", bytes(data))
        source = open_source(f"s3://{BUCKET}/version")
        found = DatasetFingerprint(source)
        prints.append((found.of(), found.with_file_times()))
    assert prints[0][0] == prints[1][0]
    assert prints[0][1] != prints[1][1]


@pytest.mark.slow
def test_evaluation_of_remote_shards_equals_that_of_local_ones(s3: S3, tmp_path: Path) -> None:
    folder = shards("parquet", tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/evaluated")
    config = override(tiny(), f"data.source={folder}")
    pretrain(config, tmp_path / "run", display=silent())
    found = []
    for name, place in {"a": str(folder), "b": f"s3://{BUCKET}/evaluated"}.items():
        words = ["evaluate", str(tmp_path / "run"), "--data", place, "--tasks", "knn"]
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / name), "--device", "cpu"])
        assert done.exit_code == 0, done.output
        records = json.loads((tmp_path / name / "results.json").read_text())["records"]
        found.append([(record["metric"], record["value"]) for record in records])
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.slow
def test_features_of_remote_images_equal_those_of_local_ones(s3: S3, tmp_path: Path) -> None:
    folder = shards("tar", tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/embedded")
    pretrain(override(tiny(), f"data.source={folder}"), tmp_path / "run", display=silent())
    found = []
    for name, place in {"a": str(folder), "b": f"s3://{BUCKET}/embedded"}.items():
        out = tmp_path / f"{name}.npz"
        words = ["embed", str(tmp_path / "run"), place, "--out", str(out), "--device", "cpu"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        with np.load(out) as file:
            found.append(dict(file))
    assert np.array_equal(found[0]["features"], found[1]["features"])
    assert str(found[1]["image"][0]).startswith(f"s3://{BUCKET}/embedded/train-00000.tar:")


@pytest.mark.parametrize("fault", ["500", "cut"])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_failed_and_cut_requests_are_retried(s3: S3, tmp_path: Path, kind: str, fault: str) -> None:
    folder = shards(kind, tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/faults-{kind}")
    s3.fault, s3.every = fault, 3
    assert_equal(open_source(f"s3://{BUCKET}/faults-{kind}"), open_source(folder))


@pytest.mark.parametrize("fault", ["500", "cut", "403"])
def test_an_outage_is_not_mistaken_for_damaged_images(s3: S3, tmp_path: Path, fault: str) -> None:
    folder = shards("parquet", tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/outage")
    source = open_source(f"s3://{BUCKET}/outage")
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.unlink()
    s3.fault, s3.every = fault, 1
    with pytest.raises(StorageError, match=r"outage/train-00000\.parquet"):
        source.image(0)


def test_each_byte_is_fetched_once_and_the_index_of_a_tar_is_kept(s3: S3, tmp_path: Path) -> None:
    folder = shards("tar", tmp_path / "shards")
    put_folder(s3, folder, f"{BUCKET}/once")
    size = sum(path.stat().st_size for path in folder.glob("train-*.tar"))
    source = open_source(f"s3://{BUCKET}/once")
    for _ in range(2):
        for i in range(len(source)):
            source.image(i)
    objects = [each for each in s3.requests if each[0] == "GET" and ".tar" in each[1]]
    assert sum(each[2] for each in objects) == size
    s3.requests.clear()
    open_source(f"s3://{BUCKET}/once")
    assert not [each for each in s3.requests if each[0] == "GET" and ".tar" in each[1]]


# --- bad input ------------------------------------------------------------------------------------


def one_line(*words: str) -> str:
    """Run a command that fails before torch would be needed; return its only line."""
    began = time.monotonic()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert time.monotonic() - began < 10
    (line,) = done.output.strip().splitlines()
    assert line.startswith("error: ")
    assert SECRET not in line
    assert KEY not in line
    return line


def test_a_missing_bucket_is_one_line(s3: S3) -> None:
    assert "no bucket nowhere" in one_line("pretrain", "s3://nowhere/shards")


def test_wrong_credentials_are_one_line(s3: S3) -> None:
    s3.fault = "403"
    line = one_line("pretrain", DATA)
    assert "credentials" in line
    assert "AWS_ACCESS_KEY_ID" in line


def test_a_failing_server_is_one_line(s3: S3) -> None:
    s3.fault = "500"
    assert s3.endpoint in one_line("pretrain", DATA)


def test_an_unreachable_endpoint_is_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    line = one_line("evaluate", "resnet18", "--data", DATA)
    assert "cannot be reached" in line
    assert "127.0.0.1:9" in line


def test_a_prefix_without_shards_is_one_line(s3: S3) -> None:
    place = f"s3://{BUCKET}/text"
    call(s3, "PUT", f"/{BUCKET}/text/notes.txt", b"x")
    assert f"no shards under {place}: it has notes.txt" in one_line("pretrain", place)
    assert "nothing does not exist" in one_line("pretrain", f"s3://{BUCKET}/nothing")


@pytest.mark.parametrize(
    "place", [f"s3://{KEY}:{SECRET}@b/x", f"s3://b/x?secret_key={SECRET}", "s3://", "hf://datasets"]
)
def test_malformed_addresses_are_one_line_without_secrets(place: str) -> None:
    assert "use s3://BUCKET" in (line := one_line("pretrain", place)) or "use hf://" in line


@pytest.mark.parametrize("size", ["5", "x", "-1GB", "1 EB"])
def test_invalid_cache_sizes_are_one_line(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    put_folder(s3, shards("tar", tmp_path / "shards"), f"{BUCKET}/size")
    monkeypatch.setenv("COMPRESSIVE_CACHE_SIZE", size)
    words = [word for change in CHANGES for word in ("--set", change)]
    line = one_line("pretrain", f"s3://{BUCKET}/size", *words, "--out", str(tmp_path / "run"))
    assert "COMPRESSIVE_CACHE_SIZE" in line


def test_credentials_are_in_no_file_and_no_output(s3: S3, tmp_path: Path) -> None:
    put_folder(s3, shards("tar", tmp_path / "shards"), f"{BUCKET}/secrets")
    words = [word for change in CHANGES for word in ("--set", change)]
    run = ["pretrain", f"s3://{BUCKET}/secrets", *words, "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    s3.fault = "500"
    failed = CliRunner().invoke(app, run)
    assert failed.exit_code == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = [done.output.encode(), failed.output.encode(), *(path.read_bytes() for path in files)]
    assert len(files) > 10
    for secret in (KEY.encode(), SECRET.encode()):
        assert not [text for text in texts if secret in text]

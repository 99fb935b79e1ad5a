"""A run folder on object storage is complete after each save, and resumes on another machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from s3_server import BUCKET, S3, call, environment, running_server, use_server
from tiny import CHANGES, differences, journal, last, silent, sorted_photos
from typer.testing import CliRunner

import compressive
from compressive.cli.app import app
from compressive.storage import backend as backend_module
from compressive.storage import mirror as mirror_module
from compressive.storage.backend import StorageError
from compressive.storage.mirror import Mirror
from compressive.train import loop
from compressive.train.outcome import Outcome
from compressive.train.remote_out import local_copy

server = pytest.fixture(scope="module")(running_server)


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    use_server(server, monkeypatch, tmp_path / "machine-1")
    server.fault, server.every = "", 1
    for name in ("quick", "patient"):
        monkeypatch.setitem(backend_module.WAITS, name, (0.01,) * 3)
    return server


def stored(s3: S3, prefix: str) -> dict[str, bytes]:
    """Return the objects below a prefix, read with another client."""
    listing = call(s3, "GET", f"/{BUCKET}?list-type=2&prefix={prefix}/").decode()
    keys = [key for key in re.findall("<Key>(.*?)</Key>", listing) if not key.endswith("/")]
    return {key.removeprefix(f"{prefix}/"): call(s3, "GET", f"/{BUCKET}/{key}") for key in keys}


def local_files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def train(out: str, steps: int = 6) -> Outcome:
    changes = (*CHANGES, f"train.steps={steps}")
    return compressive.pretrain(sorted_photos(), out, settings=changes, display=silent())


def test_the_folder_on_storage_equals_the_local_one(s3: S3) -> None:
    out = f"s3://{BUCKET}/runs/equal"
    outcome = train(out)
    assert outcome.folder == local_copy(out)
    found = stored(s3, "runs/equal")
    assert found == local_files(outcome.folder)
    assert {"config.json", "metrics.jsonl", "encoder.safetensors"} < found.keys()
    assert "checkpoints/step_00000006.safetensors" in found


def test_metrics_are_uploaded_before_the_checkpoint_that_continues_them(s3: S3) -> None:
    """Otherwise a machine that is lost between both would lose lines that are never repeated."""
    s3.requests.clear()
    train(f"s3://{BUCKET}/runs/ordered")
    names = [path.partition("?")[0] for method, path, _ in s3.requests if method == "PUT"]
    parts = [name.partition("/runs/ordered/")[2].partition("/")[0] for name in names]
    written = [name for name in dict.fromkeys(parts) if name]
    assert written[:3] == ["config.json", "metrics.jsonl", "checkpoints"]


@pytest.mark.slow
def test_an_interrupted_run_resumes_on_another_machine_bitwise_equal(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://{BUCKET}/runs/moved"
    step = loop.train_step

    def interrupted(run: loop.Run, batches: object) -> object:
        if run.step == 3:
            run.save()
            raise KeyboardInterrupt
        return step(run, batches)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(out)
    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setenv("COMPRESSIVE_CACHE", str(tmp_path / "machine-2"))
    outcome = train(out)
    assert outcome.folder.is_relative_to(tmp_path / "machine-2")
    train(str(tmp_path / "local"))
    assert differences(last(outcome.folder), last(tmp_path / "local")) == []
    assert journal(outcome.folder) == journal(tmp_path / "local")
    assert stored(s3, "runs/moved") == local_files(outcome.folder)


@pytest.mark.slow
def test_a_killed_run_is_on_storage_up_to_its_last_save(s3: S3, tmp_path: Path) -> None:
    out = f"s3://{BUCKET}/runs/killed"
    code = (
        "import sys, time; from compressive.storage import mirror; mirror._PUSH_EVERY = 0.1\n"
        "from compressive.train import loop; step = loop.train_step\n"
        "def slowly(run, batches):\n"
        "    if run.step == 3: run.save(); print('saved', flush=True); time.sleep(60)\n"
        "    return step(run, batches)\n"
        "loop.train_step = slowly; import test_remote_out; test_remote_out.train(sys.argv[1])\n"
    )
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path])
    env = {**os.environ, **environment(s3, tmp_path / "machine-1"), "PYTHONPATH": paths}
    words = [sys.executable, "-c", code, out]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "saved" in process.stdout.readline()
        deadline = time.monotonic() + 20
        while "checkpoints/step_00000003.safetensors" not in stored(s3, "runs/killed"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    os.environ["COMPRESSIVE_CACHE"] = str(tmp_path / "machine-2")  # restored by `use_server`
    assert train(out).step == 6
    train(str(tmp_path / "local"))
    assert differences(last(local_copy(out)), last(tmp_path / "local")) == []


@pytest.mark.slow
def test_a_failed_last_upload_is_one_line_and_the_same_command_completes_it(
    s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://{BUCKET}/runs/outage"
    finish = loop.finish

    def then_fail(run: loop.Run) -> Outcome:
        s3.fault = "500"
        return finish(run)

    monkeypatch.setattr(loop, "finish", then_fail)
    with pytest.raises(StorageError, match="run the same command") as error:
        train(out)
    assert f"all files are in {local_copy(out)}" in str(error.value)
    assert str(error.value).count("run the same command") == 1
    assert (local_copy(out) / "checkpoints/step_00000006.safetensors").exists()
    s3.fault = ""
    monkeypatch.setattr(loop, "finish", finish)
    assert train(out).step == 6
    assert stored(s3, "runs/outage") == local_files(local_copy(out))


@pytest.mark.slow
def test_the_later_of_two_states_wins(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://{BUCKET}/runs/later"
    train(out)
    pending = local_copy(out).with_name(f"{local_copy(out).name}.pending")
    # This machine has an older state that was not uploaded.
    (local_copy(out) / "checkpoints/step_00000006.safetensors").unlink()
    pending.touch()
    train(out)
    assert (local_copy(out) / "checkpoints/step_00000006.safetensors").exists()
    assert not pending.exists()


def test_failed_uploads_are_retried(s3: S3, tmp_path: Path) -> None:
    for name, size in {"config.json": 10, "checkpoints/a": 9 * 2**20, "x": 0}.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(os.urandom(size))
    s3.fault, s3.every = "500", 9
    mirror = Mirror(f"s3://{BUCKET}/faults", tmp_path / "run", first=("config.json",))
    mirror.push()
    s3.fault = ""
    assert stored(s3, "faults") == local_files(tmp_path / "run")
    (tmp_path / "run/x").unlink()
    mirror.push()
    assert stored(s3, "faults") == local_files(tmp_path / "run")
    other = Mirror(f"s3://{BUCKET}/faults", tmp_path / "copy")
    other.pull(other.objects())
    assert local_files(tmp_path / "copy") == local_files(tmp_path / "run")


def test_files_are_uploaded_before_others_are_deleted(s3: S3, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/1").write_bytes(b"1")
    (folder / "config.json").write_bytes(b"{}")
    mirror = Mirror(f"s3://{BUCKET}/order", folder, first=("config.json", "checkpoints"))
    mirror.push()
    (folder / "checkpoints/1").unlink()
    (folder / "checkpoints/2").write_bytes(b"2")
    (folder / "a").write_bytes(b"a")
    s3.requests.clear()
    mirror.push()
    names = [(m, p.partition("?")[0].rpartition("/")[2]) for m, p, _ in s3.requests]
    changes = [each for each in names if each[0] in ("PUT", "DELETE") and each[1]]
    assert changes == [("PUT", "2"), ("PUT", "a"), ("DELETE", "1")]


def test_parts_are_uploaded_before_the_checkpoint_that_names_them(s3: S3, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = "checkpoints/step_00000007"
    names = [f"{first}.1794976763967.shards/{k}" for k in (1, 2)] + [f"{first}.safetensors"]
    for name in reversed(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    s3.requests.clear()
    Mirror(f"s3://{BUCKET}/sharded", folder, first=("checkpoints",)).push()
    paths = [path.partition("?")[0] for method, path, _ in s3.requests if method == "PUT"]
    assert [path.partition("/sharded/")[2] for path in paths if "step" in path] == names


def test_a_mirror_that_falls_behind_warns_once_and_catches_up(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "_PUSH_EVERY", 0.01)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a").write_bytes(b"a")
    mirror = Mirror(f"s3://{BUCKET}/behind", tmp_path / "run")
    s3.fault = "500"
    said: list[str] = []
    mirror.start(said.append)
    deadline = time.monotonic() + 20
    while not said:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)  # several more uploads fail
    s3.fault = ""
    deadline = time.monotonic() + 5
    while stored(s3, "behind") != {"a": b"a"}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    mirror.stop()
    (line,) = said
    assert "tries again: s3://" in line
    assert "same command" not in line  # it still runs


@pytest.mark.parametrize(
    ("out", "fault", "expected"),
    [
        ("s3://nowhere/run", "", "no bucket nowhere"),
        (f"s3://{BUCKET}/run", "403", "AWS_ACCESS_KEY_ID"),
        (f"s3://{BUCKET}/run", "500", "fails to write"),
        ("s3://", "", "s3://BUCKET/FOLDER"),
        ("ftp://host/run", "", "URL"),
    ],
)
def test_wrong_addresses_are_one_line_before_training(
    s3: S3, out: str, fault: str, expected: str
) -> None:
    s3.fault = fault
    began = time.monotonic()
    done = CliRunner().invoke(app, ["pretrain", str(sorted_photos()), "--out", out])
    assert done.exit_code == 2, done.output
    (line,) = done.output.strip().splitlines()
    assert expected in line
    assert time.monotonic() - began < 10


def test_the_command_says_where_the_run_is(s3: S3) -> None:
    out = f"s3://{BUCKET}/runs/command"
    words = [word for change in CHANGES for word in ("--set", change)]
    done = CliRunner().invoke(app, ["pretrain", str(sorted_photos()), *words, "--out", out])
    assert done.exit_code == 0, done.output
    assert f"on storage: {out}" in done.output
    assert json.loads(stored(s3, "runs/command")["config.json"])["about"]["run_id"]


def mirror_of_one_file(place: Path, prefix: str) -> tuple[Path, Mirror]:
    folder = place / "run"
    folder.mkdir()
    (folder / "1").write_bytes(b"1")
    return folder, Mirror(f"s3://{BUCKET}/{prefix}", folder)


def test_a_checkpoint_on_storage_stays_until_another_one_is_complete(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads are slower than saves: the file of an upload is deleted before it starts."""
    folder, mirror = mirror_of_one_file(tmp_path, "slow")
    mirror.push()
    (folder / "1").rename(folder / "2")
    upload = mirror._upload

    def late(local: Path, name: str) -> None:
        (folder / "2").rename(folder / "3")
        upload(local, name)

    monkeypatch.setattr(mirror, "_upload", late)
    mirror.push()
    assert stored(s3, "slow") == {"1": b"1"}
    monkeypatch.setattr(mirror, "_upload", upload)
    mirror.push()
    assert stored(s3, "slow") == {"3": b"1"}


def test_a_file_that_is_deleted_during_its_push_is_deleted_in_the_next(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object that replaces it is not on storage yet."""
    folder, mirror = mirror_of_one_file(tmp_path, "replaced")
    upload = mirror._upload

    def then_save(local: Path, name: str) -> None:
        upload(local, name)
        (folder / "1").unlink()
        (folder / "2").write_bytes(b"2")

    monkeypatch.setattr(mirror, "_upload", then_save)
    mirror.push()
    assert stored(s3, "replaced") == {"1": b"1"}
    monkeypatch.setattr(mirror, "_upload", upload)
    mirror.push()
    assert stored(s3, "replaced") == {"2": b"2"}


@pytest.mark.slow
def test_a_failed_upload_does_not_replace_an_object_by_its_first_parts(
    s3: S3, tmp_path: Path
) -> None:
    """The second part of three is refused."""
    path, key = tmp_path / "file", f"/{BUCKET}/parts/file"
    call(s3, "PUT", key, b"old")
    path.write_bytes(os.urandom(25 * 2**20))
    code = (
        "import sys; from pathlib import Path; from compressive.storage.backend import backend_for"
        "\ntry: backend_for('s3:/' + sys.argv[2]).upload(Path(sys.argv[1]), sys.argv[2][1:])\n"
        "except OSError as error: print(error)\n"
    )
    words = [sys.executable, "-c", code, str(path), key]
    # In another process: pyarrow would wait here while it keeps this server from answering.
    s3.fault, s3.every, s3._count = "500", 3, 0  # the first two requests start it and send a part
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "UploadPart" in done.stdout
    assert not done.stderr
    s3.fault = ""
    assert stored(s3, "parts") == {"file": b"old"}
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    assert stored(s3, "parts") == {"file": path.read_bytes()}

"""Commands on a real Ray cluster write what the local engine writes, also if processes die."""

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from command_line import run as run_line
from ray_cluster_process import (
    GPUS,
    RayCluster,
    TracedUnit,
    free_port,
    killing,
    processes_called,
    refused,
    running_cluster,
    traced,
    wait_until,
)
from s3_server import BUCKET, S3, environment, running_server, use_server
from tiny import CHANGES, noise, photos, silent, sorted_photos, tiny

import compressive
from compressive.cli.app import app
from compressive.engine.choice import parse_engine
from compressive.engine.opening import open_engine
from compressive.evaluation.results import read
from compressive.evaluation.suite import evaluate
from compressive.rundir.files import EVALUATION
from compressive.storage.mirror import Mirror
from compressive.sweep.runner import sweep
from compressive.train.loop import pretrain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: extra [ray]"),
    pytest.mark.usefixtures("one_thread", "token"),
]
server = pytest.fixture(scope="module")(running_server)


@pytest.fixture(scope="module")
def token() -> Iterator[None]:
    """Give clusters and commands of this module a token of their own."""
    # Otherwise Ray would use or create one in the home folder. Ray reads it when it is imported.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
        yield


@pytest.fixture(scope="module")
def cluster(
    token: None, server: S3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayCluster]:
    values = environment(server, tmp_path_factory.mktemp("cache"))
    with running_cluster(values) as found:
        yield found


@pytest.fixture
def ray(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RayCluster:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.chdir(tmp_path)
    return cluster


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    pretrain(tiny("train.steps=2"), out, display=silent())
    return out


def run(*words: object, code: int = 0) -> str:
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("keeps_model", [False, True])
def test_only_the_unit_of_a_killed_process_is_repeated(
    ray: RayCluster, tmp_path: Path, keeps_model: bool
) -> None:
    units = [TracedUnit(k, str(tmp_path), waits=k == 2) for k in range(6)]
    choice = parse_engine("ray", 0.5 if keeps_model else None)

    def kill() -> None:
        wait_until((tmp_path / "2-0").exists, "unit 2 did not start")
        time.sleep(0.1)
        os.kill(int((tmp_path / "2-0").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with open_engine(choice) as engine:
        found = dict(engine.map(traced, units, name="traced", keeps_model=keeps_model))
    thread.join()
    assert found == {k: k**2 for k in range(6)}
    executed = sorted(path.name for path in tmp_path.iterdir())
    assert executed == ["0-0", "1-0", "2-0", "2-1", "3-0", "4-0", "5-0"]


def test_few_units_are_sent_ahead_and_fractions_share_a_gpu(
    ray: RayCluster, tmp_path: Path
) -> None:
    taken = []

    def units() -> Iterator[TracedUnit]:
        for k in count():
            taken.append(k)
            yield TracedUnit(k, str(tmp_path))

    with open_engine(parse_engine("ray")) as engine:
        results = engine.map(traced, units(), name="traced")
        for _ in range(5):
            next(results)
        assert len(taken) <= 5 + 2 * engine.room()
        assert engine.room() == 2
    with open_engine(parse_engine("ray", 1.0), "cuda") as engine:
        assert engine.room() == GPUS
    with open_engine(parse_engine("ray", 0.25), "cuda") as engine:
        assert engine.room() == 2  # each also needs a core


def test_an_error_of_a_unit_and_a_task_that_fits_nowhere_are_one_line(ray: RayCluster) -> None:
    with open_engine(parse_engine("ray")) as engine, pytest.raises(ValueError, match="unit 7 is"):
        list(engine.map(refused, [7], name="refused"))
    with pytest.raises(ValueError, match="3 cores"), open_engine(parse_engine("ray", None, 3)):
        pass


@pytest.mark.stress
def test_packing_on_storage_survives_a_kill(
    ray: RayCluster, server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(server, monkeypatch, tmp_path / "cache")
    photos(tmp_path / "data", 30)
    (tmp_path / "data" / "copy.png").write_bytes(next((tmp_path / "data").iterdir()).read_bytes())
    source, out = f"s3://{BUCKET}/input", f"s3://{BUCKET}/shards"
    run("pack", "data", "--out", source)
    (tmp_path / "data" / "bad.png").write_bytes(b"\x89PNG")
    options = ("pack", source, "data", "--images-per-shard", 4, "--drop-duplicates", "--out")
    run(*options, "local")
    with killing("ray::pack") as killed:
        said = run(*options, out, "--engine", "ray")
    assert killed
    assert "packing  100%" in said
    mirror = Mirror(out, tmp_path)
    found = {name: mirror.read(stored) for name, stored in mirror.objects().items()}
    expected = files(tmp_path / "local")
    assert found == expected
    assert len(expected) > 10
    assert "bad.png" in expected["unreadable.txt"].decode()


@pytest.mark.stress
def test_features_of_shards_on_storage_are_uploaded(
    ray: RayCluster, server: S3, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of the cluster read the shards; the command uploads the file."""
    use_server(server, monkeypatch, tmp_path / "cache")
    photos(tmp_path / "data", 20)
    shards, out = f"s3://{BUCKET}/to-embed", f"s3://{BUCKET}/features"
    run("pack", "data", "--images-per-shard", 6, "--out", shards)
    options = ("embed", trained, shards, "--device", "cpu", "--out")
    run(*options, "local.npz")
    said = run(*options, f"{out}/ray.npz", "--engine", "ray")
    assert "embedding  100%" in said
    mirror = Mirror(out, tmp_path)
    found = {name: mirror.read(stored) for name, stored in mirror.objects().items()}
    assert found == {"ray.npz": Path("local.npz").read_bytes()}


@pytest.mark.stress
def test_features_over_a_client_survive_a_kill(
    ray: RayCluster, trained: Path, tmp_path: Path
) -> None:
    for i in range(1100):  # three batches
        (tmp_path / "set" / f"class{i // 600}").mkdir(parents=True, exist_ok=True)
        path = tmp_path / "set" / f"class{i // 600}" / f"{i:04d}.png"
        noise(16, 12 + i % 5, seed=i).save(path, compress_level=0)
        if i in (511, 512, 1099):  # the replacement of an unreadable image is in the next batch
            path.write_bytes(b"\x89PNG")
    options = ("embed", trained, "set", "--device", "cpu", "--out")
    local = run(*options, "local.npz")
    with killing("ray::embed") as killed:
        said = run(*options, "ray.npz", "--engine", ray.client)
    assert killed
    skipped = [[line for line in text.splitlines() if "skipped" in line] for text in (local, said)]
    assert skipped[0] == skipped[1]
    assert len(skipped[0]) == 3
    assert Path("ray.npz").read_bytes() == Path("local.npz").read_bytes()
    # Processes that keep a fraction of a GPU compute the same.
    run(*options, "actors.npz", "--engine", "ray", "--gpus-per-task", 0.5, "--cpus-per-task", 1)
    assert Path("actors.npz").read_bytes() == Path("local.npz").read_bytes()
    with np.load("ray.npz") as arrays:
        assert len(arrays["features"]) == 1097


def test_several_encoders_have_the_numbers_of_the_local_engine(
    ray: RayCluster, trained: Path, tmp_path: Path
) -> None:
    names = [trained, "cifar10-byol-r18"]
    options = ("--data", sorted_photos(), "--tasks", "knn,logistic", "--device", "cpu", "--out")
    run("evaluate", *names, *options, "local")
    with killing("ray::evaluate") as killed:
        run("evaluate", *names, *options, "ray", "--engine", "ray")
    assert killed
    for name in ("a", "cifar10-byol-r18"):
        one, other = read(Path("local", name)), read(Path("ray", name))
        assert one.records
        assert one.records == other.records
        for key, values in one.values.items():
            np.testing.assert_array_equal(values, other.values[key])
        assert one.about["weights"] == other.about["weights"]


@pytest.mark.stress
def test_a_sweep_repeats_the_training_of_a_killed_process(ray: RayCluster, tmp_path: Path) -> None:
    changes = [change for change in CHANGES if not change.startswith("train.steps")]
    options = {"seeds": "3", "changes": [*changes, "train.steps=4"], "tasks": "knn"}
    log = tmp_path / "sweep" / "logs" / "seed3.log"

    def has_started() -> bool:
        return log.exists() and b"pretrain" in log.read_bytes() and bool(children())

    def children() -> list[int]:
        parents = processes_called("ray::sweep")
        tasks = [Path(f"/proc/{pid}/task/{pid}/children") for pid in parents]
        return [int(pid) for task in tasks if task.exists() for pid in task.read_text().split()]

    with open_engine(parse_engine("ray")) as engine, killing("ray::sweep", has_started) as killed:
        data = str(sorted_photos())
        result = sweep(data, tmp_path / "sweep", **options, engine=engine, display=silent())
    assert killed
    assert not result.failed
    lines = [line for line in log.read_text().splitlines() if line.startswith("$ ")]
    assert [line.split(" compressive ")[1].split()[0] for line in lines] == [
        "pretrain",
        "pretrain",
        "evaluate",
    ]
    settings = [*options["changes"], "seed=3"]
    compressive.pretrain(sorted_photos(), tmp_path / "alone", settings=settings, display=silent())
    alone, _ = evaluate(tmp_path / "alone", tasks="knn", device="cpu", display=silent())
    found = read(tmp_path / "sweep" / "seed3" / EVALUATION)
    assert found.about["weights"] == alone.about["weights"]
    assert [r.value for r in found.records] == [r.value for r in alone.records]


@pytest.mark.stress
def test_ctrl_c_stops_a_cluster_that_was_started_for_the_command(tmp_path: Path) -> None:
    photos(tmp_path / "data", 200, side=100)
    words = [sys.executable, "-m", "compressive", "pack", "data", "--out", "out", "--size", "64"]
    words += ["--images-per-shard", "4", "--engine", "ray"]
    values = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(words, cwd=tmp_path, env=values, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: list(tmp_path.glob("out/*.tar")), "no shard was written")
        started = children_of(process.pid)
        assert started
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert said.count("\n") == 1
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), "Ray still runs")
    assert len(list(tmp_path.glob("out/*.tar"))) < 50


def children_of(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for each in map(int, found) for pid in (each, *children_of(each))]


def test_an_address_without_a_cluster_is_one_line_within_seconds(tmp_path: Path) -> None:
    photos(tmp_path / "data", 2)
    began = time.monotonic()
    line = f"pack {tmp_path}/data --out {tmp_path}/out --engine ray://127.0.0.1:{free_port()}"
    done = run_line(line)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - began < 15

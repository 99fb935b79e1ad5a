"""Output of pack, embed, inspect and evaluate on object storage equals local output."""

import json
from pathlib import Path
from typing import Any

import pytest
from exportable import encoder_file
from s3_server import BUCKET, S3, running_server, use_server
from test_remote_out import local_files, stored
from tiny import sorted_photos
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.data import pack as pack_module
from compressive.data.sources import open_source
from compressive.rundir import stored_output
from compressive.rundir.stored_output import local_copy
from compressive.storage import backend as backend_module

ENCODER = "cifar10-byol-r18"
server = pytest.fixture(scope="module")(running_server)


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> S3:
    use_server(server, monkeypatch, tmp_path / "machine-1")
    monkeypatch.chdir(tmp_path)
    server.fault, server.every = "", 1
    for name in ("quick", "patient"):
        monkeypatch.setitem(backend_module.WAITS, name, (0.01,) * 3)
    return server


def run(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def test_packed_shards_on_storage_equal_local_ones(s3: S3, tmp_path: Path) -> None:
    options = (sorted_photos(), "--images-per-shard", 4, "--out")
    said = run("pack", *options, f"s3://{BUCKET}/shards")
    assert f"on storage: s3://{BUCKET}/shards" in said
    run("pack", *options, tmp_path / "local")
    found = stored(s3, "shards")
    assert {name for name in found if name.endswith(".tar")}
    assert found == {k: v for k, v in local_files(tmp_path / "local").items() if k != ".lock"}
    assert len(open_source(f"s3://{BUCKET}/shards")) == len(open_source(tmp_path / "local"))


def test_packing_resumes_on_another_machine(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://{BUCKET}/resumed"
    options = ("pack", sorted_photos(), "--images-per-shard", 4, "--out", out)
    fill, calls = pack_module.fill_shard, []

    def killed(*given: Any, **options: Any) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fill(*given, **options)

    monkeypatch.setattr(pack_module, "fill_shard", killed)
    run(*options, code=130)
    assert [name for name in stored(s3, "resumed") if name.endswith(".tar")]
    monkeypatch.setenv("COMPRESSIVE_CACHE", str(tmp_path / "machine-2"))
    calls[:] = [1, 1]
    run(*options)
    shards = [name for name in stored(s3, "resumed") if name.endswith(".tar")]
    assert len(calls) - 2 == len(shards) - 1  # the finished one is not written again
    assert not [name for name in stored(s3, "resumed") if name.startswith(".pack")]


@pytest.mark.slow
def test_features_on_storage_equal_local_ones(s3: S3, tmp_path: Path) -> None:
    options = ("embed", encoder_file(tmp_path / "encoder", size=32), sorted_photos(), "--out")
    run(*options, tmp_path / "a.npz")
    said = run(*options, f"s3://{BUCKET}/features/a.npz")
    assert f"features: s3://{BUCKET}/features/a.npz" in said
    assert stored(s3, "features") == {"a.npz": (tmp_path / "a.npz").read_bytes()}
    assert not [path for path in (tmp_path / "machine-1").rglob("a.npz")]


def test_page_and_table_on_storage_equal_local_ones(s3: S3, tmp_path: Path) -> None:
    options = ("inspect", sorted_photos(), "--encoder", "none")
    run(*options, "--out", "a.html", "--table", "a.csv")
    place = f"s3://{BUCKET}/pages"
    run(*options, "--out", f"{place}/a.html", "--table", f"{place}/a.csv")
    expected = {name: (tmp_path / name).read_bytes() for name in ("a.html", "a.csv")}
    assert stored(s3, "pages") == expected


@pytest.mark.slow
def test_results_on_storage_are_extended_on_another_machine(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://{BUCKET}/results"
    encoder = encoder_file(tmp_path / "encoder", size=32)
    options = ("evaluate", encoder, "--data", sorted_photos(), "--out", out)
    said = run(*options, "--tasks", "knn")
    assert f"on storage: {out}" in said
    one = json.loads(stored(s3, "results")["results.json"])
    monkeypatch.setenv("COMPRESSIVE_CACHE", str(tmp_path / "machine-2"))
    run(*options, "--tasks", "geometry")
    both = json.loads(stored(s3, "results")["results.json"])
    kinds = [{each["task"] for each in content["records"]} for content in (one, both)]
    assert kinds[0] < kinds[1]
    assert stored(s3, "results").keys() == local_files(local_copy(out)).keys()


def test_a_failed_upload_is_one_line_with_the_place_of_the_file(
    s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def then_fail(*_: object) -> None:
        s3.fault = "500"

    monkeypatch.setattr(stored_output, "check_writable", then_fail)
    place = f"s3://{BUCKET}/failed"
    said = run(
        *("inspect", sorted_photos(), "--encoder", "none", "--table", "a.csv"),
        *("--out", f"{place}/a.html"),
        code=2,
    )
    (path,) = (tmp_path / "machine-1").rglob("a.html")
    assert str(path) in said.strip().splitlines()[-1]


IMAGES = str(sorted_photos())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("pack", IMAGES, "--out", "s3://nowhere/a"), "no bucket nowhere"),
        (("embed", ENCODER, IMAGES, "--out", "s3://nowhere/a.npz"), "no bucket nowhere"),
        (("embed", ENCODER, IMAGES, "--out", f"s3://{BUCKET}"), "names no file"),
        (("embed", ENCODER, IMAGES, "--out", f"s3://{BUCKET}/a.txt"), "must end with"),
        (("inspect", IMAGES, "--out", "s3://nowhere/a.html"), "no bucket nowhere"),
        (("evaluate", ENCODER, "--out", "s3://nowhere/a"), "no bucket nowhere"),
        (("report", IMAGES, "--out", f"s3://{BUCKET}/a.html"), "URL"),
        (("sweep", IMAGES, "--out", f"s3://{BUCKET}/a"), "URL"),
        (("finetune", ENCODER, IMAGES, "--out", f"s3://{BUCKET}/a"), "URL"),
        (("export", ENCODER, "--to", "timm", "--out", f"s3://{BUCKET}/a"), "URL"),
    ],
)
def test_wrong_outputs_are_one_line(s3: S3, words: tuple[str, ...], expected: str) -> None:
    said = run(*words, code=2)
    (line,) = said.strip().splitlines()
    assert expected in line
    assert not [path for path in Path().rglob("*") if path.is_file()]

"""Invalid paths are rejected: URLs, and home folders of unknown users."""

import os
from pathlib import Path

import pytest
from tiny import photos, silent, tiny
from typer.testing import CliRunner, Result

import compressive
from compressive.cli.app import app
from compressive.data.sources import open_source
from compressive.evaluation.embed import embed
from compressive.evaluation.suite import evaluate
from compressive.reporting.page import write_report
from compressive.train.loop import pretrain

URL = "s3://bucket/run"
OTHER = "ftp://host/run"  # of a scheme that images and runs cannot be on


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def error_of(result: Result) -> str:
    """Return the error message of a rejected command, which must be a single line."""
    assert result.exit_code == 2, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        f"pretrain builtin --steps 1 --out {OTHER}",
        f"pretrain {OTHER}",
        f"quickstart --out {URL}",
        f"sweep builtin --seeds 0,1 --out {URL}",
        f"sweep {OTHER} --seeds 0,1",
        f"evaluate {URL}",
        f"evaluate cifar10-byol-r18 --data {OTHER}",
        f"evaluate cifar10-byol-r18 --data builtin --out {OTHER}",
        f"evaluate cifar10-byol-r18 --data builtin --benchmark-root {URL}",
        f"evaluate cifar10-byol-r18 --data builtin --frost {URL}",
        f"embed {URL} builtin",
        f"embed cifar10-byol-r18 {OTHER}",
        f"embed cifar10-byol-r18 builtin --out {OTHER}.npz",
        f"report {URL}",
        f"report run --out {URL}.html",
        f"compare run {URL}",
        f"watch {URL}",
    ],
)
def test_a_url_is_rejected_for_every_path(line: str, tmp_path: Path) -> None:
    assert "is a URL, but only local files can be used" in error_of(call(*line.split()))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_url_is_rejected_in_python(tmp_path: Path) -> None:
    run, images, out = "cifar10-byol-r18", "builtin", tmp_path / "out"
    for function in (
        lambda: pretrain(tiny(), URL, display=silent()),
        lambda: open_source(OTHER),
        lambda: compressive.load("https://example.org/encoder.safetensors"),
        lambda: evaluate(run, data=OTHER, out=out, display=silent()),
        lambda: evaluate(run, data=images, out=Path(URL), display=silent()),
        lambda: embed(run, images, Path(f"{URL}.npz"), display=silent()),
        lambda: write_report([tmp_path], Path(f"{URL}.html")),
    ):
        with pytest.raises(ValueError, match="is a URL, but only local files"):
            function()
    assert not list(tmp_path.iterdir())


def test_unknown_user_gives_a_one_line_error(tmp_path: Path) -> None:
    for line in ("pretrain ~nouser/x", "pretrain builtin --out ~nouser/x", "watch ~nouser/x"):
        assert error_of(call(*line.split())) == (
            "~nouser/x: ~nouser is not a user here; give the whole path"
        )
    with pytest.raises(ValueError, match="~nouser is not a user"):
        open_source("~nouser/x")
    assert not list(tmp_path.iterdir())


def test_dataset_names_are_not_taken_for_urls() -> None:
    """torchvision:NAME@/ROOT has a colon and a slash."""
    line = error_of(call("pretrain", "torchvision:NoSuchSet@/nowhere"))
    assert line.startswith("torchvision.datasets has no 'NoSuchSet'")


@pytest.mark.slow
def test_a_rejected_embed_leaves_no_folder(tmp_path: Path) -> None:
    photos(tmp_path / "photos", 2)
    for run, images in (("no-such-encoder/x", "photos"), ("cifar10-byol-r18", "nowhere")):
        error_of(call("embed", run, images, "--out", "new/folder/features.npz"))
    assert os.listdir(tmp_path) == ["photos"]

"""`inspect` finds planted errors, writes a page that loads nothing, and rejects misuse."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from pyarrow import csv, parquet
from tiny import noise, silent, sorted_photos, tiny
from typer.testing import CliRunner

import compressive
from compressive.cli.app import app
from compressive.inspection.duplicates import NEAR_SIMILARITY
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "inspect_planted.py"


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inspect_planted", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    pretrain(tiny("train.steps=2"), out, display=silent())
    return out


def test_planted_errors_are_counted(tmp_path: Path) -> None:
    script = benchmark()
    most = {"train": 150, "test": 60}
    planted = script.plant("builtin", tmp_path / "images", copies=4, label_share=0, most=most)
    table = tmp_path / "t.parquet"
    images = tmp_path / "images"
    found = compressive.inspect(
        images, tmp_path / "p.html", table=table, encoder="none", device="cpu", display=silent()
    )
    counts = script.count(planted, table)["kinds"]
    missed = {kind: each["missed"] for kind, each in counts.items()}
    # Crops need an encoder to be found reliably.
    assert {kind for kind, n in missed.items() if n and "crop" not in kind} == set()
    assert counts["damaged files"] == {"planted": 1, "found": 1, "missed": 0, "false_alarms": 0}
    assert found.exact_copies == 16
    assert found.leaks >= 4 * 6
    assert found.label_errors is None
    page = (tmp_path / "p.html").read_text()
    assert "No encoder was used" in page
    assert 'id="leaks"' in page


def test_page_and_table_with_an_encoder(run: Path, tmp_path: Path) -> None:
    found = compressive.inspect(
        sorted_photos(),
        tmp_path / "p.html",
        table=tmp_path / "t.csv",
        encoder=run,
        cache=tmp_path / "cache",
        device="cpu",
        display=silent(),
    )
    assert (found.images, found.unreadable, found.exact_copies) == (40, [], 0)
    page = (tmp_path / "p.html").read_text()
    for section in ("files", "labels", "outliers", "clusters", "map", "origins"):
        assert f'id="{section}"' in page, section
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert str(sorted_photos()) not in page  # the page can be shared
    table = csv.read_csv(tmp_path / "t.csv").to_pydict()
    assert [Path(name).parent.name for name in table["image"]] == table["class"]
    assert set(table["split"]) == {"train"}
    # The score is the mean distance to the ten nearest other images.
    paths = table["image"]
    encoder = compressive.load(run)
    feats = np.concatenate([encoder(encoder.preprocess(path)).numpy() for path in paths])
    feats /= np.linalg.norm(feats, axis=1, keepdims=True)
    cosine = feats @ feats.T
    np.fill_diagonal(cosine, -2)
    expected = 1 - np.sort(cosine, axis=1)[:, -10:].mean(1)
    assert np.allclose(table["outlier_score"], expected, atol=5e-3)
    before = (tmp_path / "t.csv").read_bytes()
    (cached,) = (tmp_path / "cache").iterdir()
    time = cached.stat().st_mtime_ns
    compressive.inspect(
        *(sorted_photos(), tmp_path / "p.html"),
        table=tmp_path / "t.csv",
        encoder=run,
        cache=tmp_path / "cache",
        device="cpu",
        display=silent(),
    )
    assert (tmp_path / "t.csv").read_bytes() == before
    assert cached.stat().st_mtime_ns == time


def test_command_prints_the_counts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "in").mkdir(exist_ok=True)
        noise(20, 20, seed=0).save(tmp_path / "in" / f"{name}.png")
    (tmp_path / "in" / "c.jpg").write_bytes(b"no image")
    words = ["inspect", str(tmp_path / "in"), "--encoder", "none", "--device", "cpu"]
    words += ["--out", str(tmp_path / "p.html"), "--table", str(tmp_path / "t.parquet")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "exact copies: 1" in done.output
    assert "c.jpg" in done.output
    rows = parquet.read_table(tmp_path / "t.parquet").to_pydict()
    assert rows["exact_group"] == [0, 0, None]
    assert rows["unreadable"][2]


def test_a_name_of_a_file_cannot_inject_html(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("<b>x", "<b>y"):
        Image.new("RGB", (9, 9), "red").save(tmp_path / "in" / f"{name}.png")
    compressive.inspect(
        tmp_path / "in",
        tmp_path / "p.html",
        table=tmp_path / "t.csv",
        encoder="none",
        device="cpu",
        display=silent(),
    )
    page = (tmp_path / "p.html").read_text()
    assert "&lt;b&gt;x.png" in page
    assert "<b>x" not in page


BAD = {
    "--out page.pdf": ["--out", "page.pdf"],
    "--table t.txt": ["--table", "t.txt"],
    "--clusters": ["--clusters", "0"],
    "--near-similarity": ["--near-similarity", "1.5"],
    "runs/none": ["--encoder", "runs/none"],
    "--device": ["--device", "tpu"],
    "no folder": ["--out", "missing/p.html"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["inspect", str(sorted_photos()), *BAD[case]])
    assert done.exit_code == 2
    assert case.split()[0] in done.output.replace("\n", " ")
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "nothing")])
    assert done.exit_code == 2
    assert "nothing" in done.output


def test_default_of_the_command_is_the_default_of_the_function() -> None:
    import inspect

    from compressive.cli.inspect_commands import inspect_command
    from compressive.inspection.run import inspect as function

    command = inspect.signature(inspect_command).parameters
    for name, each in inspect.signature(function).parameters.items():
        if name in command and name not in ("data", "display"):
            default, other = each.default, command[name].default
            assert str(default) == str(other), name
    assert command["near_similarity"].default == NEAR_SIMILARITY

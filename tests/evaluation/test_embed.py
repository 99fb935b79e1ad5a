"""`embed` writes the encoder's features with the name and label of each image."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from tiny import noise, silent, tiny
from typer.testing import CliRunner

import compressive
from compressive.cli.app import app
from compressive.evaluation.embed import embed
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    pretrain(tiny("train.steps=2"), out, display=silent())
    return out


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Write two classes of images of several sizes, one of them damaged."""
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(3):
            noise(40 + 7 * i, 30 + 11 * label, seed=3 * label + i).save(
                tmp_path / "set" / name / f"{i}.png"
            )
    (tmp_path / "set" / "cat" / "1.png").write_bytes(b"\x89PNG but no more")
    return tmp_path / "set"


def expected(run: Path, paths: list[str]) -> np.ndarray:
    encoder = compressive.load(run)
    with torch.no_grad():
        return torch.cat([encoder(encoder.preprocess(path)) for path in paths]).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_file_has_the_features_of_each_image(
    run: Path, images: Path, tmp_path: Path, suffix: str
) -> None:
    found = embed(str(run), str(images), tmp_path / f"f{suffix}", device="cpu", display=silent())
    names = [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(3)]
    names.remove("cat/1.png")
    kinds, paths = [name[:3] for name in names], [str(images / name) for name in names]
    assert (found.count, found.dim) == (5, compressive.load(run).feature_dim)
    ((origin, _),) = found.unreadable
    assert origin == str(images / "cat" / "1.png")
    if suffix == ".npz":
        with np.load(found.path) as file:  # without pickle
            assert file["image"].tolist() == paths
            assert file["label"].tolist() == [0, 0, 1, 1, 1]
            assert [file["classes"][i] for i in file["label"]] == kinds
            features = file["features"]
    else:
        table = parquet.read_table(found.path)
        assert table["image"].to_pylist() == paths
        assert table["label"].to_pylist() == [0, 0, 1, 1, 1]
        assert table["class"].to_pylist() == kinds
        features = np.array(table["features"].to_pylist(), dtype=np.float32)
    # Other batch sizes sum in another order.
    np.testing.assert_allclose(features, expected(run, paths), rtol=1e-4, atol=1e-5)


def test_undecodable_file_names_are_escaped(run: Path, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "odd")
    os.mkdir(folder)
    noise(20, 20, seed=0).save(tmp_path / "a.png")
    os.rename(tmp_path / "a.png", folder + b"/\xff.png")
    found = embed(
        str(run), str(tmp_path / "odd"), tmp_path / "f.parquet", device="cpu", display=silent()
    )
    (name,) = parquet.read_table(found.path)["image"].to_pylist()
    assert name == f"{tmp_path}/odd/\\udcff.png"


def test_flat_folder_has_no_labels(run: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for i in range(2):
        noise(33, 41, seed=i).save(tmp_path / "flat" / f"{i}.png")
    out = tmp_path / "f.parquet"
    args = ["embed", str(run), str(tmp_path / "flat"), "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert f"features: {out}, 2 images," in result.output
    assert parquet.read_table(out).column_names == ["image", "features"]


def test_output_in_the_image_folder_is_refused(tmp_path: Path) -> None:
    """The table would be read as a Parquet shard of the dataset."""
    with pytest.raises(ValueError, match=r"--out .*features\.parquet"):
        embed("cifar10-byol-r18", str(tmp_path), tmp_path / "a" / "features.parquet")
    assert not list(tmp_path.rglob("*.parquet"))


def test_invalid_input_prints_one_line_and_writes_nothing(
    run: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("folder.npz")
    folder = folder.rename(folder.with_name(f"{folder.name}.npz"))
    for args, message in (
        ([str(run), "builtin", "--out", str(tmp_path / "f.txt")], ".csv"),
        ([str(run), "builtin", "--out", str(tmp_path / "none" / "f.csv")], "none"),
        ([str(run), str(tmp_path / "none")], "none"),
        ([str(tmp_path / "no" / "run"), "builtin"], "no/run"),
        ([str(run), "builtin", "--device", "tpu"], "--device"),
        ([str(run), "builtin", "--out", "/proc/none/f.npz"], "/proc"),
        ([str(run), "builtin", "--out", str(folder)], "is a folder"),
    ):
        result = CliRunner().invoke(app, ["embed", *args])
        assert result.exit_code == 2
        assert result.output.startswith("error: ")
        assert message in result.output
        assert len(result.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_csv_has_a_line_per_image(run: Path, images: Path, tmp_path: Path) -> None:
    found = embed(run, images, tmp_path / "f.csv", device="cpu", display=silent())
    with found.path.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head[:3] == ["image", "class", "feature_0"]
    assert len(rows) == found.count
    values = np.array([row[2:] for row in rows], dtype=np.float32)
    wanted = expected(run, [row[0] for row in rows])
    np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("split", ["train", "test"])
def test_requested_split_is_embedded(run: Path, tmp_path: Path, split: str) -> None:
    for part, count in (("train", 3), ("test", 2)):
        for kind in ("cat", "dog"):
            (tmp_path / "set" / part / kind).mkdir(parents=True)
            for i in range(count):
                noise(20, 20, seed=i).save(tmp_path / "set" / part / kind / f"{i}.png")
    found = embed(
        str(run),
        str(tmp_path / "set"),
        tmp_path / "f.npz",
        split=split,
        device="cpu",
        display=silent(),
    )
    with np.load(found.path) as file:
        names = file["image"].tolist()
    assert len(names) == {"train": 6, "test": 4}[split]
    assert all(f"/set/{split}/" in name for name in names)

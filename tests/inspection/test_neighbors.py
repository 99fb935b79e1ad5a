"""`neighbors` returns what a plain loop over features finds, also from a file of `embed`."""

from pathlib import Path

import numpy as np
import pytest
from pyarrow import csv
from tiny import silent, sorted_photos, tiny
from typer.testing import CliRunner

import compressive
from compressive.cli.app import app
from compressive.evaluation.embed import embed
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        config = tiny("train.steps=2", f"seed={seed}")
        pretrain(config, folder / str(seed), display=silent())
    return [folder / "0", folder / "1"]


def plain(run: Path, query: Path, count: int) -> list[tuple[str, float]]:
    """Compare with each image, one after the other."""
    encoder = compressive.load(run)

    def unit(path: Path) -> np.ndarray:
        vector = encoder(encoder.preprocess(path))[0].numpy()
        return vector / np.linalg.norm(vector)

    own = unit(query)
    paths = sorted(sorted_photos().glob("*/*.png"))
    cosines = [(str(path), float(own @ unit(path))) for path in paths]
    return sorted(cosines, key=lambda pair: -pair[1])[:count]


def test_the_most_similar_images_equal_a_plain_loop(runs: list[Path], tmp_path: Path) -> None:
    query = sorted_photos() / "class2" / "3.png"
    expected = plain(runs[0], query, 5)
    out = tmp_path / "near.csv"
    found = compressive.neighbors(
        runs[0], query, sorted_photos(), count=5, out=out, device="cpu", display=silent()
    )
    assert [each.image for each in found.neighbors] == [path for path, _ in expected]
    cosines = [each.similarity for each in found.neighbors]
    assert np.allclose(cosines, [cosine for _, cosine in expected], atol=1e-5)
    assert found.neighbors[0] == (str(query), pytest.approx(1, abs=1e-5), "class2")
    table = csv.read_csv(out).to_pydict()
    assert table["image"] == [path for path, _ in expected]


@pytest.mark.parametrize("suffix", [".parquet", ".npz", ".csv"])
def test_features_of_embed_give_the_same_answer(
    runs: list[Path], tmp_path: Path, suffix: str
) -> None:
    query, features = sorted_photos() / "class1" / "0.png", tmp_path / f"f{suffix}"
    embed(runs[0], sorted_photos(), features, device="cpu", display=silent())
    options = {"count": 4, "device": "cpu", "display": silent()}
    direct = compressive.neighbors(runs[0], query, sorted_photos(), **options)
    stored = compressive.neighbors(runs[0], query, features, out=tmp_path / "p.html", **options)
    for one, other in zip(direct.neighbors, stored.neighbors, strict=True):
        assert (one.image, one.label) == (other.image, other.label)
        assert one.similarity == pytest.approx(other.similarity, abs=1e-5)
    page = (tmp_path / "p.html").read_text()
    assert page.count("data:image/png") == 5  # the query and four others
    assert "class1" in page
    if suffix != ".csv":  # which has no place for the fingerprint
        with pytest.raises(ValueError, match="another encoder"):
            compressive.neighbors(runs[1], query, features, **options)


BAD = {
    "count": ["--count", "0"],
    "out": ["--out", "x.pdf"],
    "split": ["--split", "nosplit"],
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_of_neighbors_are_one_line(case: str, runs: list[Path]) -> None:
    query = str(sorted_photos() / "class1" / "0.png")
    words = ["neighbors", str(runs[0]), query, "--in", str(sorted_photos()), "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, *BAD[case]])
    assert done.exit_code == 2
    assert BAD[case][1] in done.output
    assert "Traceback" not in done.output


def test_bad_files_are_one_line(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "q.png").write_bytes(b"no image")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    query = str(sorted_photos() / "class1" / "0.png")
    cases = {
        "q.png": [str(tmp_path / "q.png"), "--in", str(sorted_photos())],
        "lost.png": [str(tmp_path / "lost.png"), "--in", str(sorted_photos())],
        "other.npz": [query, "--in", str(tmp_path / "other.npz")],
        "lost.parquet": [query, "--in", str(tmp_path / "lost.parquet")],
    }
    for name, words in cases.items():
        done = CliRunner().invoke(app, ["neighbors", str(runs[0]), *words, "--device", "cpu"])
        assert done.exit_code == 2, done.output
        assert name in done.output.replace("\n", "")
        assert "Traceback" not in done.output

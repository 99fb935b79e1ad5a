"""`predict` writes the classes of images with their probabilities."""

import csv
from pathlib import Path

import pytest
import torch
from colored_images import paint
from command_line import error_line, run
from PIL import Image
from pyarrow import parquet
from sklearn.metrics import accuracy_score
from torch import nn

import compressive
from compressive import encoder as encoder_file
from compressive.classifier import Classifier, load_classifier, save_classifier
from compressive.config import Network
from compressive.encoder import Encoder
from compressive.networks import build
from compressive.rundir.files import CLASSIFIER

pytestmark = pytest.mark.usefixtures("one_thread")


def write_classifier(folder: Path, *classes: str) -> Path:
    torch.manual_seed(0)
    settings = Network(name="test_resnet")
    encoder = Encoder(build(settings, 16), settings, 16, 20)
    head = nn.Linear(encoder.feature_dim, len(classes))
    return save_classifier(folder / CLASSIFIER, Classifier(encoder, head, classes))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The order is not that of the folders: classes must be matched by name.
    folder = tmp_path_factory.mktemp("classifier")
    return write_classifier(folder, "class2", "class0", "other", "class1", "b", "c")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    paint(tmp_path / "images", seed=0, each=5)
    return tmp_path / "images"


def test_the_table_has_the_probabilities_of_the_classifier(
    classifier: Path, images: Path, tmp_path: Path
) -> None:
    found = compressive.predict(classifier, images, tmp_path / "table.parquet", device="cpu")
    rows = parquet.read_table(found.path).to_pylist()
    model = load_classifier(classifier)
    for row in rows:
        logits = model(model.encoder.preprocess(row["image"]))[0]
        expected, order = logits.softmax(0).sort(descending=True)
        names = [row["predicted"], *(row[f"predicted_{k}"] for k in range(2, 6))]
        values = [row["probability"], *(row[f"probability_{k}"] for k in range(2, 6))]
        assert names == [model.classes[i] for i in order[:5]]
        assert values == pytest.approx(expected[:5].tolist(), abs=1e-5)
        assert row["class"] == Path(row["image"]).parent.name
    assert found.count == len(rows) == 15


def test_accuracy_is_that_of_scikit_learn(classifier: Path, images: Path, tmp_path: Path) -> None:
    found = compressive.predict(classifier, images, tmp_path / "table.parquet", device="cpu")
    table = parquet.read_table(found.path).to_pydict()
    assert found.accuracy == accuracy_score(table["class"], table["predicted"])
    assert found.labeled == 15


def test_both_formats_have_the_same_content(classifier: Path, images: Path, tmp_path: Path) -> None:
    for ending in ("parquet", "csv"):
        result = run(f"predict {classifier} {images} --out {tmp_path}/table.{ending} --device cpu")
        assert result.exit_code == 0, result.output
    one = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    with open(tmp_path / "table.csv", newline="") as file:
        two = list(csv.DictReader(file))
    assert [*one[0]] == [*two[0]]
    for mine, other in zip(one, two, strict=True):
        assert mine["image"] == other["image"]
        assert mine["predicted_3"] == other["predicted_3"]
        assert mine["probability"] == pytest.approx(float(other["probability"]), rel=1e-6)


def test_unreadable_images_are_listed_and_left_out(
    classifier: Path, images: Path, tmp_path: Path
) -> None:
    (images / "class0" / "broken.png").write_bytes(b"\x89PNG but no more")
    result = run(f"predict {classifier} {images} --out {tmp_path}/table.csv --device cpu")
    assert result.exit_code == 0, result.output
    assert "broken.png" in result.stdout
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 16


def test_images_without_labels_have_no_accuracy(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "flat").mkdir()
    for i in range(3):
        Image.new("RGB", (20, 20), (40 * i, 0, 0)).save(tmp_path / "flat" / f"{i}.png")
    result = run(f"predict {classifier} {tmp_path}/flat --out {tmp_path}/table.csv --device cpu")
    assert result.exit_code == 0, result.output
    assert "accuracy" not in result.stdout
    assert "class" not in (tmp_path / "table.csv").read_text().splitlines()[0].split(",")


def test_unknown_classes_give_no_accuracy(images: Path, tmp_path: Path) -> None:
    other = write_classifier(tmp_path / "other", "class0", "class1")
    found = compressive.predict(other, images, tmp_path / "table.csv", device="cpu")
    assert (found.accuracy, found.unknown) == (None, ("class2",))


def test_invalid_input_is_rejected(classifier: Path, images: Path, tmp_path: Path) -> None:
    settings = Network(name="test_resnet")
    encoder = encoder_file.save(tmp_path / "a", build(settings, 16), settings, 16, 20)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / CLASSIFIER).write_bytes(classifier.read_bytes()[:5000])
    (tmp_path / "there.csv").write_text("mine")
    out = f"--device cpu --out {tmp_path}/table.csv"
    for line, expected in {
        f"{encoder} {images} {out}": "finetune",
        f"{tmp_path / 'a'} {images} {out}": "finetune",
        f"{tmp_path / 'cut'} {images} {out}": CLASSIFIER,
        f"{tmp_path / 'nothing'} {images} {out}": "nothing",
        f"{classifier} {images} --out {tmp_path}/table.txt": ".txt",
        f"{classifier} {images} --out {tmp_path}/there.csv": "there.csv",
        f"{classifier} {images} --split nothing {out}": "nothing",
        f"{classifier} {images} --out {images}/table.parquet": "table.parquet",
    }.items():
        assert expected in error_line(f"predict {line}"), line
    assert not (tmp_path / "table.csv").exists()
    assert (tmp_path / "there.csv").read_text() == "mine"

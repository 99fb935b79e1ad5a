"""Python data sets as sources: what items may be, where labels come from, and clear errors."""

import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from exportable import encoder_file
from input_formats import CLASSES, Photos, class_folders, hugging_face, labels, pixels, planted
from PIL import Image
from tiny import noise, silent, tiny
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import FakeData, ImageFolder

import compressive
from compressive.data.decode import Unreadable
from compressive.data.python_datasets import DatasetSource
from compressive.data.several import place_of
from compressive.data.source import require_source
from compressive.data.sources import open_source
from compressive.rundir.folder import read_config

PIXELS = np.array(noise(8, 10, seed=5))
TRUTH = torch.from_numpy(PIXELS).permute(2, 0, 1)


class Items:
    """A data set that returns the same item at every index, and counts how often it is read."""

    def __init__(self, item: Any, count: int = 5, **attributes: Any) -> None:
        self.item, self.count, self.reads = item, count, 0
        self.__dict__ |= attributes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return self.item(i) if callable(self.item) else self.item


def png(tmp_path: Path) -> Path:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    return tmp_path / "a.png"


FORMS: dict[str, Any] = {
    "PIL": Image.fromarray(PIXELS),
    "tensor": TRUTH,
    "tensor, channels last": torch.from_numpy(PIXELS),
    "array, channels last": PIXELS,
    "array, channels first": TRUTH.numpy(),
    "flipped array": np.ascontiguousarray(PIXELS[:, ::-1])[:, ::-1],
    "floats": TRUTH / 255,
    "double array": PIXELS / 255.0,
    "half floats": (TRUTH / 255).half(),
    "16 bits": PIXELS.astype(np.uint16) * 257,
    "with alpha": np.concatenate([PIXELS, PIXELS[:, :, :1]], axis=2),
    "pair": (TRUTH, 3),
    "triple": [TRUTH, 3, "more"],
    "alone in a tuple": (TRUTH,),
    "dict": {"image": TRUTH, "label": 3},
    "dict of transformers": {"pixel_values": TRUTH / 255, "labels": 3},
}


@pytest.mark.parametrize("form", FORMS)
def test_item_may_be(form: str) -> None:
    source = open_source(Items(FORMS[form]))
    found = source.image(2)
    assert found.dtype == torch.uint8
    tolerance = 1 if form == "half floats" else 0
    assert (found.int() - TRUTH.int()).abs().max() <= tolerance
    known = None if form not in ("pair", "triple", "dict", "dict of transformers") else [3] * 5
    assert (None if source.labels is None else source.labels.tolist()) == known
    require_source(source)


@pytest.mark.parametrize("gray", [PIXELS[:, :, 0], TRUTH[:1], PIXELS[:, :, :1], TRUTH[0] / 255])
def test_gray_items_become_rgb(gray: Any) -> None:
    assert torch.equal(open_source(Items(gray)).image(0), TRUTH[:1].expand(3, -1, -1))


def test_item_may_be_a_file(tmp_path: Path) -> None:
    path = png(tmp_path)
    for item in (path, str(path), path.read_bytes(), {"bytes": path.read_bytes(), "path": None}):
        assert torch.equal(open_source(Items(item)).image(0), TRUTH)


# What a data set returns, and parts of the message.
UNEXPECTED: dict[str, tuple[Any, str]] = {
    "None": (None, "holds None"),
    "number": (3, "value of type int"),
    "empty tuple": ((), "empty tuple"),
    "dict without an image": ({"picture": TRUTH, "class": 1}, "picture, class"),
    "normalized": (TRUTH / 255 * 4 - 2, "remove Normalize"),
    "floats up to 255": (TRUTH.float(), "from 0 to 255"),
    "NaN": (TRUTH / 255 + torch.nan, "nan"),
    "int64": (TRUTH.long(), "int64"),
    "bool": (TRUTH > 9, "bool"),
    "video": (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "(4, 3, 8, 8)"),
    "two channels": (torch.zeros(2, 8, 8, dtype=torch.uint8), "(2, 8, 8)"),
    "empty image": (torch.zeros(3, 0, 8, dtype=torch.uint8), "(3, 0, 8)"),
    "an error": (lambda i: {}["x"], "KeyError: 'x'"),
    "random": (lambda i: torch.rand(3, 8, 8), "read twice"),
}


@pytest.mark.parametrize("name", UNEXPECTED)
def test_unexpected_item_is_one_line_before_training(name: str, tmp_path: Path) -> None:
    item, part = UNEXPECTED[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - checked below
        compressive.pretrain(Items(item), tmp_path / "run")
    assert part in str(caught.value)
    assert "item 0 of Items" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield TRUTH


OTHERS: dict[str, tuple[Any, str]] = {
    "loader": (DataLoader(Photos()), "loader.dataset"),
    "iterable": (Endless(), "can only be read in order"),
    "empty": (Items(TRUTH, 0), "is empty"),
    "number": (3, "int"),
    "None": (None, "NoneType"),
    "dict of numbers": ({0: Photos()}, "names of splits"),
    "empty dict": ({}, "names of splits"),
    "dict without train": ({"test": Photos()}, "no split 'train'"),
    "empty list": ([], "empty"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_are_one_line(name: str, tmp_path: Path) -> None:
    data, part = OTHERS[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - checked below
        compressive.pretrain(data, tmp_path / "run")
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_streamed_hugging_face_dataset_is_rejected() -> None:
    stream = hugging_face("train").to_iterable_dataset()
    with pytest.raises(ValueError, match="can only be read in order"):
        open_source(stream)


def test_later_bad_items_are_unreadable() -> None:
    def item(i: int) -> Any:
        return (None if i == 1 else TRUTH, 7 // (3 - i))

    source = open_source(Items(item, 7))
    for i, reason in {1: "it holds None", 3: "ZeroDivisionError"}.items():
        with pytest.raises(Unreadable, match=reason):
            source.image(i)
    assert torch.equal(source.image(2), TRUTH)
    assert source.labels is not None
    assert source.labels[3] == -1


# --- labels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "targets",
    [
        {"targets": [0, 1, 2, 0, 1]},
        {"labels": np.array([0, 1, 2, 0, 1])},
        {"_labels": (0, 1, 2, 0, 1)},
        {"targets": torch.tensor([0, 1, 2, 0, 1]), "classes": ["x", "y", "z"]},
    ],
)
def test_known_labels_are_not_read_from_items(targets: dict[str, Any]) -> None:
    data = Items(lambda i: (TRUTH, i % 3), 5, **targets)
    source = open_source(data)
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1, 2, 0, 1]
    assert source.classes == tuple(targets.get("classes", ("0", "1", "2")))
    assert data.reads <= 9  # three items are compared


def test_labels_changed_by_a_transform_are_read_from_items() -> None:
    data = Items(lambda i: (TRUTH, 9 - i), 5, targets=[0, 1, 2, 3, 4])
    source = open_source(data)
    assert source.labels is not None
    assert source.labels.tolist() == [9, 8, 7, 6, 5]


def test_labels_are_not_read_if_they_are_not_used() -> None:
    data = Items(lambda i: (TRUTH, i % 3), 1000)
    source = DatasetSource(data)
    assert source.image(5).shape == TRUTH.shape
    assert data.reads < 10
    assert source.labels is not None
    assert data.reads >= 1000


def test_labels_of_subsets_and_concatenations() -> None:
    whole = TensorDataset(pixels(planted()), labels(planted()))
    part = Subset(whole, [30, 3, 12])
    both: ConcatDataset[Any] = ConcatDataset([part, whole])
    truth = labels(planted())
    for data, index in ((part, [30, 3, 12]), (both, [30, 3, 12, *range(len(truth))])):
        source = open_source(data)
        assert source.labels is not None
        assert source.labels.tolist() == truth[index].tolist()
        assert torch.equal(source.image(1), pixels(planted())[3])


def test_label_that_is_no_class_is_left_out_with_a_note() -> None:
    with pytest.warns(UserWarning, match="labels are left out"):
        assert open_source(Items((TRUTH, [0.1, 0.9]))).labels is None


def test_partly_labeled_items_have_no_class() -> None:
    source = open_source(Items(lambda i: (TRUTH, None if i % 2 else "dog")))
    assert source.labels is not None
    assert source.labels.tolist() == [0, -1, 0, -1, 0]


# --- libraries ----------------------------------------------------------------------------------


def test_image_folder_is_read_from_its_files(tmp_path: Path) -> None:
    folder = class_folders(tmp_path)
    data = ImageFolder(str(folder))
    source = open_source(data)
    assert (source.name, source.classes) == ("photos", CLASSES)
    assert source.origin(0) == f"{folder}/ant/0.png"
    for i in (0, 11, 29):
        image, label = data[i]
        assert torch.equal(source.image(i), torch.from_numpy(np.array(image)).permute(2, 0, 1))
        assert source.labels is not None
        assert source.labels[i] == label


def test_transform_of_an_image_folder_is_applied(tmp_path: Path) -> None:
    folder = str(class_folders(tmp_path))
    small = transforms.Compose([transforms.Resize(4), transforms.ToTensor()])
    source = open_source(ImageFolder(folder, transform=small))
    assert source.image(0).shape == (3, 4, 4)
    assert source.classes == CLASSES
    random = transforms.RandomHorizontalFlip()
    torch.manual_seed(2)  # flips one of the first two draws
    with pytest.raises(ValueError, match=r"ImageFolder.*random"):
        open_source(ImageFolder(folder, transform=transforms.Compose([random, random, small])))


def test_torchvision_dataset_is_read() -> None:
    data = FakeData(6, (3, 8, 8), num_classes=4)
    source = open_source(data)
    assert source.labels is not None
    assert source.labels.tolist() == [int(data[i][1]) for i in range(6)]


def test_hugging_face_dataset_is_read_without_its_format() -> None:
    plain = hugging_face("train")
    shuffled = plain.shuffle(seed=1).with_format("torch").with_transform(lambda rows: {"image": 0})
    source = open_source(shuffled)
    assert source.labels is not None
    order = [row["image"] for row in plain.shuffle(seed=1)]
    assert source.labels.tolist() == list(plain.shuffle(seed=1)["label"])
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(source.image, range(30))]
    for image, truth in zip(found, order, strict=True):
        assert torch.equal(image, torch.from_numpy(np.array(truth)).permute(2, 0, 1))


def test_own_module_with_the_name_of_the_library_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    assert len(open_source(Photos())) == 30


def test_hugging_face_dataset_of_arrays_is_read() -> None:
    kinds = datasets.Features({"img": datasets.Array3D((8, 10, 3), "uint8")})
    data = datasets.Dataset.from_dict({"img": [PIXELS, PIXELS]}, features=kinds)
    source = open_source(data.with_format("torch", dtype=torch.uint8))
    assert torch.equal(source.image(1), TRUTH)


# --- threads and names --------------------------------------------------------------------------


def test_data_set_is_not_read_by_two_threads_at_once() -> None:
    busy = threading.Lock()

    def item(i: int) -> Any:
        assert busy.acquire(blocking=False), "two threads read at once"
        time.sleep(0.001)
        busy.release()
        return TRUTH

    source = open_source(Items(item, 50))
    with ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(source.image, range(50))]) == 50


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_object_replaces_the_source_of_a_config(tmp_path: Path) -> None:
    config = tiny("data.source=builtin")
    outcome = compressive.pretrain(config, tmp_path / "run", source=Photos(), display=silent())
    assert outcome.step == 2
    assert read_config(tmp_path / "run").data.source == "python:Photos"
    with pytest.raises(ValueError, match="NoneType"):
        compressive.pretrain(config, tmp_path / "other", source=[Photos(), None])


def test_names_of_python_objects() -> None:
    data = hugging_face("train")
    data.info.dataset_name = "photos"
    assert place_of(data) == "python:photos"
    assert place_of({"train": data}) == "python:photos"
    assert place_of(Photos()) == "python:Photos"
    assert place_of(["a", Photos()]) == '["a", "python:Photos"]'


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_embed_finetune_and_predict_take_objects(tmp_path: Path) -> None:
    data = {split: Photos(split) for split in ("train", "test")}
    encoder = str(encoder_file(tmp_path / "encoder", size=32))
    chosen: dict[str, Any] = {"device": "cpu"}
    table = compressive.embed(encoder, data, tmp_path / "x.csv", split="test", **chosen)
    assert table.count == 6
    tuned = compressive.finetune(
        encoder, data, tmp_path / "run", lr=0.05, epochs=1, batch_size=8, **chosen
    )
    assert tuned.test is not None
    again = compressive.finetune(
        encoder, data, tmp_path / "run", lr=0.05, epochs=1, batch_size=8, **chosen
    )
    assert again.test is not None
    found = compressive.predict(tuned.folder, data, tmp_path / "y.csv", split="test", **chosen)
    assert found.count == found.labeled == 6

"""Class names map to ImageNet ids in PyTorch's order, whichever file provides them."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from laid_out import WNIDS, put_json, put_objectnet

from compressive.evaluation.datasets.imagenet_labels import (
    imagenet_wnids,
    objectnet_ids,
    vid_classes,
    ytbb_classes,
)


def folders(root: Path, names: Iterable[str]) -> None:
    for name in names:
        (root / name).mkdir(parents=True)


@pytest.mark.parametrize("where", ["train", "val", ".", "ILSVRC/Data/CLS-LOC/train"])
def test_wnids_are_the_sorted_class_folders(tmp_path: Path, where: str) -> None:
    folders(tmp_path / where, reversed(WNIDS))
    (tmp_path / where / "n0.tar").touch()
    assert list(imagenet_wnids(tmp_path)) == WNIDS


def test_wnids_are_read_from_kaggle_or_torchvision_files(tmp_path: Path) -> None:
    folders(tmp_path / "train", WNIDS[:100])  # a subset does not determine ranks
    with pytest.raises(FileNotFoundError, match=r"100 in .*train"):
        imagenet_wnids(tmp_path)
    wnid_to_classes = {wnid: ("tench", "Tinca tinca") for wnid in reversed(WNIDS)}
    torch.save((wnid_to_classes, WNIDS[:5]), tmp_path / "meta.bin")
    assert list(imagenet_wnids(tmp_path)) == WNIDS
    (tmp_path / "meta.bin").write_bytes(b"not a checkpoint")
    lines = [f"{wnid} tench, Tinca tinca" for wnid in reversed(WNIDS)]
    (tmp_path / "LOC_synset_mapping.txt").write_text("\n".join(lines) + "\n")
    assert list(imagenet_wnids(tmp_path)) == WNIDS


def test_missing_wnids_are_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.*train/") as error:
        imagenet_wnids(tmp_path)
    assert "\n" not in str(error.value)


def test_objectnet_has_113_classes_with_125_ids(tmp_path: Path) -> None:
    expected = put_objectnet(tmp_path)
    found = objectnet_ids(tmp_path / "mappings")
    assert {folder: set(ids) for folder, ids in found.items()} == expected
    assert len(found) == 113
    assert len({i for ids in found.values() for i in ids}) == 125


def test_objectnet_label_without_imagenet_line_is_refused(tmp_path: Path) -> None:
    put_objectnet(tmp_path)
    put_json(tmp_path / "mappings" / "objectnet_to_imagenet_1k.json", {"Label / 0": "no thing"})
    with pytest.raises(ValueError, match=r"'no thing'.*'Label / 0'"):
        objectnet_ids(tmp_path / "mappings")


def test_video_classes_match_the_testbed(tmp_path: Path) -> None:
    vid, ytbb = vid_classes(tmp_path), ytbb_classes()
    assert (len(vid.names), int((vid.owner >= 0).sum())) == (30, 288)
    assert (len(ytbb.names), int((ytbb.owner >= 0).sum())) == (24, 231)
    without = set(range(24)) - set(ytbb.owner.tolist())
    assert {ytbb.names[i] for i in without} == {"cow", "giraffe", "skateboard", "toilet", "none"}
    assert without == {6, 8, 14, 18, 22}
    # Known ids of PyTorch's ImageNet: tabby cat, Persian, cougar, tench, zebra, sports car.
    named = {281: "cat", 283: "cat", 286: "cat", 340: "zebra", 817: "car"}
    assert {i: ytbb.names[int(ytbb.owner[i])] for i in named} == named
    assert vid.names[int(vid.owner[285])] == "domestic cat"
    assert [int(vid.owner[i]) for i in (0, 286)] == [-1, -1]


def test_vid_classes_follow_the_dataset_files(tmp_path: Path) -> None:
    """Files of the dataset override the built-in table: here zebras are airplanes."""
    put_json(
        tmp_path / "imagenet_class_index.json", {str(i): [w, "x"] for i, w in enumerate(WNIDS)}
    )
    put_json(
        tmp_path / "imagenet_vid_class_index.json",
        {"0": ["n02691156", "airplane"], "1": ["n02503517", "elephant"]},
    )
    put_json(tmp_path / "wnid_map.json", {WNIDS[340]: "n02691156", WNIDS[385]: "n02503517"})
    names, owner = vid_classes(tmp_path)
    assert names == ("airplane", "elephant")
    assert {i: c for i, c in enumerate(owner.tolist()) if c >= 0} == {340: 0, 385: 1}

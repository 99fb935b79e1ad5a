"""Frames of the two video datasets: which are kept, and which labels they get."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from laid_out import answers, put, put_json

from compressive.evaluation.datasets.imagenet_labels import ytbb_classes
from compressive.evaluation.datasets.shifts import open_shift


def put_vid(root: Path, videos: Mapping[str, tuple[str, list[str]]], labels: dict) -> None:
    """Write anchors and neighbors of each video and labels of each frame, as in the archive."""
    pmsets = {}
    for video, (anchor, near) in videos.items():
        pmsets[f"val/{video}/{anchor}"] = [f"val/{video}/{frame}" for frame in near]
        for frame in (anchor, *near):
            put(root / "val" / video / frame)
    put_json(root / "metadata" / "pmsets.json", pmsets)
    put_json(root / "metadata" / "labels.json", {f"val/{key}": ids for key, ids in labels.items()})


VIDEOS = {
    "ILSVRC2015_val_00000000": ("000010.JPEG", ["000009.JPEG", "000011.JPEG"]),
    "ILSVRC2015_val_00000001": ("000005.JPEG", []),
}
LABELS = {
    "ILSVRC2015_val_00000000/000010.JPEG": [8, 9],
    "ILSVRC2015_val_00000000/000009.JPEG": [8],
    "ILSVRC2015_val_00000000/000011.JPEG": [9],
    "ILSVRC2015_val_00000001/000005.JPEG": [29],
}


@pytest.mark.parametrize("above", ["", "imagenet_vid_ytbb_robust"])
def test_vid_neighbors_have_their_own_labels(tmp_path: Path, above: str) -> None:
    put_vid(tmp_path / above / "imagenet-vid-robust", VIDEOS, LABELS)
    shift = open_shift("imagenet-vid-robust", tmp_path)
    assert answers(shift) == {frame: set(ids) for frame, ids in LABELS.items()}
    assert shift.answers.anchors is not None
    assert shift.answers.neighbors is not None
    assert shift.answers.anchors.tolist() == [0, 3]
    assert shift.answers.neighbors.tolist() == [[1, 2], [-1, -1]]
    assert shift.answers.video_classes == 30


def test_missing_frame_or_label_is_named(tmp_path: Path) -> None:
    root = tmp_path / "imagenet-vid-robust"
    put_vid(root, VIDEOS, LABELS)
    (root / "val" / "ILSVRC2015_val_00000000" / "000011.JPEG").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 4 frames .*_val_00000000/000011.JPEG"):
        open_shift("imagenet-vid-robust", tmp_path)
    put_vid(root, VIDEOS, {key: ids for key, ids in LABELS.items() if "11" not in key})
    with pytest.raises(ValueError, match=r"no label for ILSVRC2015_val_00000000/000011.JPEG"):
        open_shift("imagenet-vid-robust", tmp_path)
    put_json(root / "metadata" / "labels.json", [1])
    with pytest.raises(ValueError, match=r"imagenet-vid-robust in .* is damaged"):
        open_shift("imagenet-vid-robust", tmp_path)


MARKS = ["good", "unsure", "bad", *ytbb_classes().names]
REVIEW = ["similar", "dissimilar", "correct", "blur-increase", "bad-anchor"]


def put_ytbb(root: Path, metadata: str) -> None:
    """Write two kept anchors, a and b, and one anchor for each reason to drop it."""

    def annotations(labels: list[str], rows: list[tuple[str, list[str]]]) -> Any:
        entries = [{"key": k, "notes": "", "labels": [labels.index(x) for x in m]} for k, m in rows]
        return {"annotations": entries, "labels": labels}

    anchors = [
        ("a_1_100/frame-50.jpg", ["good", "dog"]),
        # Some keys of the real file contain the annotator's own folders.
        ("/home/someone/data/b_200/frame-7.jpg", ["good"]),
        ("unsure_1/frame-1.jpg", ["good", "unsure"]),
        ("bad_1/frame-1.jpg", ["bad", "good"]),
        ("silent_1/frame-1.jpg", ["dog"]),
        ("flagged_1/frame-5.jpg", ["good"]),
    ]
    pairs = [
        ("a_1_100/frame-50.jpg,a_1_100/frame-40.jpg", ["similar", "correct"]),
        ("/x/a_1_100/frame-50.jpg,/x/a_1_100/frame-60.jpg", ["similar"]),
        ("a_1_100/frame-50.jpg,a_1_100/frame-61.jpg", ["similar"]),  # 11 frames away
        ("a_1_100/frame-50.jpg,a_1_100/frame-51.jpg", ["similar", "blur-increase"]),
        ("a_1_100/frame-50.jpg,a_1_100/frame-52.jpg", ["correct"]),
        ("flagged_1/frame-5.jpg,flagged_1/frame-6.jpg", ["similar", "bad-anchor"]),
        ("flagged_1/frame-5.jpg,flagged_1/frame-4.jpg", ["similar"]),
    ]
    put_json(root / metadata / "anchor_labels.json", annotations(MARKS, anchors))
    put_json(root / metadata / "pmk_labels.json", annotations(REVIEW, pairs))
    with (root / metadata / "ytbb_robustness_test_anchors_full.csv").open("w", newline="") as file:
        rows = [("a_1", 100, 22), ("b", 200, 23), ("flagged", 1, 0), ("unsure", 1, 0)]
        csv.writer(file).writerows([("ytid", "time_ms", "label"), *rows])
    for key in [key for key, _ in anchors] + [key.split(",")[1] for key, _ in pairs]:
        put(root / "ytbb_videos" / Path(key).parent.name / Path(key).name)


@pytest.mark.parametrize("metadata", [".", "metadata", "ytbb-robust_metadata"])
def test_ytbb_frames_get_the_labels_of_their_anchor(tmp_path: Path, metadata: str) -> None:
    """In the CSV file 22 is car (class 23) and 23 is none (class 22)."""
    put_ytbb(tmp_path / "ytbb-robust", metadata)
    shift = open_shift("ytbb-robust", tmp_path)
    dog, none, car = (ytbb_classes().names.index(name) for name in ("dog", "none", "car"))
    assert (none, car) == (22, 23)
    assert answers(shift) == {
        "a_1_100/frame-50.jpg": {dog, car},
        "a_1_100/frame-40.jpg": {dog, car},
        "a_1_100/frame-60.jpg": {dog, car},
        "b_200/frame-7.jpg": {none},
    }
    assert shift.answers.anchors is not None
    assert shift.answers.neighbors is not None
    assert shift.answers.anchors.tolist() == [0, 3]
    assert shift.answers.neighbors.tolist() == [[1, 2], [-1, -1]]
    assert shift.answers.video_classes == 24


def test_missing_or_damaged_ytbb_annotations_are_named(tmp_path: Path) -> None:
    root = tmp_path / "ytbb-robust"
    put_ytbb(root, "metadata")
    (root / "metadata" / "pmk_labels.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no pmk_labels.json in .*imagenet-testbed"):
        open_shift("ytbb-robust", tmp_path)
    put_ytbb(root, "metadata")
    (root / "metadata" / "pmk_labels.json").write_text('{"annotations": [')
    with pytest.raises(ValueError, match=r"pmk_labels\.json"):
        open_shift("ytbb-robust", tmp_path)
    put_ytbb(root, "metadata")
    (root / "metadata" / "ytbb_robustness_test_anchors_full.csv").write_text(
        "ytid,time_ms,label\nb,200,1\n"
    )
    with pytest.raises(ValueError, match=r"a_1_100/frame-50\.jpg"):
        open_shift("ytbb-robust", tmp_path)

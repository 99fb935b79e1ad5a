"""Opening a dataset: the test split, the meaning of labels, and dropped images."""

from pathlib import Path

from tiny_context import pictures, shard

from compressive.evaluation.dataset import open_splits


def test_class_names_map_to_the_same_labels_in_train_and_test(tmp_path: Path) -> None:
    """Each shard numbers its own class names. Test lacks the first class and has a new one."""
    shard(tmp_path / "train-0.parquet", ["a", "b", "c", "a"], tmp_path / "x")
    shard(tmp_path / "test-0.parquet", ["c", "d", "b"], tmp_path / "y")
    splits = open_splits(str(tmp_path), seed=0)
    assert splits.train.classes == ("a", "b", "c")
    assert splits.test.classes == ("a", "b", "c", "d")
    assert splits.test.labels is not None
    assert splits.test.labels.tolist() == [2, 3, 1]
    assert splits.classes == 4


def test_single_file_is_split_into_train_and_test(tmp_path: Path) -> None:
    shard(tmp_path / "test-0.parquet", ["a", "b"] * 10, tmp_path / "x")
    splits = open_splits(str(tmp_path / "test-0.parquet"), seed=0)
    train = {splits.train.origin(i) for i in range(len(splits.train))}
    test = {splits.test.origin(i) for i in range(len(splits.test))}
    assert (len(train), len(test)) == (16, 4)
    assert not train & test
    assert "a fifth" in splits.notes[0]
    assert "seed 0" in splits.notes[0]


def test_held_out_images_come_from_train(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 10, "b": 10})
    pictures(tmp_path / "test", {"a": 4, "b": 4}, seed=50)
    splits = open_splits(str(tmp_path), seed=0, held_out=True)
    parts = [{s.origin(i) for i in range(len(s))} for s in (splits.train, splits.test)]
    assert [len(part) for part in parts] == [16, 4]
    assert not parts[0] & parts[1]
    assert all("/train/" in place for part in parts for place in part)
    assert splits.name == f"{tmp_path.name} held out"
    assert splits.notes[0].startswith("held out of")


def test_held_out_images_exclude_the_seeded_test_split(tmp_path: Path) -> None:
    """If a seeded fifth is the test split, a fifth of the rest is held out."""
    pictures(tmp_path, {"a": 25, "b": 25})
    plain, held = (open_splits(str(tmp_path), seed=0, held_out=each) for each in (False, True))
    test, kept, held_out = (
        {s.origin(i) for i in range(len(s))} for s in (plain.test, held.train, held.test)
    )
    assert (len(test), len(kept), len(held_out)) == (10, 32, 8)
    assert not test & (kept | held_out)
    assert not kept & held_out


def test_unlabeled_test_split_is_skipped_for_val(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    pictures(tmp_path / "test", {"": 4})
    pictures(tmp_path / "val", {"a": 3, "b": 3}, seed=50)
    splits = open_splits(str(tmp_path), seed=0)
    assert "/val/" in splits.test.origin(0)
    assert len(splits.test) == 6


def test_single_partly_labeled_file_is_split_into_train_and_test(tmp_path: Path) -> None:
    shard(tmp_path / "test-0.parquet", [None, "a", "b"] * 10, tmp_path / "x")
    splits = open_splits(str(tmp_path / "test-0.parquet"), seed=0)
    train = {splits.train.origin(i) for i in range(len(splits.train))}
    test = {splits.test.origin(i) for i in range(len(splits.test))}
    assert (len(train), len(test), train & test) == (16, 4, set())
    assert "train: 10 images" in splits.notes[0]


def test_labels_only_in_test_give_no_classes(tmp_path: Path) -> None:
    shard(tmp_path / "train-0.parquet", [None] * 4, tmp_path / "x")
    shard(tmp_path / "test-0.parquet", ["a", "b"], tmp_path / "y")
    splits = open_splits(str(tmp_path), seed=0)
    assert (len(splits.train), len(splits.test), splits.classes) == (4, 2, 0)

"""Opening a data set: which images are test images, what labels mean, what is left out."""

from pathlib import Path

from tiny_context import pictures, shard

from compressive.evaluation.dataset import open_splits


def test_words_mean_the_same_class_in_train_and_test(tmp_path: Path) -> None:
    """Each shard numbers its own words; test lacks the first and has one more."""
    shard(tmp_path / "train-0.parquet", ["a", "b", "c", "a"], tmp_path / "x")
    shard(tmp_path / "test-0.parquet", ["c", "d", "b"], tmp_path / "y")
    splits = open_splits(str(tmp_path), seed=0)
    assert splits.train.classes == ("a", "b", "c")
    assert splits.test.classes == ("a", "b", "c", "d")
    assert splits.test.labels is not None
    assert splits.test.labels.tolist() == [2, 3, 1]
    assert splits.classes == 4


def test_one_file_is_not_both_train_and_test(tmp_path: Path) -> None:
    shard(tmp_path / "test-0.parquet", ["a", "b"] * 10, tmp_path / "x")
    splits = open_splits(str(tmp_path / "test-0.parquet"), seed=0)
    train = {splits.train.origin(i) for i in range(len(splits.train))}
    test = {splits.test.origin(i) for i in range(len(splits.test))}
    assert (len(train), len(test)) == (16, 4)
    assert not train & test
    assert "a fifth of its images, drawn by seed 0, is the test" in splits.notes[0]


def test_held_out_images_are_of_train_whatever_else_there_is(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 10, "b": 10})
    pictures(tmp_path / "test", {"a": 4, "b": 4}, seed=50)
    splits = open_splits(str(tmp_path), seed=0, held_out=True)
    parts = [{s.origin(i) for i in range(len(s))} for s in (splits.train, splits.test)]
    assert [len(part) for part in parts] == [16, 4]
    assert not parts[0] & parts[1]
    assert all("/train/" in place for part in parts for place in part)
    assert splits.name == f"{tmp_path.name} held out"
    assert splits.notes[0].startswith("held out of")


def test_held_out_images_are_not_those_that_will_be_test_images(tmp_path: Path) -> None:
    """Where a seeded fifth is the test split, a fifth of the rest is held out."""
    pictures(tmp_path, {"a": 25, "b": 25})
    plain, held = (open_splits(str(tmp_path), seed=0, held_out=each) for each in (False, True))
    test, kept, chosen_by = (
        {s.origin(i) for i in range(len(s))} for s in (plain.test, held.train, held.test)
    )
    assert (len(test), len(kept), len(chosen_by)) == (10, 32, 8)
    assert not test & (kept | chosen_by)
    assert not kept & chosen_by


def test_a_split_that_hides_its_labels_is_passed_over(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    pictures(tmp_path / "test", {"": 4})
    pictures(tmp_path / "val", {"a": 3, "b": 3}, seed=50)
    splits = open_splits(str(tmp_path), seed=0)
    assert "/val/" in splits.test.origin(0)
    assert len(splits.test) == 6


def test_one_file_with_labels_missing_is_not_both_train_and_test(tmp_path: Path) -> None:
    shard(tmp_path / "test-0.parquet", [None, "a", "b"] * 10, tmp_path / "x")
    splits = open_splits(str(tmp_path / "test-0.parquet"), seed=0)
    train = {splits.train.origin(i) for i in range(len(splits.train))}
    test = {splits.test.origin(i) for i in range(len(splits.test))}
    assert (len(train), len(test), train & test) == (16, 4, set())
    assert splits.notes[0] == "left out of train: 10 images without a label"


def test_labels_of_test_alone_teach_nothing(tmp_path: Path) -> None:
    shard(tmp_path / "train-0.parquet", [None] * 4, tmp_path / "x")
    shard(tmp_path / "test-0.parquet", ["a", "b"], tmp_path / "y")
    splits = open_splits(str(tmp_path), seed=0)
    assert (len(splits.train), len(splits.test), splits.classes) == (4, 2, 0)

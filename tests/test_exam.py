"""A set is opened for judging: which images are test, whose labels mean what, what is left out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from tiny import noise
from torch import Tensor, nn

from compressive.augment import MEAN, STD, normalize
from compressive.evaluation.classify import _folds, few_label, knn, logistic_regression
from compressive.evaluation.exam import Exam
from compressive.evaluation.features import Features
from compressive.evaluation.opening import open_splits
from compressive.evaluation.results import Results
from compressive.evaluation.subject import Subject
from compressive.logistic import PENALTIES, Selection


def pictures(folder: Path, classes: dict[str, int], seed: int = 0) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            noise(16, 16, seed=seed + i).save(folder / name / f"{name or 'flat'}{seed + i}.png")


def shard(path: Path, words: Sequence[str | None], folder: Path) -> None:
    pictures(folder, {"": len(words)})
    data = [{"bytes": (folder / f"flat{i}.png").read_bytes()} for i in range(len(words))]
    pq.write_table(pa.table({"image": data, "label": pa.array(words, pa.string())}), path)


class Mean(nn.Module):
    """Features that a person can compute: mean colors of the normalized image."""

    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) * self.one


def exam_of(place: Path, **more: object) -> Exam:
    network = Mean().eval()
    subject = Subject(name="mean", network=network, size=16, **more)  # pyright: ignore
    splits = open_splits(str(place), seed=0)
    return Exam(subject, splits, Results("mean"), device=torch.device("cpu"))


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


def test_features_of_images_that_were_shrunk_otherwise_are_made_anew(tmp_path: Path) -> None:
    """A streamed set is known by its names, which do not tell what was done to its images."""
    pictures(tmp_path / "set" / "train", {"a": 3, "b": 3})
    keys = []
    for side in (16, 40):
        exam = exam_of(tmp_path / "set", side=side)
        exam.cache = tmp_path / "cache"
        exam.features("train")
        exam.close()
        keys.append(len(list((tmp_path / "cache").iterdir())))
        assert f"longer side to {side}," in exam.seen()["larger images"]
    assert keys[1] > keys[0]


def test_one_file_is_not_both_train_and_test(tmp_path: Path) -> None:
    shard(tmp_path / "test-0.parquet", ["a", "b"] * 10, tmp_path / "x")
    splits = open_splits(str(tmp_path / "test-0.parquet"), seed=0)
    train = {splits.train.origin(i) for i in range(len(splits.train))}
    test = {splits.test.origin(i) for i in range(len(splits.test))}
    assert (len(train), len(test)) == (16, 4)
    assert not train & test
    assert "a fifth of its images" in splits.notes[0]


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


def test_an_image_without_a_label_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    """The same figures as where it is not there at all."""
    some = tmp_path / "some"
    some.mkdir()
    for split, words in (("train", [*"ab", None] * 15), ("test", [None, *"ab"] * 4)):
        file = f"{split}-0.parquet"
        shard(tmp_path / file, words, tmp_path / "pictures")
        pq.write_table(pq.read_table(tmp_path / file).drop_null(), some / file)
    found = []
    for place in (tmp_path, some):
        exam = exam_of(place)
        knn(exam)
        logistic_regression(exam)
        found.append(exam.results.records)
        exam.close()
    figures = [[(r.task, r.metric, r.value, r.n) for r in records] for records in found]
    assert figures[0] == figures[1]
    assert {n for *_, n in figures[0]} == {8}
    assert found[0][0].protocol["notes"] == [
        "left out of train: 15 images without a label",
        "left out of test: 4 images without a label",
    ]
    held_out = open_splits(str(tmp_path), seed=0, held_out=True)
    assert [len(held_out.train), len(held_out.test)] == [24, 6]
    assert not any("of test" in note for note in held_out.notes), "no test image is in it"


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


def test_an_image_that_cannot_be_read_counts_in_no_task(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    pictures(tmp_path / "test", {"a": 3, "b": 3}, seed=50)
    (tmp_path / "test" / "a" / "a51.png").write_bytes(b"no image")
    exam = exam_of(tmp_path)
    assert exam.features("test").index.tolist() == [0, 2, 3, 4, 5]
    seen = [batch.index.tolist() for batch in exam.batches("test", 4)]
    assert seen == [[0, 2, 3], [4, 5]]
    assert exam.results.skipped == ["1 images of test that cannot be read"]


def test_views_have_the_colors_that_a_network_of_others_wants(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    other = exam_of(tmp_path, mean=(0.5, 0.5, 0.5), std=(0.5, 0.4, 0.3))
    expected = (x - 0.5) / torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    torch.testing.assert_close(other.recolored(normalize(x)), expected, rtol=1e-5, atol=1e-5)
    own = exam_of(tmp_path, mean=MEAN, std=STD)
    assert own.recolored(x) is x


@pytest.mark.parametrize(("each", "held"), [(1, 0), (2, 1), (10, 2)])
def test_a_penalty_is_chosen_on_classes_that_can_spare_an_image(
    tmp_path: Path, each: int, held: int
) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    labels = torch.arange(2).repeat(each)
    feats = torch.randn(2 * each, 3, generator=torch.Generator().manual_seed(0))
    some = Features(feats + 3 * labels[:, None], labels, torch.arange(2 * each))
    _, penalty, how = _folds(some, exam_of(tmp_path))
    if held:
        assert how.startswith("the log-loss of a fifth")
    else:
        assert (penalty, how) == (1.0, "not chosen: half of the classes or more have one image")


def test_a_penalty_is_not_chosen_where_most_classes_have_one_image(tmp_path: Path) -> None:
    pictures(tmp_path / "train", dict.fromkeys("abcde", 2))
    exam, labels = exam_of(tmp_path), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    feats = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    _, penalty, how = _folds(Features(feats[:7], labels[:7], torch.arange(7)), exam)
    assert (penalty, how) == (1.0, "not chosen: half of the classes or more have one image")
    _, _, how = _folds(Features(feats, labels, torch.arange(8)), exam)
    assert how.startswith("the log-loss of a fifth")


def test_a_share_of_labels_without_one_of_each_class_is_left_out(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 10, "b": 10})
    pictures(tmp_path / "test", {"a": 3, "b": 3}, seed=50)
    exam = exam_of(tmp_path)
    few_label(exam)
    assert exam.results.skipped == ["few labels 1%: 0 labels for 2 classes"]
    (record,) = exam.results.records
    assert record.task == "few labels 10%"
    assert record.protocol["labels"] == [2, 2, 2]


def test_of_few_held_out_images_the_log_loss_chooses_the_penalty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By scikit-learn; of many it is accuracy, and another penalty."""
    pictures(tmp_path / "train", {"a": 20, "b": 20, "c": 20})
    pictures(tmp_path / "test", {"a": 3, "b": 3, "c": 3}, seed=50)
    exam = exam_of(tmp_path)
    labels, (fit, held) = exam.features("train").labels, exam.parts
    feats = torch.randn(69, 6, generator=torch.Generator().manual_seed(3))
    feats[:60, :3] += F.one_hot(labels, 3)
    known = {
        split: exam.features(split)._replace(feats=some)
        for split, some in (("train", feats[:60]), ("test", feats[60:]))
    }
    monkeypatch.setattr(exam, "features", known.__getitem__)
    losses, hits = [], []
    for l2 in PENALTIES:
        theirs = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=10_000)
        theirs.fit(feats[fit], labels[fit])
        losses.append(log_loss(labels[held], theirs.predict_proba(feats[held])))
        hits.append(theirs.score(feats[held], labels[held]))
    right = [i for i, hit in enumerate(hits) if hit == max(hits)]
    by = {"log-loss": int(np.argmin(losses)), "accuracy": min(right, key=losses.__getitem__)}
    assert by["log-loss"] != by["accuracy"]
    for few, how in ((1000, "log-loss"), (len(held), "accuracy")):
        monkeypatch.setattr("compressive.evaluation.classify.FEW", few)
        logistic_regression(exam)
        protocol = exam.results.records[-1].protocol
        assert protocol["chosen"] == {"l2": PENALTIES[by[how]]}
        words = f"{len(held)} training images by {how}, then fitted on all"
        assert protocol["chosen on"] == words


def test_the_penalty_of_few_labels_has_the_least_log_loss_by_scikit_learn(tmp_path: Path) -> None:
    """Every fifth of each class is held out; by accuracy another penalty would be chosen."""
    pictures(tmp_path / "train", {"a": 5, "b": 5, "c": 5})
    labels = torch.arange(3).repeat_interleave(20)
    feats = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    feats[:, :3] += F.one_hot(labels, 3)
    found, penalty, _ = _folds(Features(feats, labels, torch.arange(60)), exam_of(tmp_path))
    held = torch.arange(60) % 5 == 0
    losses, hits = [], []
    for l2 in PENALTIES:
        theirs = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=10_000)
        theirs.fit(feats[~held], labels[~held])
        losses.append(log_loss(labels[held], theirs.predict_proba(feats[held])))
        hits.append(theirs.score(feats[held], labels[held]))
    assert penalty == PENALTIES[int(np.argmin(losses))]
    best = max(hits)
    assert penalty != max(l2 for l2, hit in zip(PENALTIES, hits, strict=True) if hit == best)
    assert isinstance(found, Selection)
    assert found.fit.penalties == (penalty,)


def test_images_have_one_name_wherever_they_lie_and_others_another(tmp_path: Path) -> None:
    """The same files elsewhere, and other pictures under the same names with the same labels."""
    for place in ("here", "there", "other"):
        for split, seed in (("train", 0), ("test", 10)):
            pictures(tmp_path / place / split, {"a": 3, "b": 3}, seed=seed)
    changed = sorted((tmp_path / "other" / "test").rglob("*.png"))[4]
    noise(16, 16, seed=99).save(changed)
    here, there, other = (exam_of(tmp_path / place) for place in ("here", "there", "other"))
    assert here.images("test") == there.images("test")
    assert here.content == there.content
    assert here.images("train") == other.images("train")
    assert here.images("test") != other.images("test")
    some = torch.tensor([0, 2])
    assert here.images("test", some) == there.images("test", some) != here.images("test")
    for exam in (here, there, other):
        exam.close()

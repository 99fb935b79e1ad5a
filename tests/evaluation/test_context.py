"""A set is opened for judging: which images are test, whose labels mean what, what is left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from eval_contexts import Mean, exam_of
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from tiny import noise, tiny
from torch import Tensor

from compressive.augment.ops import MEAN, STD, normalize
from compressive.corruptions.corrupt import NAMES, corrupt
from compressive.data.splits import few_labels, stratified
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.features import Features
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.logistic import PENALTIES, Selection
from compressive.evaluation.results import Results
from compressive.evaluation.tasks import classify, probing
from compressive.evaluation.tasks.classify import (
    _folds,
    few_label,
    knn,
    linear,
    logistic_regression,
)
from compressive.evaluation.tasks.information import direction_of
from compressive.evaluation.tasks.information import information as measure_information
from compressive.evaluation.tasks.linear_head import LEARNING_RATES, WIDER, Heads
from compressive.evaluation.tasks.smoothness import smoothness as measured
from compressive.methods import build
from compressive.rng import image_keys


def pictures(folder: Path, classes: dict[str, int], seed: int = 0) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            noise(16, 16, seed=seed + i).save(folder / name / f"{name or 'flat'}{seed + i}.png")


def shard(path: Path, words: Sequence[str | None], folder: Path) -> None:
    pictures(folder, {"": len(words)})
    data = [{"bytes": (folder / f"flat{i}.png").read_bytes()} for i in range(len(words))]
    pq.write_table(pa.table({"image": data, "label": pa.array(words, pa.string())}), path)


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
        assert f"longer side to {side}," in exam.seen()["larger_images"]
    assert keys[1] > keys[0]


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


def test_an_image_without_a_label_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    """The same figures as where it is not there at all."""
    every, some = tmp_path / "every", tmp_path / "some"
    every.mkdir()
    some.mkdir()
    for split, words in (("train", [*"ab", None] * 15), ("test", [None, *"ab"] * 4)):
        file = f"{split}-0.parquet"
        shard(every / file, words, tmp_path / "pictures")
        pq.write_table(pq.read_table(every / file).drop_null(), some / file)
    found = []
    for place in (every, some):
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
    held_out = open_splits(str(every), seed=0, held_out=True)
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
    """By scikit-learn; of many it is accuracy, and another penalty. The next best is 0.01 worse."""
    pictures(tmp_path / "train", {"a": 20, "b": 20, "c": 20})
    pictures(tmp_path / "test", {"a": 3, "b": 3, "c": 3}, seed=50)
    exam = exam_of(tmp_path)
    labels, (fit, held) = exam.features("train").labels, exam.parts
    feats = torch.randn(69, 6, generator=torch.Generator().manual_seed(7))
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
        monkeypatch.setattr("compressive.evaluation.tasks.classify.FEW", few)
        logistic_regression(exam)
        protocol = exam.results.records[-1].protocol
        assert protocol["chosen"] == {"l2": PENALTIES[by[how]]}
        words = f"{len(held)} training images by {how}, then fitted on all"
        assert protocol["chosen_on"] == words


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


def place(folder: Path, train: dict[str, int], test: dict[str, int]) -> Path:
    pictures(folder / "train", train)
    pictures(folder / "test", test, seed=50)
    return folder


def entropy_rank(matrix: np.ndarray) -> float:
    share = np.linalg.svd(matrix, compute_uv=False)
    share = share / share.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def test_geometry_is_numpys(tmp_path: Path) -> None:
    exam = exam_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 6, "b": 6}))
    probing.geometry(exam)
    found = {r.metric: r.value for r in exam.results.records}
    h = exam.features("test").feats.double().numpy()
    assert found["RankMe"] == pytest.approx(entropy_rank(h), rel=1e-5)
    assert found["effective rank"] == pytest.approx(entropy_rank(h - h.mean(0)), rel=1e-5)
    unit = h / np.linalg.norm(h, axis=1, keepdims=True)
    i, j = np.triu_indices(len(h), 1)
    pairs = np.square(unit[i] - unit[j]).sum(1)
    assert found["uniformity"] == pytest.approx(np.log(np.exp(-2 * pairs).mean()), rel=1e-5)
    assert abs(found["RankMe"] - found["effective rank"]) > 0.01  # the test can tell them apart
    exam.close()


def test_corruptions_are_seen_in_the_networks_colors_and_averaged_over_types(
    tmp_path: Path,
) -> None:
    """Cells counted here, from the same corrupted bytes, by a classifier that sees redness."""
    colors: dict[str, Any] = {"mean": (0.2, 0.3, 0.4), "std": (0.1, 0.2, 0.3)}
    exam = exam_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 20, "b": 20}), **colors)
    exam.seed = 3
    # At the usual mean and std the threshold would lie elsewhere.
    exam.classifier = lambda feats: torch.stack([2.98 - feats[:, 0], feats[:, 0] - 2.98], 1)
    probing.corruptions(exam)
    records = {
        r.dataset.rpartition(" ")[2]: r for r in exam.results.records if r.task != "corruptions"
    }
    (batch,) = exam.batches("test")
    images = exam.crop.pixels(batch).mul(255).round().byte()
    for kind in ("gaussian_noise", "contrast"):
        share = []
        for severity in range(1, 6):
            x = corrupt(images, kind, severity, index=batch.index, seed=3).double() / 255
            red = ((x[:, 0] - 0.2) / 0.1).mean((1, 2))
            share.append(float(((red > 2.98).long() == batch.label).double().mean()))
        assert records[kind].protocol["by_severity"] == pytest.approx(share, abs=1e-6)
    (mean,) = [r for r in exam.results.records if r.task == "corruptions"]
    official = [records[kind].value for kind in NAMES if kind != "frost"]
    assert mean.value == pytest.approx(sum(official) / 14, abs=1e-12)
    assert len(set(official)) > 3
    exam.close()


def test_smoothness_is_recorded_as_it_is_measured(tmp_path: Path) -> None:
    """With the subject's own antialiasing, on images that are larger than what it sees."""
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                noise(40, 40, seed=i).save(tmp_path / split / name / f"{i}.png")
    method = build(tiny("method=simclr")).eval()
    network = Mean().eval()
    subject = FrozenModel(
        name="a", network=network, size=16, side=40, antialias=True, method=method
    )
    splits = open_splits(str(tmp_path), seed=0)
    exam = EvalContext(subject, splits, Results("a"), device=torch.device("cpu"))
    probing.smoothness(exam)
    batches = exam.some("test", torch.arange(4))
    truth = measured(direction_of(method), batches, size=16, antialias=True).local
    found = {(r.task, r.metric): r for r in exam.results.records if r.dataset.endswith(" test")}
    for name, local in truth.items():
        one = found[f"smoothness {name}", "lipschitz"]
        assert one.value == pytest.approx(float(local.value.mean()), rel=1e-6)
        normalized = one.protocol["mean_in_normalized_units"]
        assert normalized == pytest.approx(float(local.normalized.mean()), rel=1e-6)
        two = found[f"smoothness {name}", "lipschitz_squared_kl"]
        assert two.value == pytest.approx(float(local.squared.mean()), rel=1e-6)
        assert two.protocol["largest"] == pytest.approx(float(local.squared.max()), rel=1e-6)
    exam.close()


def test_smoothness_is_of_as_many_images_as_in_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, int] = {}

    def first(exam: EvalContext, split: str, most: int) -> Any:
        asked[split] = most
        return exam.batches(split)

    monkeypatch.setattr(probing, "_first", first)
    exam = exam_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 2, "b": 2}), method=build(tiny()))
    probing.smoothness(exam)
    assert asked == {"train": 10_000, "test": 50_000}
    exam.close()


def heads_given(
    exam: EvalContext, monkeypatch: pytest.MonkeyPatch, best: int = 3
) -> dict[str, Any]:
    """What the linear evaluation hands to its training; it then chooses the head `best`."""
    given: dict[str, Any] = {}

    def train_heads(batches: Any, **more: Any) -> Heads:
        given.update(more, batches=list(batches))
        count = len(more["learning_rates"])
        return Heads(
            torch.zeros(count, more["feat"], more["classes"]), torch.zeros(count, more["classes"])
        )

    monkeypatch.setattr(classify, "train_heads", train_heads)
    monkeypatch.setattr(classify, "choose", lambda heads, *_: (best, [0.5] * len(heads.bias)))
    linear(exam, epochs=3)
    return given


def test_rates_of_the_linear_evaluation_are_for_256_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 images, of which 2 are held out: batches of 18, three epochs are three steps."""
    exam = exam_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 2, "b": 2}))
    given = heads_given(exam, monkeypatch)
    assert given["learning_rates"] == pytest.approx([rate * 18 / 256 for rate in WIDER])
    assert (given["steps"], [len(labels) for _, labels in given["batches"]]) == (3, [18] * 3)
    protocol = exam.results.records[0].protocol
    assert protocol["chosen"] == {"learning_rate_for_256": WIDER[3]}
    monkeypatch.setattr(EvalContext, "classes", 1000)
    given = heads_given(exam, monkeypatch)
    assert given["learning_rates"] == pytest.approx([rate * 18 / 256 for rate in LEARNING_RATES])
    exam.close()


def test_heads_see_new_crops_in_every_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exam = exam_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 2, "b": 2}), antialias=True)
    kinds, augment = [], classify.augment

    def watched(images: Tensor, keys: Any, view: Any, *size: int, **more: Any) -> Tensor:
        kinds.append(view)
        return augment(images, keys, view, *size, **more)

    monkeypatch.setattr(classify, "augment", watched)
    first, second, _ = (
        feats[:, 0].sort().values for feats, _ in heads_given(exam, monkeypatch)["batches"]
    )
    assert (first - second).abs().max() > 1e-3  # else both epochs had the same crops
    assert {(v.antialias, v.jitter, v.gray, v.blur) for v in kinds} == {(True, 0.0, 0.0, 0.0)}
    exam.close()


@pytest.mark.parametrize(("best", "warned"), [(0, True), (5, False), (len(WIDER) - 1, True)])
def test_a_rate_that_ends_the_grid_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int, warned: bool
) -> None:
    exam = exam_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 2, "b": 2}))
    heads_given(exam, monkeypatch, best)
    assert ("warning" in exam.results.records[0].protocol) is warned
    exam.close()


def test_few_labels_are_drawn_by_the_seed_and_judged_by_five_guesses_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven classes; the classifiers fitted again here, and their guesses counted by numpy."""
    drawn: list[Tensor] = []

    def folds(some: Features, exam: EvalContext) -> Any:
        drawn.append(some.index)
        return _folds(some, exam)

    monkeypatch.setattr(classify, "_folds", folds)
    exam = exam_of(place(tmp_path, dict.fromkeys("abcdefg", 20), dict.fromkeys("abcdefg", 5)))
    exam.seed = 5
    few_label(exam)
    found = {(r.task, r.metric): r.value for r in exam.results.records}
    train, test = exam.features("train"), exam.features("test")
    right: dict[int, list[float]] = {1: [], 5: []}
    for draw in range(3):
        some = few_labels(train.labels, 0.1, draw=draw, seed=5)
        assert torch.equal(drawn[draw], train.index[some])
        fit, _, _ = _folds(Features(*(part[some] for part in train)), exam)
        fit = fit.fit if isinstance(fit, Selection) else fit
        logits = fit.logits(test.feats).numpy()
        order = np.argsort(-logits, axis=1)
        for k, shares in right.items():
            shares.append(float((order[:, :k] == test.labels.numpy()[:, None]).any(1).mean()))
    assert found["few labels 10%", "top-1"] == pytest.approx(np.mean(right[1]), abs=1e-9)
    assert found["few labels 10%", "top-5"] == pytest.approx(np.mean(right[5]), abs=1e-9)
    exam.close()


def test_parts_of_train_are_drawn_by_the_seed(tmp_path: Path) -> None:
    exam = exam_of(place(tmp_path, {"a": 30, "b": 30}, {"a": 2, "b": 2}))
    exam.seed = 5
    kept, held = stratified(exam.features("train").labels, 0.1, seed=5)
    assert torch.equal(exam.parts[0], kept)
    assert torch.equal(exam.parts[1], held)
    assert not torch.equal(held, stratified(exam.features("train").labels, 0.1, seed=0).held)
    exam.close()


def test_features_of_another_crop_are_made_anew(tmp_path: Path) -> None:
    place(tmp_path / "set", {"a": 3, "b": 3}, {"a": 2, "b": 2})
    found = []
    for share in (1.0, 0.5):
        exam = exam_of(tmp_path / "set")
        exam.cache, exam.crop = tmp_path / "cache", exam.crop._replace(share=share)
        found.append(exam.features("train").feats)
        exam.close()
    assert not torch.equal(*found)


def test_logistic_regression_is_scikit_learns_on_all_of_train(tmp_path: Path) -> None:
    """With the penalty that was chosen, and no part held out any more."""
    exam = exam_of(place(tmp_path, {"a": 20, "b": 12, "c": 9}, {"a": 8, "b": 4, "c": 6}))
    logistic_regression(exam)
    found = {r.metric: r for r in exam.results.records}
    train, test = exam.features("train"), exam.features("test")
    l2 = found["top-1"].protocol["chosen"]["l2"]
    theirs = LogisticRegression(C=1 / l2, tol=1e-9, max_iter=10_000).fit(train.feats, train.labels)
    p = theirs.predict_proba(test.feats)
    assert found["nll"].value == pytest.approx(log_loss(test.labels, p), rel=1e-4)
    assert found["top-1"].value == pytest.approx(theirs.score(test.feats, test.labels))
    own = {
        name: theirs.score(test.feats[test.labels == i], test.labels[test.labels == i])
        for i, name in enumerate("abc")
    }
    assert found["mean per class"].protocol["per_class"] == pytest.approx(own)
    exam.close()


def test_the_head_that_was_chosen_is_the_one_that_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head i says class 1 of every image, but for the one that is chosen: 5 of 7 are 0."""
    exam = exam_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 5, "b": 2}))

    def train_heads(batches: Any, **more: Any) -> Heads:
        bias = torch.tensor([[0.0, 1.0]]).repeat(len(more["learning_rates"]), 1)
        bias[4] = torch.tensor([1.0, 0.0])
        return Heads(torch.zeros(len(bias), more["feat"], 2), bias)

    monkeypatch.setattr(classify, "train_heads", train_heads)
    monkeypatch.setattr(classify, "choose", lambda heads, *_: (4, [0.5] * len(heads.bias)))
    linear(exam, epochs=1)
    found = {r.metric: r for r in exam.results.records}
    assert found["top-1"].value == pytest.approx(5 / 7)
    assert found["top-1"].protocol["chosen"] == {"learning_rate_for_256": WIDER[4]}
    exam.close()


def test_alignment_is_the_mean_squared_distance_of_views(tmp_path: Path) -> None:
    """The views that the gallery shows first, put through the network here."""
    exam = exam_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 3, "b": 3}))
    probing.geometry(exam)
    (record,) = [r for r in exam.results.records if r.metric == "alignment"]
    (batch,) = exam.batches("test")
    x, y = (
        Mean()(v).double().numpy() for v in probing._pair(exam, batch, probing._view_pair(exam))
    )
    x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
    assert record.value == pytest.approx(np.square(x - y).sum(1).mean(), rel=1e-5)
    exam.close()


def test_a_rank_is_of_all_images_that_its_authors_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is quadratic in images takes fewer: here 4 of 12."""
    monkeypatch.setattr(probing, "SOME", 4)
    exam = exam_of(place(tmp_path, {"a": 2, "b": 2}, {"a": 6, "b": 6}))
    probing.geometry(exam)
    found = {r.metric: (r.value, r.n) for r in exam.results.records}
    h = exam.features("test").feats.double().numpy()
    assert found["RankMe"] == (pytest.approx(entropy_rank(h), rel=1e-5), 12)
    assert found["uniformity"][1] == 4
    exam.close()


def test_features_in_bfloat16_are_not_taken_for_those_in_float32(tmp_path: Path) -> None:
    place(tmp_path / "set", {"a": 3, "b": 3}, {"a": 2, "b": 2})
    splits = open_splits(str(tmp_path / "set"), seed=0)
    subject = FrozenModel(name="a", network=build(tiny()).encoder.eval(), size=16)
    found = []
    for bf16 in (False, True):
        exam = EvalContext(
            subject,
            splits,
            Results("a"),
            device=torch.device("cpu"),
            cache=tmp_path / "c",
            bf16=bf16,
        )
        found.append(exam.features("train").feats)
        exam.close()
    assert not torch.equal(*found)


def test_pairs_of_the_meter_are_drawn_by_the_seed(tmp_path: Path) -> None:
    place(tmp_path, {"a": 3, "b": 3}, {"a": 3, "b": 3})
    config = tiny("method=c-simclr")
    values = []
    for seed in (0, 3):
        torch.manual_seed(0)
        exam = exam_of(tmp_path, method=build(config).eval(), config=config)
        exam.seed = seed
        probing.information(exam)
        found = {r.metric: r for r in exam.results.records}
        assert found["reducible_residual"].protocol["seed"] == seed
        values.append(found["positive_cosine"].value)
        exam.close()
    assert values[0] != values[1]


def test_candidates_of_the_meter_are_of_all_classes_however_a_folder_is_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches of four: in the order of the names each would be of one class."""
    place(tmp_path, {"a": 4, "b": 4, "c": 4}, {"a": 4, "b": 4, "c": 4})
    monkeypatch.setattr(probing, "PAIRS", 4)
    seen: list[list[int]] = []

    def watched(method: Any, batches: Any, *_: Any, **settings: Any) -> Any:
        whole = list(batches)
        seen.extend(batch.label.tolist() for batch in whole)
        return measure_information(method, whole, *_, **settings)

    monkeypatch.setattr(probing, "measure_information", watched)
    config = tiny("method=c-simclr")
    exam = exam_of(tmp_path, method=build(config).eval(), config=config)
    probing.information(exam)
    exam.close()
    assert sorted(label for labels in seen for label in labels) == [0] * 4 + [1] * 4 + [2] * 4
    assert all(len(set(labels)) > 1 for labels in seen)


def test_a_head_sees_other_crops_than_pretraining_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seed of the run, whose views have the numbers 0 and 1."""
    asked: list[int] = []

    def keys(index: Tensor, *, view: int, **others: Any) -> Tensor:
        asked.append(view)
        return image_keys(index, view=view, **others)

    monkeypatch.setattr(classify, "image_keys", keys)
    exam = exam_of(place(tmp_path, {"a": 12, "b": 12}, {"a": 4, "b": 4}))
    classify.linear(exam, epochs=1)
    exam.close()
    assert asked
    assert not {0, 1} & set(asked)
    assert exam.head["learned_from"]


def test_images_of_a_class_that_train_lacks_are_wrong_and_not_in_the_nll(tmp_path: Path) -> None:
    exam = exam_of(place(tmp_path, {"a": 12, "b": 12}, {"a": 4, "b": 4, "c": 3}))
    logistic_regression(exam)
    found = {r.metric: r for r in exam.results.records}
    assert (found["top-1"].n, found["nll"].n) == (11, 8)
    assert found["nll"].protocol["left_out_of_nll"] == 3
    assert found["nll"].value < 10
    assert found["mean per class"].protocol["per_class"]["c"] == 0.0
    exam.close()

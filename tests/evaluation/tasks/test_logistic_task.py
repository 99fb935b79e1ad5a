"""Logistic regression on a data set equals scikit-learn's; penalties are chosen on train."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from tiny_context import context_of, pictures, place, shard

from compressive.evaluation.dataset import open_splits
from compressive.evaluation.logistic import PENALTIES
from compressive.evaluation.tasks import knn, logistic


@pytest.mark.slow
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
    for name in (every, some):
        context = context_of(name)
        knn.run(context)
        logistic.run(context)
        found.append(context.results.records)
        context.close()
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


@pytest.mark.slow
def test_of_few_held_out_images_the_log_loss_chooses_the_penalty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By scikit-learn; of many it is accuracy, and another penalty. The next best is 0.01 worse."""
    pictures(tmp_path / "train", {"a": 20, "b": 20, "c": 20})
    pictures(tmp_path / "test", {"a": 3, "b": 3, "c": 3}, seed=50)
    context = context_of(tmp_path)
    labels, (fit, held) = context.features("train").labels, context.parts
    feats = torch.randn(69, 6, generator=torch.Generator().manual_seed(7))
    feats[:60, :3] += F.one_hot(labels, 3)
    known = {
        split: context.features(split)._replace(feats=some)
        for split, some in (("train", feats[:60]), ("test", feats[60:]))
    }
    monkeypatch.setattr(context, "features", known.__getitem__)
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
        logistic.run(context, few_held_out=few)
        protocol = context.results.records[-1].protocol
        assert protocol["chosen"] == {"l2": PENALTIES[by[how]]}
        words = f"{len(held)} training images by {how}, then fitted on all"
        assert protocol["chosen_on"] == words


def test_logistic_regression_is_scikit_learns_on_all_of_train(tmp_path: Path) -> None:
    """With the penalty that was chosen, and no part held out any more."""
    context = context_of(place(tmp_path, {"a": 20, "b": 12, "c": 9}, {"a": 8, "b": 4, "c": 6}))
    logistic.run(context)
    found = {r.metric: r for r in context.results.records}
    train, test = context.features("train"), context.features("test")
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
    context.close()


def test_images_of_a_class_that_train_lacks_are_wrong_and_not_in_the_nll(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 12, "b": 12}, {"a": 4, "b": 4, "c": 3}))
    logistic.run(context)
    found = {r.metric: r for r in context.results.records}
    assert (found["top-1"].n, found["nll"].n) == (11, 8)
    assert found["nll"].protocol["left_out_of_nll"] == 3
    assert found["nll"].value < 10
    assert found["mean per class"].protocol["per_class"]["c"] == 0.0
    context.close()

"""The logistic task matches scikit-learn; penalties are tuned on train."""

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
def test_unlabeled_images_are_dropped(tmp_path: Path) -> None:
    """Metrics equal those of a dataset without the unlabeled images."""
    every, some = tmp_path / "every", tmp_path / "some"
    every.mkdir()
    some.mkdir()
    for split, labels in (("train", [*"ab", None] * 15), ("test", [None, *"ab"] * 4)):
        file = f"{split}-0.parquet"
        shard(every / file, labels, tmp_path / "pictures")
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
    train_note, test_note = found[0][0].protocol["notes"]
    assert "train: 15 images" in train_note
    assert "test: 4 images" in test_note
    held_out = open_splits(str(every), seed=0, held_out=True)
    assert [len(held_out.train), len(held_out.test)] == [24, 6]
    assert not any("of test" in note for note in held_out.notes), (
        "the held-out split contains a test image"
    )


@pytest.mark.slow
def test_few_held_out_images_select_the_penalty_by_log_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many images, accuracy selects another penalty. The second-best loss is 0.01 higher."""
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
        reference = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=10_000)
        reference.fit(feats[fit], labels[fit])
        losses.append(log_loss(labels[held], reference.predict_proba(feats[held])))
        hits.append(reference.score(feats[held], labels[held]))
    right = [i for i, hit in enumerate(hits) if hit == max(hits)]
    by = {"log-loss": int(np.argmin(losses)), "accuracy": min(right, key=losses.__getitem__)}
    assert by["log-loss"] != by["accuracy"]
    for few, how in ((1000, "log-loss"), (len(held), "accuracy")):
        logistic.run(context, few_held_out=few)
        protocol = context.results.records[-1].protocol
        assert protocol["chosen"] == {"l2": PENALTIES[by[how]]}
        assert f"{len(held)} training images by {how}" in protocol["chosen_on"]


def test_penalty_is_one_of_those_given(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 20, "b": 20}, {"a": 4, "b": 4}))
    logistic.run(context, penalties=(0.3, 3.0, 30.0))
    protocol = context.results.records[-1].protocol
    assert protocol["chosen"]["l2"] in (0.3, 3.0, 30.0)
    assert protocol["converged"] == "3 of 3 penalties"
    context.close()


def test_final_fit_matches_sklearn_on_all_of_train(tmp_path: Path) -> None:
    """The final fit uses the selected penalty and the held-out part."""
    context = context_of(place(tmp_path, {"a": 20, "b": 12, "c": 9}, {"a": 8, "b": 4, "c": 6}))
    logistic.run(context)
    found = {r.metric: r for r in context.results.records}
    train, test = context.features("train"), context.features("test")
    l2 = found["top-1"].protocol["chosen"]["l2"]
    reference = LogisticRegression(C=1 / l2, tol=1e-9, max_iter=10_000).fit(
        train.feats, train.labels
    )
    p = reference.predict_proba(test.feats)
    assert found["nll"].value == pytest.approx(log_loss(test.labels, p), rel=1e-4)
    assert found["top-1"].value == pytest.approx(reference.score(test.feats, test.labels))
    own = {
        name: reference.score(test.feats[test.labels == i], test.labels[test.labels == i])
        for i, name in enumerate("abc")
    }
    assert found["mean per class"].protocol["per_class"] == pytest.approx(own)
    context.close()


def test_class_missing_from_train_counts_as_wrong_and_is_excluded_from_nll(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 12, "b": 12}, {"a": 4, "b": 4, "c": 3}))
    logistic.run(context)
    found = {r.metric: r for r in context.results.records}
    assert (found["top-1"].n, found["nll"].n) == (11, 8)
    assert found["nll"].protocol["left_out_of_nll"] == 3
    assert found["nll"].value < 10
    assert found["mean per class"].protocol["per_class"]["c"] == 0.0
    context.close()

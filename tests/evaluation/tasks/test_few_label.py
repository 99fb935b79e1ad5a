"""Few-label evaluation: subsets depend on the seed, and penalties are tuned inside the subset."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from tiny_context import context_of, pictures, place
from torch import Tensor

from compressive.data.splits import few_labels
from compressive.evaluation.features import Features
from compressive.evaluation.logistic import PENALTIES
from compressive.evaluation.tasks import few_label
from compressive.evaluation.tasks.few_label import FewLabelFit, fit_few


@pytest.mark.parametrize(("each", "held"), [(1, 0), (2, 1), (10, 2)])
def test_penalty_is_tuned_if_classes_have_several_images(
    tmp_path: Path, each: int, held: int
) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    labels = torch.arange(2).repeat(each)
    feats = torch.randn(2 * each, 3, generator=torch.Generator().manual_seed(0))
    some = Features(feats + 3 * labels[:, None], labels, torch.arange(2 * each))
    _, penalty, how, _ = fit_few(some, 2)
    if held:
        assert how.startswith("the log-loss of a fifth")
    else:
        assert penalty == 1.0
        assert how.startswith("not chosen")


def test_penalty_is_not_tuned_if_most_classes_have_one_image(tmp_path: Path) -> None:
    pictures(tmp_path / "train", dict.fromkeys("abcde", 2))
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    feats = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    _, penalty, how, _ = fit_few(Features(feats[:7], labels[:7], torch.arange(7)), 5)
    assert penalty == 1.0
    assert how.startswith("not chosen")
    how = fit_few(Features(feats, labels, torch.arange(8)), 5).chosen_on
    assert how.startswith("the log-loss of a fifth")


def test_label_share_without_every_class_is_skipped(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 10, "b": 10})
    pictures(tmp_path / "test", {"a": 3, "b": 3}, seed=50)
    context = context_of(tmp_path)
    few_label.run(context)
    (skipped,) = context.results.skipped
    assert skipped.startswith("few labels 1%: 0 labels")
    (record,) = context.results.records
    assert record.task == "few labels 10%"
    assert record.protocol["labels"] == [2, 2, 2]


def test_selected_penalty_has_the_lowest_sklearn_log_loss(tmp_path: Path) -> None:
    """A fifth of each class is held out. Accuracy would select another penalty."""
    pictures(tmp_path / "train", {"a": 5, "b": 5, "c": 5})
    labels = torch.arange(3).repeat_interleave(20)
    feats = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    feats[:, :3] += F.one_hot(labels, 3)
    found = fit_few(Features(feats, labels, torch.arange(60)), 3)
    penalty = found.penalty
    held = torch.arange(60) % 5 == 0
    losses, hits = [], []
    for l2 in PENALTIES:
        reference = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=10_000)
        reference.fit(feats[~held], labels[~held])
        losses.append(log_loss(labels[held], reference.predict_proba(feats[held])))
        hits.append(reference.score(feats[held], labels[held]))
    assert penalty == PENALTIES[int(np.argmin(losses))]
    best = max(hits)
    assert penalty != max(l2 for l2, hit in zip(PENALTIES, hits, strict=True) if hit == best)
    assert found.fits.penalties == (penalty,)


def test_penalty_is_one_of_those_given(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 40, "b": 40}, {"a": 3, "b": 3}))
    few_label.run(context, penalties=(0.3, 3.0))
    (record,) = context.results.records
    assert set(record.protocol["chosen"]["l2"]) <= {0.3, 3.0}
    context.close()


@pytest.mark.slow
def test_subsets_depend_on_the_seed_and_report_top_1_and_top_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refit the classifiers for seven classes and count their predictions with numpy."""
    drawn: list[Tensor] = []

    def record_subset(some: Features, *options: Any) -> FewLabelFit:
        drawn.append(some.index)
        return fit_few(some, *options)

    monkeypatch.setattr(few_label, "fit_few", record_subset)
    context = context_of(place(tmp_path, dict.fromkeys("abcdefg", 20), dict.fromkeys("abcdefg", 5)))
    context.seed = 5
    few_label.run(context)
    found = {(r.task, r.metric): r.value for r in context.results.records}
    train, test = context.features("train"), context.features("test")
    right: dict[int, list[float]] = {1: [], 5: []}
    for draw in range(3):
        some = few_labels(train.labels, 0.1, draw=draw, seed=5)
        assert torch.equal(drawn[draw], train.index[some])
        fits = fit_few(Features(*(part[some] for part in train)), 7).fits
        logits = fits.logits(test.feats).numpy()
        order = np.argsort(-logits, axis=1)
        for k, shares in right.items():
            shares.append(float((order[:, :k] == test.labels.numpy()[:, None]).any(1).mean()))
    assert found["few labels 10%", "top-1"] == pytest.approx(np.mean(right[1]), abs=1e-9)
    assert found["few labels 10%", "top-5"] == pytest.approx(np.mean(right[5]), abs=1e-9)
    context.close()

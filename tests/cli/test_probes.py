"""Classifiers on frozen features: a penalty chosen without the test part."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from compressive.cli.probes import linear_probe
from compressive.evaluation.logistic import fit

pytestmark = pytest.mark.usefixtures("one_thread")
PENALTIES = (1e-3, 1e-1, 10.0, 1e3)


def few(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes, one telling feature among many of other scales: the penalty matters."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    feats = torch.randn(count, 20, generator=generator)
    feats[:, 0] += 1.5 * labels
    return feats * torch.logspace(-2, 2, 20) + 3, labels


def sklearns(train: tuple[Tensor, Tensor], feats: Tensor, penalty: float) -> Tensor:
    """Predictions from features standardized by the train part."""
    mean, std = train[0].mean(0), train[0].std(0, unbiased=False)
    model = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=10_000)
    model.fit(((train[0] - mean) / std).double().numpy(), train[1].numpy())
    return torch.from_numpy(model.predict(((feats - mean) / std).double().numpy()))


def test_the_penalty_is_the_best_on_a_fifth_kept_aside() -> None:
    (feats, labels), test = few(60, seed=0), few(400, seed=1)
    held = torch.randperm(60, generator=torch.Generator().manual_seed(0)) % 5 == 0
    assert held.sum() == 12
    part = feats[~held], labels[~held]

    def score(penalty: float) -> tuple[float, float]:
        right = sklearns(part, feats[held], penalty) == labels[held]
        return right.double().mean().item(), penalty

    best = max(PENALTIES, key=score)
    expected = (sklearns((feats, labels), test[0], best) == test[1]).double().mean().item()
    found = linear_probe((feats, labels), test, classes=3, penalties=PENALTIES)
    assert found == pytest.approx(expected)


def test_the_penalty_is_chosen_without_the_test_part() -> None:
    """With test labels that the chosen classifier gets all wrong it is still chosen.

    Each label is moved to the next class: what is right now was predicted one off before. A
    penalty chosen by the test part would be the best there, and another one.
    """
    train, (feats, labels) = few(60, seed=0), few(400, seed=1)
    fits = fit(*train, classes=3, penalties=PENALTIES, standardize=True)
    rights = [
        [
            (fits.logits(feats, i).argmax(1) == truth).double().mean().item()
            for truth in (labels, (labels + 1) % 3)
        ]
        for i in range(len(PENALTIES))
    ]
    pair = [
        linear_probe(train, (feats, truth), classes=3, penalties=PENALTIES)
        for truth in (labels, (labels + 1) % 3)
    ]
    assert min(max(abs(a - b) for a, b in zip(pair, one, strict=True)) for one in rights) < 1e-6
    plain, moved = zip(*rights, strict=True)
    assert plain.index(max(plain)) != moved.index(max(moved))

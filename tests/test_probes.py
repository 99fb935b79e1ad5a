"""Classifiers on frozen features: sklearn's solution, a penalty chosen without the test part."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from compressive.probes import PENALTIES, Linear, linear_probe

pytestmark = pytest.mark.usefixtures("one_thread")


def blobs(count: int, classes: int, dim: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Overlapping classes on axes of very different scale."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    means = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    feats = means[labels] + torch.randn(count, dim, generator=generator)
    return feats * 10.0 ** torch.arange(-2, dim - 2) + 3, labels


@pytest.mark.parametrize("penalty", [1e-3, 1e-1])
@pytest.mark.parametrize("classes", [2, 4])
def test_the_fit_is_sklearns(penalty: float, classes: int) -> None:
    """mean CE + penalty/2 |W|^2 is sklearn's objective at C = 1 / (penalty n), over C n.

    Chances to 2e-3 and weights to 5e-3: ours stops where float32 sees no change, at gradients of
    2e-5, and the flattest directions have a curvature of some 1e-2. Softmax knows weights only up
    to a shift of all classes, so these are compared less their mean.
    """
    feats, labels = blobs(300, classes)
    fitted = Linear(feats, labels, classes=classes, penalty=penalty)
    standard = ((feats - feats.mean(0)) / feats.std(0)).double().numpy()
    # Of two classes sklearn has one vector w, where we have w/2 and -w/2: half of |w|^2.
    strength = (2 if classes == 2 else 1) / (penalty * 300)
    theirs = LogisticRegression(C=strength, tol=1e-10, max_iter=10_000)
    theirs.fit(standard, labels.numpy())
    chances = torch.from_numpy(theirs.predict_proba(standard))
    found = fitted.logits(feats).double().softmax(1)
    torch.testing.assert_close(found, chances, rtol=0, atol=2e-3)
    if classes > 2:
        for ours, other in ((fitted.weight, theirs.coef_.T), (fitted.bias, theirs.intercept_)):
            wide, expected = ours.double(), torch.from_numpy(other)
            wide, expected = (x - x.mean(-1, keepdim=True) for x in (wide, expected))
            torch.testing.assert_close(wide, expected, rtol=5e-3, atol=5e-3)


def test_features_are_standardized_by_the_train_part() -> None:
    """Scale and place of a feature do not matter, and a constant one does no harm."""
    feats, labels = blobs(200, 3)
    test, _ = blobs(50, 3, seed=1)
    scale, shift = torch.tensor([1e3, 1e-3, 7.0, -2.0, 1.0]), torch.randn(5)
    plain = Linear(feats, labels, classes=3, penalty=1e-2)
    moved = Linear(feats * scale + shift, labels, classes=3, penalty=1e-2)
    torch.testing.assert_close(
        plain.logits(test), moved.logits(test * scale + shift), rtol=1e-2, atol=1e-2
    )
    constant = torch.cat([feats, torch.ones(200, 1)], 1)
    with_it = Linear(constant, labels, classes=3, penalty=1e-2)
    found = with_it.logits(torch.cat([test, torch.ones(50, 1)], 1))
    torch.testing.assert_close(found, plain.logits(test), rtol=1e-2, atol=1e-2)


def few(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two classes, one telling feature among many: how strong the penalty is matters."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    feats = torch.randn(count, 20, generator=generator)
    feats[:, 0] += 1.5 * labels
    return feats, labels


def test_the_penalty_is_chosen_without_the_test_part() -> None:
    """With all test labels exchanged the same classifier is as often wrong as it was right.

    Of two classes the one accuracy is then one less the other; a penalty chosen by the test part
    would be another one, as the best there and the worst there are.
    """
    train, (feats, labels) = few(40, seed=0), few(400, seed=1)
    found = linear_probe(train, (feats, labels), classes=2)
    exchanged = linear_probe(train, (feats, 1 - labels), classes=2)
    assert found + exchanged == pytest.approx(1)
    each = [
        (Linear(*train, classes=2, penalty=p).logits(feats).argmax(1) == labels).double().mean()
        for p in PENALTIES
    ]
    assert min(abs(found - one) for one in each) < 1e-6  # it is one of these
    assert max(each) - min(each) > 0.005  # which differ


def test_the_penalty_is_the_best_on_the_part_kept_aside() -> None:
    (feats, labels), test = few(40, seed=0), few(400, seed=1)
    chosen = torch.randperm(40, generator=torch.Generator().manual_seed(0)) % 5 == 0
    assert chosen.sum() == 8
    scores = {}
    for penalty in PENALTIES:
        fitted = Linear(feats[~chosen], labels[~chosen], classes=2, penalty=penalty)
        right = fitted.logits(feats[chosen]).argmax(1) == labels[chosen]
        scores[penalty] = right.double().mean().item()
    best = max(PENALTIES, key=scores.__getitem__)
    final = Linear(feats, labels, classes=2, penalty=best)
    expected = (final.logits(test[0]).argmax(1) == test[1]).double().mean().item()
    assert linear_probe((feats, labels), test, classes=2) == pytest.approx(expected)

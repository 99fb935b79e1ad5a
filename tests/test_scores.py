"""Values per image whose means are the metrics."""

import pytest
import torch

from compressive import metrics
from compressive.evaluation.results import Results
from compressive.evaluation.scores import add_scores, recall, reliability, right

LOGITS = torch.randn(200, 7, generator=torch.Generator().manual_seed(0)) * 2
LABELS = torch.randint(6, (200,), generator=torch.Generator().manual_seed(1))  # class 6 is absent


def test_every_mean_is_the_metric() -> None:
    results = Results("a")
    add_scores(results, "linear", "set", LOGITS, LABELS, {})
    expected = {
        "top-1": metrics.top_k_accuracy(LOGITS, LABELS),
        "top-5": metrics.top_k_accuracy(LOGITS, LABELS, 5),
        "mean per class": metrics.mean_per_class_accuracy(LOGITS, LABELS),
        "nll": metrics.nll(LOGITS, LABELS),
        "brier": metrics.brier(LOGITS, LABELS),
        "ece": metrics.ece(LOGITS, LABELS),
    }
    found = {record.metric: record.value for record in results.records}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # float32 there, float64 here
        assert found[name] == pytest.approx(float(value), rel=1e-5), name
    assert all(record.n == 200 for record in results.records)


def test_recall_is_counted_class_by_class() -> None:
    hits = right(LOGITS, LABELS)
    found = recall(hits, LABELS, ["a", "b", "c", "d", "e", "f", "g"])
    assert list(found) == ["a", "b", "c", "d", "e", "f"]
    for i, name in enumerate(found):
        mine = [bool(h) for h, label in zip(hits, LABELS, strict=True) if label == i]
        assert found[name] == pytest.approx(sum(mine) / len(mine))


def test_the_gaps_of_the_reliability_diagram_are_the_calibration_error() -> None:
    p = LOGITS.double().softmax(1)
    bins = reliability(p, right(LOGITS, LABELS))
    assert sum(count for _, _, count in bins) == 200
    gap = sum(count * abs(mean - accuracy) for mean, accuracy, count in bins) / 200
    # float32 there, float64 here
    assert gap == pytest.approx(float(metrics.ece(LOGITS, LABELS)), rel=1e-5)

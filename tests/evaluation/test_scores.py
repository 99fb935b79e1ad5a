"""Per-image values have the metrics as their means."""

import pytest
import torch

from compressive import metrics
from compressive.evaluation.results import Results
from compressive.evaluation.scores import add_scores, per_class_values, recall, reliability
from compressive.metrics import hits

LOGITS = torch.randn(200, 7, generator=torch.Generator().manual_seed(0)) * 2
LABELS = torch.randint(6, (200,), generator=torch.Generator().manual_seed(1))  # class 6 is absent


def test_means_match_the_metrics() -> None:
    results = Results("a")
    add_scores(results, "linear", "set", LOGITS, LABELS, {}, seen=LABELS)
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
        # the reference uses float32, the record float64
        assert found[name] == pytest.approx(float(value), rel=1e-5), name
    assert all(record.n == 200 for record in results.records)


def test_unseen_class_is_never_in_the_top_5() -> None:
    """Only four of eight classes are known, so the fifth prediction is arbitrary."""
    logits = torch.cat([LOGITS[:, :4], torch.full((200, 4), -1e30)], 1)
    labels, results = torch.arange(200) % 8, Results("a")
    add_scores(results, "linear", "set", logits, labels, {}, seen=torch.arange(4))
    (top_5,) = [record.value for record in results.records if record.metric == "top-5"]
    assert top_5 == 0.5


def test_recall_matches_a_count_per_class() -> None:
    right = hits(LOGITS, LABELS)
    found = recall(right, LABELS, ["a", "b", "c", "d", "e", "f", "g"])
    assert list(found) == ["a", "b", "c", "d", "e", "f"]
    for i, name in enumerate(found):
        of_class = [bool(h) for h, label in zip(right, LABELS, strict=True) if label == i]
        assert found[name] == pytest.approx(sum(of_class) / len(of_class))


def test_reliability_gaps_sum_to_the_ece() -> None:
    p = LOGITS.double().softmax(1)
    bins = reliability(p, hits(LOGITS, LABELS))
    assert sum(count for _, _, count in bins) == 200
    gap = sum(count * abs(mean - accuracy) for mean, accuracy, count in bins) / 200
    # the reference uses float32, the record float64
    assert gap == pytest.approx(float(metrics.ece(LOGITS, LABELS)), rel=1e-5)


def test_confidence_of_1_uses_the_same_bin_in_diagram_and_ece() -> None:
    """One prediction is certain and wrong, the other correct; in one bin they would cancel."""
    logits = torch.tensor([[800.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    labels = torch.tensor([1, 0])
    bins = reliability(logits.softmax(1), hits(logits, labels))
    assert [count for _, _, count in bins] == [1, 1]
    gap = sum(count * abs(mean - accuracy) for mean, accuracy, count in bins) / 2
    assert gap == pytest.approx(float(metrics.ece(logits, labels)), abs=1e-12)


def test_unseen_class_counts_as_wrong_and_is_excluded_from_nll() -> None:
    """This holds for any prediction, so that two classifiers are scored on the same images."""
    results = Results("a")
    seen = torch.tensor([0, 1, 2, 4, 5])
    protocol = {"classifier": "any"}
    add_scores(results, "linear", "set", LOGITS, LABELS, protocol, seen=seen)
    found = {record.metric: record for record in results.records}
    known = LABELS != 3
    assert found["nll"].n == int(known.sum()) < 200
    assert found["nll"].value == pytest.approx(float(metrics.nll(LOGITS[known], LABELS[known])))
    assert found["nll"].protocol["left_out_of_nll"] == int((~known).sum())
    assert found["top-1"].n == 200


@pytest.mark.parametrize("sizes", [(990, 10), (200, 20, 5, 2), (50, 50, 50)])
def test_per_class_interval_matches_stratified_resampling(
    sizes: tuple[int, ...],
) -> None:
    """The reference resamples within each class. With 4,000 draws both agree to a few percent."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    hits = torch.rand(len(labels), generator=draw) < 0.8
    results = Results("a")
    record = results.add("a", "b", "mean per class", per_class_values(hits, labels), protocol={})
    assert record.value == pytest.approx(
        sum(float(hits[labels == c].double().mean()) for c in range(len(sizes))) / len(sizes)
    )
    spread = sum(
        float(hits[labels == c].double().var(correction=0)) / n for c, n in enumerate(sizes)
    )
    wide = 2 * 1.96 * spread**0.5 / len(sizes)
    assert record.low is not None
    assert record.high is not None
    clipped = min(1.0, record.value + wide / 2) - (record.value - wide / 2)
    assert record.high - record.low == pytest.approx(clipped, rel=0.12)


def test_perfect_accuracy_has_a_zero_width_interval() -> None:
    labels = torch.tensor([0] * 99 + [1])
    record = Results("a").add(
        "a", "b", "mean per class", per_class_values(torch.ones(100).bool(), labels), protocol={}
    )
    assert (record.low, record.value, record.high) == (1.0, 1.0, 1.0)

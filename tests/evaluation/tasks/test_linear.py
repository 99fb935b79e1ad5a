"""Linear evaluation: heads match torch's SGD, and learning rates are tuned on train only."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_context import context_of, place
from torch import Tensor, nn

from compressive.evaluation.context import EvalContext, TaskOptions
from compressive.evaluation.tasks import linear
from compressive.evaluation.tasks.linear import LEARNING_RATES, WIDER, Heads, choose, train_heads
from compressive.rng import image_keys

RATES = (0.8, 0.2, 0.05)


STEPS = 12


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    feats = torch.randn(STEPS, 16, 5, generator=generator).relu()
    labels = torch.randint(4, (STEPS, 16), generator=generator)
    return list(zip(feats, labels, strict=True))


def trained() -> Heads:
    return train_heads(
        batches(),
        feat=5,
        classes=4,
        steps=STEPS,
        learning_rates=RATES,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("which", range(len(RATES)))
def test_each_head_matches_torch_nesterov_sgd_with_cosine_decay(which: int) -> None:
    head = nn.Linear(5, 4)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.SGD(head.parameters(), RATES[which], momentum=0.9, nesterov=True)
    for step, (feats, labels) in enumerate(batches()):
        optimizer.param_groups[0]["lr"] = (
            0.5 * RATES[which] * (1 + math.cos(math.pi * step / STEPS))
        )
        optimizer.zero_grad()
        F.cross_entropy(head(feats), labels).backward()
        optimizer.step()
    found = trained()
    # Twelve float32 steps with another summation order.
    torch.testing.assert_close(found.weight[which].T, head.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.bias[which], head.bias.detach(), rtol=1e-5, atol=1e-6)


def test_logits_match_each_head() -> None:
    heads, (feats, _) = trained(), batches()[0]
    logits = heads.logits(feats)
    for i in range(len(RATES)):
        expected = feats @ heads.weight[i] + heads.bias[i]
        torch.testing.assert_close(logits[i], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(heads.only(i).logits(feats)[0], logits[i])


def test_choose_picks_best_accuracy_then_lowest_log_loss() -> None:
    """Three images, one mislabeled; every head is a scaled identity."""
    feats, labels = torch.eye(2)[[0, 1, 1]], torch.tensor([0, 1, 0])
    scales = (-1.0, 8.0, 0.6, 2.0)  # inverted; overconfident; best calibrated; more confident
    heads = Heads(torch.stack([scale * torch.eye(2) for scale in scales]), torch.zeros(4, 2))
    best, accuracy = choose(heads, feats, labels, "accuracy")
    losses = [F.cross_entropy(feats * scale, labels) for scale in scales]
    assert accuracy == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3])
    assert best == 2 == losses.index(min(losses))
    assert choose(Heads(heads.weight[[3, 1]], heads.bias[:2]), feats, labels, "accuracy")[0] == 0
    # A low log-loss does not outweigh a wrong prediction: a tiny inverted scale loses.
    mixed = Heads(torch.stack([-0.01 * torch.eye(2), 8 * torch.eye(2)]), torch.zeros(2, 2))
    assert choose(mixed, feats, labels, "accuracy")[0] == 1
    assert choose(mixed, feats, labels, "log-loss")[0] == 0


def run_with_fake_heads(
    context: EvalContext, monkeypatch: pytest.MonkeyPatch, best: int = 3
) -> dict[str, Any]:
    """Run the task with stubbed training that selects head `best`; return its arguments."""
    given: dict[str, Any] = {}

    def train_heads(batches: Any, **more: Any) -> Heads:
        given.update(more, batches=list(batches))
        count = len(more["learning_rates"])
        return Heads(
            torch.zeros(count, more["feat"], more["classes"]), torch.zeros(count, more["classes"])
        )

    monkeypatch.setattr(linear, "train_heads", train_heads)
    monkeypatch.setattr(linear, "choose", lambda heads, *_: (best, [0.5] * len(heads.bias)))
    context.options = TaskOptions(epochs=3)
    linear.run(context)
    return given


def test_learning_rates_scale_from_batch_size_256(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 of 20 images are held out, so batches have 18 images and three epochs are three steps."""
    context = context_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 2, "b": 2}))
    given = run_with_fake_heads(context, monkeypatch)
    assert given["learning_rates"] == pytest.approx([rate * 18 / 256 for rate in WIDER])
    assert (given["steps"], [len(labels) for _, labels in given["batches"]]) == (3, [18] * 3)
    protocol = context.results.records[0].protocol
    assert protocol["chosen"] == {"learning_rate_for_256": WIDER[3]}
    assert protocol["classifier"].endswith("rate by log-loss")
    assert max(WIDER) <= 3.2  # higher rates reduce accuracy and calibration
    monkeypatch.setattr(EvalContext, "classes", 1000)
    given = run_with_fake_heads(context, monkeypatch)
    assert given["learning_rates"] == pytest.approx([rate * 18 / 256 for rate in LEARNING_RATES])
    assert context.results.records[0].protocol["classifier"].endswith("rate by accuracy")
    context.close()


def test_every_epoch_uses_new_crops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 2, "b": 2}), antialias=True)
    kinds, augment = [], linear.augment

    def record_view(images: Tensor, keys: Any, view: Any, *size: int, **more: Any) -> Tensor:
        kinds.append(view)
        return augment(images, keys, view, *size, **more)

    monkeypatch.setattr(linear, "augment", record_view)
    first, second, _ = (
        feats[:, 0].sort().values
        for feats, _ in run_with_fake_heads(context, monkeypatch)["batches"]
    )
    assert (first - second).abs().max() > 1e-3  # otherwise both epochs used the same crops
    assert {(v.antialias, v.jitter, v.gray, v.blur) for v in kinds} == {(True, 0.0, 0.0, 0.0)}
    context.close()


@pytest.mark.parametrize(("best", "warned"), [(0, True), (5, False), (len(WIDER) - 1, True)])
def test_learning_rate_at_grid_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int, warned: bool
) -> None:
    context = context_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 2, "b": 2}))
    run_with_fake_heads(context, monkeypatch, best)
    assert ("warning" in context.results.records[0].protocol) is warned
    context.close()


def test_selected_head_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the selected head predicts class 0, which 5 of 7 test images have."""
    context = context_of(place(tmp_path, {"a": 10, "b": 10}, {"a": 5, "b": 2}))

    def train_heads(batches: Any, **more: Any) -> Heads:
        bias = torch.tensor([[0.0, 1.0]]).repeat(len(more["learning_rates"]), 1)
        bias[4] = torch.tensor([1.0, 0.0])
        return Heads(torch.zeros(len(bias), more["feat"], 2), bias)

    monkeypatch.setattr(linear, "train_heads", train_heads)
    monkeypatch.setattr(linear, "choose", lambda heads, *_: (4, [0.5] * len(heads.bias)))
    context.options = TaskOptions(epochs=1)
    linear.run(context)
    found = {r.metric: r for r in context.results.records}
    assert found["top-1"].value == pytest.approx(5 / 7)
    assert found["top-1"].protocol["chosen"] == {"learning_rate_for_256": WIDER[4]}
    context.close()


def test_head_crops_differ_from_pretraining_crops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pretraining uses view numbers 0 and 1 with the same seed."""
    views: list[int] = []

    def keys(index: Tensor, *, view: int, **others: Any) -> Tensor:
        views.append(view)
        return image_keys(index, view=view, **others)

    monkeypatch.setattr(linear, "image_keys", keys)
    context = context_of(place(tmp_path, {"a": 12, "b": 12}, {"a": 4, "b": 4}))
    context.options = TaskOptions(epochs=1)
    linear.run(context)
    context.close()
    assert views
    assert not {0, 1} & set(views)
    assert context.head["learned_from"]

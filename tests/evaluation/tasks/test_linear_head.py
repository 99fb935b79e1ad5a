"""The heads of linear evaluation are those that torch's SGD trains one by one."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compressive.evaluation.tasks.linear_head import Heads, choose, train_heads

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
def test_each_head_is_what_sgd_with_nesterov_and_a_cosine_makes_of_it_alone(which: int) -> None:
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
    # Twelve steps in float32, summed in another order.
    torch.testing.assert_close(found.weight[which].T, head.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.bias[which], head.bias.detach(), rtol=1e-5, atol=1e-6)


def test_logits_are_those_of_each_head() -> None:
    heads, (feats, _) = trained(), batches()[0]
    logits = heads.logits(feats)
    for i in range(len(RATES)):
        expected = feats @ heads.weight[i] + heads.bias[i]
        torch.testing.assert_close(logits[i], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(heads.only(i).logits(feats)[0], logits[i])


def test_the_head_that_is_right_most_often_is_chosen_and_of_equals_the_least_log_loss() -> None:
    """Three images, one of another class than its feature says; heads are scales of the truth."""
    feats, labels = torch.eye(2)[[0, 1, 1]], torch.tensor([0, 1, 0])
    scales = (-1.0, 8.0, 0.6, 2.0)  # wrong where the others are right; too sure; the best; surer
    heads = Heads(torch.stack([scale * torch.eye(2) for scale in scales]), torch.zeros(4, 2))
    best, accuracy = choose(heads, feats, labels)
    losses = [F.cross_entropy(feats * scale, labels) for scale in scales]
    assert accuracy == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3])
    assert best == 2 == losses.index(min(losses))
    assert choose(Heads(heads.weight[[3, 1]], heads.bias[:2]), feats, labels)[0] == 0
    # A low log-loss does not make up for an error: the smallest scale, the other way around.
    mixed = Heads(torch.stack([-0.01 * torch.eye(2), 8 * torch.eye(2)]), torch.zeros(2, 2))
    assert choose(mixed, feats, labels)[0] == 1

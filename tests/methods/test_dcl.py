"""DCL against a naive loop over the paper's equation, and against SimCLR."""

import math

import pytest
import torch
from conftest import unit_vectors
from torch import Tensor, nn

from compressive.config import Config, override
from compressive.methods import build
from compressive.methods.dcl import DCL, dcl_loss
from compressive.objectives import simclr_loss


def dcl_by_hand(x: Tensor, y: Tensor, temperature: float, own: bool) -> float:
    """Compute eq. 6 of Yeh et al. (2021) image by image; the positive is not in the sum."""
    total = 0.0
    for anchors, others in ((x, y), (y, x)):
        for i in range(len(x)):
            negatives = [others[j] for j in range(len(x)) if j != i]
            negatives += [anchors[j] for j in range(len(x)) if own and j != i]
            scores = [math.exp(float(anchors[i] @ each) / temperature) for each in negatives]
            total += math.log(sum(scores)) - float(anchors[i] @ others[i]) / temperature
    return total / len(x)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_loss_matches_a_loop_over_the_equation(temperature: float, own: bool) -> None:
    x, y = unit_vectors(2, 7, 5)
    found = dcl_loss(3 * x, 0.5 * y, temperature=temperature, own_view_negatives=own)
    # float64 sums of about 100 terms
    assert found.loss.item() == pytest.approx(dcl_by_hand(x, y, temperature, own), rel=1e-12)
    assert found.loss.item() == pytest.approx((found.nll_x + found.nll_y).mean().item(), rel=1e-12)


def test_loss_is_info_nce_without_the_positive_in_the_denominator() -> None:
    """Per image it is -log(p / (1 - p)), where -log p is SimCLR's loss."""
    x, y = unit_vectors(2, 6, 4, seed=1)
    nll = simclr_loss(x, y, temperature=0.5).nll_x
    torch.testing.assert_close(
        dcl_loss(x, y, temperature=0.5).nll_x, nll + torch.log1p(-(-nll).exp())
    )


def test_gradient_does_not_vanish_for_a_matched_pair() -> None:
    """SimCLR's gradient has a factor 1 - p, which vanishes; DCL's does not."""
    x = torch.eye(4, dtype=torch.float64)[:3]
    grads = []
    for loss in (simclr_loss, dcl_loss):
        y = x.clone().requires_grad_()
        loss(x + torch.tensor([0, 0, 0, 0.1]), y, temperature=0.05).loss.backward()
        assert y.grad is not None
        grads.append(y.grad[0].norm().item())
    simclr, dcl = grads
    assert simclr < 1e-6 < 0.1 < dcl


def test_loss_is_finite_at_low_temperature() -> None:
    """The positive logit is 100 above all negatives, so 1 - p rounds to 0 in float32."""
    x = torch.eye(4)
    y = x.clone().requires_grad_()
    loss = dcl_loss(x, y, temperature=0.01).loss
    loss.backward()
    assert loss.item() == pytest.approx(2 * (math.log(6) - 100), rel=1e-5)
    assert y.grad is not None
    assert y.grad.isfinite().all()


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_invalid_temperature_is_rejected(value: float) -> None:
    x = unit_vectors(4, 3)
    with pytest.raises(ValueError, match=f"temperature.*{value}"):
        dcl_loss(x, x, temperature=value)


def test_config_sets_temperature_and_negatives() -> None:
    changes = ("method=dcl", "bottleneck.kappa_b=4", "decoder.same_view_negatives=false")
    method = build(override(Config(), "network.name=test_resnet", *changes))
    assert isinstance(method, DCL)
    assert (method.temperature, method.own_view_negatives) == (0.25, False)
    assert DCL(nn.Identity(), nn.Identity()).own_view_negatives

"""torch.func.grad, jacrev and vmap give what autograd and a loop over samples give."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import unit_vectors
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.func import functional_call, grad, jacrev, vjp, vmap

from compressive import info_nce as info_nce_module
from compressive import objectives
from compressive.checks import in_func_transform
from compressive.distributions.uniform import HypersphericalUniform
from compressive.distributions.vmf import VonMisesFisher
from compressive.methods import Method
from compressive.methods.bootstrap import Bootstrap
from compressive.methods.contrastive import Contrastive
from compressive.methods.dcl import DCL, dcl_loss
from compressive.methods.vicreg import VICReg, vicreg_loss

Loss = Callable[[Tensor, Tensor], Tensor]
Z_X, Z_Y = unit_vectors(2, 6, 8, seed=1)
NOISE = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def _vmf(a: Tensor, b: Tensor) -> VonMisesFisher:
    return VonMisesFisher(_unit(a), b.square().sum(-1))


def _csimclr(**given: object) -> Loss:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return objectives.csimclr_loss(a, b, **given).loss  # type: ignore[arg-type]

    return loss


FIXED: dict[str, Loss] = {  # without random numbers
    "simclr": lambda a, b: objectives.simclr_loss(a, b).loss,
    "simclr, other view": lambda a, b: objectives.simclr_loss(a, b, own_view_negatives=False).loss,
    "c-simclr": _csimclr(z_x=Z_X, z_y=Z_Y),
    "c-simclr, analytic": _csimclr(z_x=Z_X, z_y=Z_Y, residual_estimator="analytic"),
    "c-simclr, likelihood": _csimclr(z_x=Z_X, z_y=Z_Y, adaptive_weight="likelihood"),
    "c-simclr, rank": _csimclr(z_x=Z_X, z_y=Z_Y, adaptive_weight="rank"),
    "byol": lambda a, b: objectives.byol_loss(a, b).loss,
    "c-byol": lambda a, b: objectives.cbyol_loss(a, b, a, b, z=Z_X).loss,
    "dcl": lambda a, b: dcl_loss(a, b).loss,
    "vicreg": lambda a, b: vicreg_loss(a, b).loss,
    "info_nce": lambda a, b: objectives.info_nce(_unit(a), _unit(b), 9.0, own=_unit(a)).mean(),
    "log_prob": lambda a, b: VonMisesFisher(_unit(a), 10.0).log_prob(_unit(b)).mean(),
    "log_prob, kappa": lambda a, b: _vmf(a, b).log_prob(Z_X).mean(),
    "entropy": lambda a, b: _vmf(a, b).entropy().mean(),
    "mean": lambda a, b: _vmf(a, b).mean.mul(Z_X).sum(),
    "variance": lambda a, b: _vmf(a, b).variance.mul(Z_X).sum(),
    "kl": lambda a, b: kl_divergence(_vmf(a, b), VonMisesFisher(_unit(b), 4.0)).mean(),
    "kl, uniform": lambda a, b: kl_divergence(_vmf(a, b), HypersphericalUniform(8)).mean(),
}
SAMPLED: dict[str, Loss] = {  # differentiable once
    "sample": lambda a, b: VonMisesFisher(_unit(a), 10.0).from_noise(NOISE.clone()).mul(b).sum(),
    "sample, kappa": lambda a, b: _vmf(a, b).from_noise(NOISE.clone()).mul(b).sum(),
    "sample, large dim": lambda a, b: (
        VonMisesFisher(_unit(a.repeat(1, 8)), 300.0).from_noise(NOISE.repeat(1, 8)).square().sum()
        + VonMisesFisher(_unit(a.repeat(1, 8)), 300.0).from_noise(NOISE.repeat(1, 8))[:, 0].sum()
        + b.sum()
    ),
}
ALL = FIXED | SAMPLED


def pairs(count: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, count, 6, 8, dtype=torch.float64, generator=random)
    return a, b


def by_autograd(loss: Loss, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    one, two = torch.autograd.grad(loss(a, b), (a, b), allow_unused=True)
    return one if one is not None else a * 0, two if two is not None else b * 0


@pytest.mark.parametrize("name", ALL)
def test_grad_and_jacrev_are_those_of_autograd(name: str) -> None:
    (a,), (b,) = pairs(1)
    expected = by_autograd(ALL[name], a, b)
    for found in (grad(ALL[name], (0, 1))(a, b), jacrev(ALL[name], (0, 1))(a, b)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_vmap_is_a_loop(name: str) -> None:
    a, b = pairs(3)
    values = torch.stack([ALL[name](x, y) for x, y in zip(a, b, strict=True)])
    torch.testing.assert_close(vmap(ALL[name])(a, b), values, rtol=1e-12, atol=1e-12)
    each = [by_autograd(ALL[name], x, y) for x, y in zip(a, b, strict=True)]
    gradients = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    found = vmap(grad(ALL[name], (0, 1)))(a, b)
    torch.testing.assert_close(found, gradients, rtol=1e-11, atol=1e-12)
    # Only one argument has the axis.
    one = torch.stack([ALL[name](a[0], y) for y in b])
    torch.testing.assert_close(vmap(ALL[name], (None, 0))(a[0], b), one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in FIXED if name != "variance"])  # third order
def test_second_derivatives_are_those_of_autograd(name: str) -> None:
    both = torch.cat(pairs(1)).requires_grad_()

    def loss(both: Tensor) -> Tensor:
        return FIXED[name](*both)

    (first,) = torch.autograd.grad(loss(both), both, create_graph=True)
    some = [0, 9, 95]
    rows = [torch.autograd.grad(first.flatten()[i], both, retain_graph=True)[0] for i in some]
    found = jacrev(grad(loss))(both.detach()).reshape(96, 2, 6, 8)[some]
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_refuse_second_derivatives(name: str) -> None:
    (a,), (b,) = pairs(1)
    with pytest.raises(RuntimeError, match=r"VonMisesFisher .* once"):
        jacrev(grad(SAMPLED[name]))(a, b)
    a = a.requires_grad_()
    (first,) = torch.autograd.grad(SAMPLED[name](a, b), a, create_graph=True)
    with pytest.raises(RuntimeError, match=r"VonMisesFisher .* once"):
        first.sum().backward()


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_rsample_in_vmap_follows_its_randomness(randomness: str) -> None:
    mu = unit_vectors(1, 8).expand(4, 8)

    def draw(mu: Tensor, kappa: Tensor) -> Tensor:
        return VonMisesFisher(mu, kappa).rsample()

    found = vmap(draw, randomness=randomness)(mu, torch.full((4,), 5.0, dtype=torch.float64))
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    assert len(found.unique(dim=0)) == (1 if randomness == "same" else 4)


def test_jacobian_of_a_sample() -> None:
    (mu,) = unit_vectors(1, 8)
    noise = NOISE[0]

    def draw(kappa: Tensor) -> Tensor:
        return VonMisesFisher(mu, kappa).from_noise(noise.clone())

    kappa, step = torch.tensor(5.0, dtype=torch.float64), 1e-6
    expected = (draw(kappa + step) - draw(kappa - step)) / (2 * step)
    torch.testing.assert_close(jacrev(draw)(kappa), expected, rtol=1e-6, atol=1e-8)


class Flat(nn.Module):
    """A network without batch statistics, which vmap cannot update."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 4 * 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)).tanh()


METHODS: dict[str, Callable[[], Method]] = {
    "simclr": lambda: Contrastive(Flat(), nn.Linear(8, 8)),
    "c-simclr": lambda: Contrastive(Flat(), nn.Linear(8, 8), kappa_e=50.0),
    "simsiam": lambda: Bootstrap(Flat(), nn.Linear(8, 8), nn.Linear(8, 8)),
    "dcl": lambda: DCL(Flat(), nn.Linear(8, 8)),
    "vicreg": lambda: VICReg(Flat(), nn.Linear(8, 8)),
}


@pytest.mark.parametrize("name", METHODS)
def test_gradients_of_methods_by_functional_call(name: str) -> None:
    method = METHODS[name]()
    x, y = torch.randn(2, 5, 3, 4, 4)
    weights = {key: value.detach() for key, value in method.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        return functional_call(method, weights, ([x, y],)).loss

    found = grad(loss)(weights)
    torch.manual_seed(0)
    method([x, y]).loss.backward()
    for key, weight in method.named_parameters():
        torch.testing.assert_close(found[key], weight.grad, rtol=1e-5, atol=1e-6)


def test_many_logits_are_kept_inside_of_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    (a,), (b,) = pairs(1)
    expected = by_autograd(FIXED["simclr"], a, b)
    monkeypatch.setattr(info_nce_module, "_KEEP", 4)
    torch.testing.assert_close(by_autograd(FIXED["simclr"], a, b), expected)  # in blocks
    torch.testing.assert_close(grad(FIXED["simclr"], (0, 1))(a, b), expected)


def test_values_are_checked_in_grad_and_not_in_vmap() -> None:
    bad = torch.zeros(2, 6, 8)
    with pytest.raises(ValueError, match="row 0"):
        grad(FIXED["simclr"])(bad[0], bad[1])
    vmap(FIXED["simclr"])(bad, bad)
    assert not in_func_transform()


def test_vjp_of_per_image_values() -> None:
    (a,), (b,) = pairs(1)
    pull = vjp(lambda a: objectives.simclr_loss(a, b).nll_x, a)[1]
    (found,) = vmap(pull)(torch.eye(6, dtype=torch.float64))
    a = a.requires_grad_()
    each = objectives.simclr_loss(a, b).nll_x
    rows = [torch.autograd.grad(value, a, retain_graph=True)[0] for value in each]
    torch.testing.assert_close(found, torch.stack(rows))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch deprecates it
def test_scripting_is_not_supported() -> None:
    with pytest.raises(Exception, match="keyword-only"):
        torch.jit.script(objectives.simclr_loss)

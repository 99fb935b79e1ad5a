"""Functions that must compile into one graph, run by test_compile.py without shape checks."""

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from compressive import VonMisesFisher
from compressive.distributions import special
from compressive.objectives import byol_loss, cbyol_loss, csimclr_loss, simclr_loss


def fixed(r: torch.Tensor, kappa: torch.Tensor, sharpness: float, dim: int) -> torch.Tensor:
    p = VonMisesFisher(F.normalize(r[:, :dim], dim=-1), sharpness)
    z = p.rsample()
    return p.log_prob(z).sum() + z.square().sum() * 0.1 + p.entropy().sum()


def learned(r: torch.Tensor, kappa: torch.Tensor) -> torch.Tensor:
    p = VonMisesFisher(F.normalize(r, dim=-1), kappa.exp())
    z = p.rsample()
    return (p.log_prob(z) + p.entropy()).sum() + z[:, 0].sum()


def small(r: torch.Tensor, kappa: torch.Tensor) -> torch.Tensor:
    """Sample with a fixed kappa without a short polynomial; look up functions of two dimensions."""
    sample = VonMisesFisher(F.normalize(r[:, :3], dim=-1), 0.5).rsample().square()[:, 0].sum()
    return sample + sum(special.log_mode_density(kappa, r[:, :n].shape[-1]).sum() for n in (3, 6))


def objectives(r: torch.Tensor, kappa: torch.Tensor) -> torch.Tensor:
    x, y = r.chunk(2)
    p = VonMisesFisher(F.normalize(x, dim=-1), 16384.0)
    total = simclr_loss(x, y).loss + csimclr_loss(x, y).loss + byol_loss(x, y).loss
    return total + cbyol_loss(x, y, x, y, z=p.rsample(), residual_estimator="analytic").loss


# Further arguments of each call: from the second call on, torch treats a number as symbolic.
CALLS = {
    "fixed": [(64.0, 256), (16384.0, 256), (1024.0, 64)],
}


def results(function: Callable[..., torch.Tensor], *further: float) -> list[torch.Tensor]:
    """Return value and gradients, always from the same inputs and noise."""
    torch.manual_seed(0)
    r = torch.randn(32, 256, dtype=torch.float64).requires_grad_()
    kappa = torch.linspace(0.5, 6, 32, dtype=torch.float64).requires_grad_()
    torch.manual_seed(1)
    value = function(r, kappa, *further)
    grads = torch.autograd.grad(value, (r, kappa), allow_unused=True)
    return [value.detach(), *(grad for grad in grads if grad is not None)]


def main(backends: dict[str, str]) -> None:
    """Compare each compiled function to the eager one; `backends` maps names to backends."""
    # By default, Inductor draws its own random numbers.
    torch._inductor.config.fallback_random = True  # pyright: ignore
    for name, backend in backends.items():
        function = globals()[name]
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for further in CALLS.get(name, [()]):
            pairs = zip(results(compiled, *further), results(function, *further), strict=True)
            for graph, eager in pairs:
                torch.testing.assert_close(graph, eager, rtol=1e-9, atol=1e-9)
        print(name, "compiles into one graph")


if __name__ == "__main__":
    main(dict(word.split("=") for word in sys.argv[1:]))

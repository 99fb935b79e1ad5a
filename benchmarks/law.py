"""Test with ten million draws each whether the angle of a vMF sample has the exact distribution.

    python benchmarks/law.py --device cuda

Runs Kolmogorov-Smirnov tests at n in {2, 3, 16, 256, 2048} and kappa in {0, 0.1, 10, 1024, 16384,
1e6}, with fixed and learned kappa, against the integral in tests/exact.py. Prints one JSON line.
The verdict is the smallest p value times the number of tests (Bonferroni).
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from scipy import stats

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
from exact import CosineLaw  # pyright: ignore[reportMissingImports]
from timing import environment

from compressive import VonMisesFisher


def angles(p: VonMisesFisher, draws: int) -> torch.Tensor:
    """Return angles to the mean in float64, computed in chunks that fit into memory."""
    chunk = 2**28 // max(p.dim, 512)
    found = []
    for start in range(0, draws, chunk):
        z = p.sample((min(chunk, draws - start),)).double()
        near, far = (torch.linalg.vector_norm(z + s * p.mean_direction, dim=-1) for s in (-1, 1))
        found.append(2 * torch.atan2(near, far))
    return torch.cat(found)


def ks(law: CosineLaw, theta: torch.Tensor) -> float:
    """Return the p value of the Kolmogorov-Smirnov test, computed on the device of the angles."""
    edges, below = (torch.as_tensor(x, device=theta.device) for x in (law.edges, law.below))
    theta = theta.clamp(edges[0], edges[-1])
    panel = (torch.searchsorted(edges, theta, right=True) - 1).clamp(0, len(edges) - 2)
    half = (theta - edges[panel]) / 2
    inside = torch.zeros_like(theta)
    for node, weight in zip(law.nodes.tolist(), law.weights.tolist(), strict=True):
        at = edges[panel] + half * (1 + node)
        log_f = (law.n - 2) * torch.log(torch.sin(at) + 1e-300) - 2 * law.kappa * torch.sin(
            at / 2
        ) ** 2
        inside += weight * torch.exp(log_f - law.peak)
    probability = ((below[panel] + half * inside) / law.total).sort().values
    steps = torch.arange(len(theta) + 1, device=theta.device, dtype=torch.float64) / len(theta)
    distance = torch.maximum(probability - steps[:-1], steps[1:] - probability).max().item()
    return float(stats.kstwobign.sf(distance * len(theta) ** 0.5))


def main() -> None:
    """Run all tests and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--draws", type=int, default=10**7)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    p_values: dict[str, float] = {}
    for n in (2, 3, 16, 256, 2048):
        mu = torch.nn.functional.normalize(torch.randn(n, device=arguments.device), dim=0)
        for kappa in (0.0, 0.1, 10.0, 1024.0, 16384.0, 1e6):
            law = CosineLaw(n, kappa)
            for kind, k in (("fixed", kappa), ("learned", torch.full_like(mu[0], kappa))):
                p = VonMisesFisher(mu, k, validate_args=False)
                p_values[f"{n}, {kappa:g}, {kind}"] = ks(law, angles(p, arguments.draws))
                print(n, kappa, kind, p_values[f"{n}, {kappa:g}, {kind}"], file=sys.stderr)
    assert all(0 <= p <= 1 for p in p_values.values()), p_values
    worst = min(p_values, key=p_values.__getitem__)
    report: dict[str, object] = {
        "benchmark": "law: Kolmogorov-Smirnov of the angle",
        "draws": arguments.draws,
        "seed": arguments.seed,
        "tests": len(p_values),
        "smallest_p": p_values[worst],
        "at": worst,
        "corrected": min(1.0, p_values[worst] * len(p_values)),
        "p": {name: float(f"{p:.3g}") for name, p in p_values.items()},
    }
    print(json.dumps(report | environment(arguments.device, "scipy")))


if __name__ == "__main__":
    main()

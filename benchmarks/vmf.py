"""Time sampling and log density of 4096 vMFs on the sphere of R^256, against alternatives.

    uv run --group bench python benchmarks/vmf.py                   # CPU, with TFP and others
    python benchmarks/vmf.py --device cuda                          # H200

Prints one JSON line. `randn` draws normals of the same shape, a lower bound for any sampler.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import captured, environment, race

from compressive import VonMisesFisher


def ours(mu: torch.Tensor, kappa: float | torch.Tensor) -> Callable[[], object]:
    """Return a function that constructs, draws and evaluates, as in a training step."""

    def run() -> torch.Tensor:
        p = VonMisesFisher(mu, kappa, validate_args=False)
        return p.log_prob(p.rsample())

    return run


def scipy(mu: torch.Tensor, kappa: float) -> Callable[[], object]:
    """Return scipy's sampler with one mean direction for all draws: scipy has no batches."""
    from scipy import stats

    p = stats.vonmises_fisher(mu[0].double().numpy(), kappa)  # pyright: ignore
    return lambda: p.logpdf(p.rvs(len(mu)))


def power_spherical(mu: torch.Tensor, kappa: float) -> Callable[[], object]:
    """Return the power spherical distribution, proposed as a fast substitute."""
    from power_spherical import PowerSpherical  # pyright: ignore

    scale = torch.full((len(mu),), kappa)

    def run() -> object:
        p = PowerSpherical(mu, scale)
        return p.log_prob(p.rsample())

    return run


def tensorflow_probability(mu: torch.Tensor, kappa: float) -> Callable[[], object]:
    """Return TensorFlow Probability's vMF in graph mode, which uses rejection in a while loop."""
    import tensorflow as tf  # pyright: ignore
    import tensorflow_probability as tfp  # pyright: ignore

    tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    directions = tf.constant(mu.numpy())

    @tf.function
    def run() -> object:
        p = tfp.distributions.VonMisesFisher(directions, tf.fill([len(mu)], kappa))
        return p.log_prob(p.sample())

    return lambda: run().numpy()  # pyright: ignore


OTHERS = {  # by the name of the package
    "tensorflow_probability": tensorflow_probability,
    "scipy": scipy,
    "power_spherical": power_spherical,
}


def entrants(mu: torch.Tensor, kappa: float, device: str) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    learned = torch.full((len(mu),), kappa, device=device)
    found: dict[str, Callable[[], object]] = {
        "randn": lambda: torch.randn_like(mu),
        "ours": ours(mu, kappa),
        "ours, compiled": torch.compile(ours(mu, kappa), fullgraph=True),
        "ours, kappa a tensor": ours(mu, learned),
    }
    if device == "cuda":
        return found | {f"{name}, graph": captured(function) for name, function in found.items()}
    for name, build in OTHERS.items():
        if importlib.util.find_spec(name):
            found[name] = build(mu, kappa)
    return found


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # Inductor's generator on the CPU is ten times slower than torch's.
    torch._inductor.config.fallback_random = arguments.device == "cpu"  # pyright: ignore
    torch.manual_seed(0)
    mu = F.normalize(torch.randn(arguments.batch, arguments.dim, device=arguments.device), dim=-1)
    report: dict[str, object] = {
        "benchmark": "vmf: sample + log_prob",
        "batch": arguments.batch,
        "dim": arguments.dim,
        "dtype": "float32",
    }
    for kappa in (1024.0, 16384.0):
        results = race(entrants(mu, kappa, arguments.device), arguments.device, arguments.rounds)
        report[f"kappa {kappa:g}, milliseconds"] = {k: round(v, 4) for k, v in results.items()}
        graph = ", graph" if arguments.device == "cuda" else ""
        ratios = {}
        for name in ("ours", "ours, compiled"):
            time = results[name + graph]
            ratios[f"{name} / randn"] = time / results["randn" + graph]
            ratios |= {
                f"{other} / {name}": results[other] / time for other in OTHERS if other in results
            }
        report[f"kappa {kappa:g}, ratio"] = {k: round(v, 2) for k, v in ratios.items()}
    packages = ("tensorflow", "tensorflow-probability", "scipy", "power-spherical")
    report |= environment(arguments.device, *packages)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

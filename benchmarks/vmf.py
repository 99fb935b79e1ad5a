"""Time samples and log densities of vMFs, with kappa fixed, batched and learned.

    uv run --group bench python benchmarks/vmf.py                   # CPU, with TFP and others
    python benchmarks/vmf.py --device cuda                          # H200

Prints a JSON line for each race of two parts. `peers`: sample and log density of 4096 vMFs on the
sphere of R^256, three races for each of two kappas. `dimensions`: samples at kappa = n for several
n. The last line has all of it. `randn` draws normals of the same shape, a lower bound for any
sampler.
"""

import argparse
import importlib.util
import json
import sys
import time
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
    """Return the functions of the part `peers`, by name."""
    learned = torch.full((len(mu),), kappa, device=device)
    found: dict[str, Callable[[], object]] = {
        "randn": lambda: torch.randn_like(mu),
        "ours": ours(mu, kappa),
        "ours, compiled": torch.compile(ours(mu, kappa), fullgraph=True),
        "ours, kappa a tensor": ours(mu, learned),
        "ours, kappa a tensor, compiled": torch.compile(ours(mu, learned), fullgraph=True),
    }
    if device == "cuda":
        return found | {f"{name}, graph": captured(function) for name, function in found.items()}
    for name, build in OTHERS.items():
        if importlib.util.find_spec(name):
            found[name] = build(mu, kappa)
    return found


def samplers(mu: torch.Tensor, kappa: float) -> dict[str, Callable[[], object]]:
    """Return samplers with kappa fixed, one per row, and learned, the last two with gradients."""
    rows = torch.full((len(mu),), kappa, device=mu.device)
    learned, moving = rows.clone().requires_grad_(), mu.clone().requires_grad_()
    ones = torch.ones_like(mu)

    def backward(kappa: float | torch.Tensor, *inputs: torch.Tensor) -> object:
        z = VonMisesFisher(moving, kappa, validate_args=False).rsample()
        return torch.autograd.grad(z, inputs, ones)

    return {
        "fixed": lambda: VonMisesFisher(mu, kappa, validate_args=False).rsample(),
        "batched": lambda: VonMisesFisher(mu, rows, validate_args=False).rsample(),
        "learned": lambda: VonMisesFisher(mu, learned, validate_args=False).rsample(),
        "fixed, backward": lambda: backward(kappa, moving),
        "learned, backward": lambda: backward(learned, moving, learned),
        "fixed, log_prob": ours(mu, kappa),
        "batched, log_prob": ours(mu, rows),
    }


def in_modes(
    eager: dict[str, Callable[[], object]], modes: list[str]
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Return compiled functions and CUDA graphs, and why some of them failed."""
    built: dict[str, Callable[[], object]] = {}
    failed: dict[str, str] = {}
    builders = {
        "compiled": lambda function: torch.compile(function, fullgraph=True),
        "graph": captured,
    }
    if "compiled" in modes:
        torch.compiler.reset()  # else the limit of recompilations is reached
    for mode in modes:
        for name, function in eager.items():
            if mode == "eager" or (mode == "compiled" and "backward" in name):
                continue
            try:
                function = builders[mode](function)
                function()
                built[f"{name}, {mode}"] = function
            except Exception as error:  # one mode must not hide the other figures
                failed[f"{name}, {mode}"] = str(error).splitlines()[0][:200]
    return built, failed


def dimension(
    n: int, rows: int, device: str, rounds: int, clock: Callable[[], float], modes: list[str]
) -> dict[str, object]:
    """Race all samplers of one dimension, in all modes, against scipy's."""
    mu = F.normalize(torch.randn(rows, n, device=device), dim=-1)
    eager = samplers(mu, float(n))
    built, failed = in_modes(eager, modes)
    functions: dict[str, Callable[[], object]] = {"randn": lambda: torch.randn_like(mu)}
    functions |= eager | built
    if device == "cpu" and importlib.util.find_spec("scipy"):
        from scipy import stats

        p = stats.vonmises_fisher(F.normalize(mu[0].double(), dim=0).numpy(), n)  # pyright: ignore
        functions["scipy"] = lambda: p.rvs(rows)
    times = race(functions, device, rounds, clock)
    ratios = {"fixed / scipy": times["fixed"] / times["scipy"]} if "scipy" in times else {}
    for mode in ("", *(f", {mode}" for mode in modes if mode != "eager")):
        for what in ("", ", backward", ", log_prob"):
            for name in ("batched", "learned"):
                top, bottom = f"{name}{what}{mode}", f"fixed{what}{mode}"
                if top in times and bottom in times:
                    ratios[f"{top} / {bottom}"] = times[top] / times[bottom]
    return {
        "nanoseconds per sample": {k: round(1e6 * v / rows, 1) for k, v in times.items()},
        "ratio": {k: round(v, 2) for k, v in ratios.items()},
        **({"failed": failed} if failed else {}),
    }


def peers(
    device: str, batch: int, dim: int, rounds: int, clock: Callable[[], float], repeats: int
) -> dict[str, object]:
    """Race sample and log density against other libraries."""
    mu = F.normalize(torch.randn(batch, dim, device=device), dim=-1)
    report: dict[str, object] = {"batch": batch, "dim": dim}
    for kappa in (1024.0, 16384.0):
        functions = entrants(mu, kappa, device)
        for repeat in range(1, repeats + 1):
            results = race(functions, device, rounds, clock)
            graph = ", graph" if device == "cuda" else ""
            ratios = {}
            for name in ("ours", "ours, compiled"):
                time = results[name + graph]
                ratios[f"{name} / randn"] = time / results["randn" + graph]
                ratios |= {
                    f"{other} / {name}": results[other] / time
                    for other in OTHERS
                    if other in results
                }
            found = {
                "milliseconds": {k: round(v, 4) for k, v in results.items()},
                "ratio": {k: round(v, 2) for k, v in ratios.items()},
            }
            print_part(report, f"kappa {kappa:g}, race {repeat}", found)
    return report


def print_part(report: dict[str, object], name: str, found: dict[str, object]) -> None:
    """Add a race to the report and print it, so that a run that is stopped loses nothing."""
    report[name] = found
    print(json.dumps({name: found}), flush=True)


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=256, help="dimension of the part `peers`")
    parser.add_argument(
        "--repeats", type=int, default=3, help="races per kappa of `peers`; 0: none"
    )
    parser.add_argument("--dims", type=int, nargs="*", default=[2, 3, 8, 16, 40, 128, 2048])
    parser.add_argument("--modes", nargs="*", choices=["eager", "compiled", "graph"])
    parser.add_argument("--large", type=int, default=1_000_000, help="rows of the second size")
    words = "processor time does not count other processes, for one thread only"
    parser.add_argument("--clock", default="wall", choices=["wall", "processor"], help=words)
    arguments = parser.parse_args()
    clock = time.process_time if arguments.clock == "processor" else time.perf_counter
    device, rounds = arguments.device, arguments.rounds
    graph = ["graph"] if device == "cuda" else []
    modes = arguments.modes if arguments.modes is not None else ["eager", "compiled", *graph]
    torch.set_num_threads(arguments.threads)
    if arguments.repeats or "compiled" in modes:  # the import takes seconds
        # Inductor's generator on the CPU is ten times slower than torch's.
        torch._inductor.config.fallback_random = device == "cpu"  # pyright: ignore
    torch.manual_seed(0)
    packages = ("tensorflow", "tensorflow-probability", "scipy", "power-spherical")
    report: dict[str, object] = {
        "benchmark": "vmf: sample and log_prob",
        "dtype": "float32",
        "clock": arguments.clock,
        **environment(device, *packages),
    }
    print(json.dumps(report), flush=True)
    if arguments.repeats:
        sizes = arguments.batch, arguments.dim
        report["peers"] = peers(device, *sizes, rounds, clock, arguments.repeats)
    dimensions: dict[str, object] = {}
    for n in arguments.dims:
        found = dimension(n, arguments.batch, device, rounds, clock, modes)
        print_part(dimensions, f"n = {n}, {arguments.batch} rows", found)
        if arguments.large and n <= 40:
            few = max(rounds // 12, 3)
            found = dimension(n, arguments.large, device, few, clock, ["eager"])
            print_part(dimensions, f"n = {n}, {arguments.large} rows", found)
    report["dimensions"] = dimensions
    print(json.dumps(report))


if __name__ == "__main__":
    main()

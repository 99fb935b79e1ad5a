"""Compare the whole grid of l2 penalties with scikit-learn's L-BFGS, on rectified features.

    python benchmarks/logistic.py --device cuda --every 9           # H200: 10,000 x 2,048, 100
    python benchmarks/logistic.py --count 3000 --feat 512 --classes 20 --every 4 --threads 2  # CPU

Prints one JSON line: seconds of both, their ratio, and the relative excess of scikit-learn's loss
over ours at each penalty it ran (below 0: ours is worse). With --every n scikit-learn runs only
every n-th penalty of the grid, and its time is scaled up to all. It gets float64 and as many
threads. If it stops before the minimum because of its iterations or tolerance, as with small
penalties, the ratio favors it; its excess loss shows where.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment

from compressive.evaluation import logistic
from compressive.evaluation.logistic import PENALTIES, Fits, fit


def features(count: int, feat: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return rectified mixtures of 64 class-dependent sources, at scales from 0.1 to 10."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (count,), generator=generator)
    means = torch.randn(classes, 64, generator=generator)
    sources = means[labels] + torch.randn(count, 64, generator=generator)
    mixed = sources @ torch.randn(64, feat, generator=generator) / 8
    mixed += 0.3 * torch.randn(count, feat, generator=generator) - 0.3
    return mixed.relu() * torch.randn(feat, generator=generator).exp(), labels


def ours(feats: Tensor, labels: Tensor, classes: int) -> tuple[float, Fits]:
    """Return seconds and fits of our solver, after a warm-up that loads libraries."""
    fit(feats[: 4 * classes], labels[: 4 * classes], classes=classes, penalties=PENALTIES[-2:])
    if feats.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = fit(feats, labels, classes=classes)
    found.loss.tolist()  # waits for the device
    return time.perf_counter() - start, found


def theirs(
    feats: Tensor, labels: Tensor, penalty: float, tolerance: float, iterations: int
) -> tuple[float, float, int]:
    """Return seconds, loss and iterations of scikit-learn at one penalty."""
    from sklearn.linear_model import LogisticRegression

    x, y = feats.double().cpu(), labels.cpu()
    model = LogisticRegression(C=1 / penalty, tol=tolerance, max_iter=iterations)
    start = time.perf_counter()
    with warnings.catch_warnings(action="ignore"):  # ignores that it did not converge
        model.fit(x.numpy(), y.numpy())
    elapsed = time.perf_counter() - start
    weight, bias = torch.from_numpy(model.coef_.T), torch.from_numpy(model.intercept_)
    fitted = torch.nn.functional.cross_entropy(x @ weight + bias, y, reduction="sum")
    return elapsed, float(fitted + penalty / 2 * weight.square().sum()), int(model.n_iter_.max())


def main() -> None:
    """Run both solvers and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--feat", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument(
        "--every", type=int, default=1, help="run scikit-learn at every n-th penalty"
    )
    parser.add_argument("--tolerance", type=float, default=1e-8, help="scikit-learn's tol")
    parser.add_argument("--iterations", type=int, default=1000, help="scikit-learn's max_iter")
    parser.add_argument("--together", type=int, help="penalties that our solver solves at a time")
    parser.add_argument("--threads", type=int, help="number of threads of both solvers")
    asked = parser.parse_args()
    if asked.threads:
        from threadpoolctl import threadpool_limits

        torch.set_num_threads(asked.threads)
        threadpool_limits(asked.threads)
    if asked.together:
        logistic._TOGETHER[asked.device] = asked.together
    feats, labels = features(asked.count, asked.feat, asked.classes)
    on_device = feats.to(asked.device), labels.to(asked.device)
    runs = [ours(*on_device, asked.classes) for _ in range(3)]
    seconds, found = sorted(runs, key=lambda run: run[0])[1]
    some = PENALTIES[asked.every // 2 :: asked.every]
    limits = asked.tolerance, asked.iterations
    sklearn = [theirs(feats, labels, penalty, *limits) for penalty in some]
    whole = sum(run[0] for run in sklearn) * len(PENALTIES) / len(some)
    losses = [found.loss[PENALTIES.index(penalty)].item() for penalty in some]
    answer = {
        "problem": f"{asked.count} x {asked.feat}, {asked.classes} classes",
        "penalties": len(PENALTIES),
        "ours_s": round(seconds, 3),
        "ours_steps": int(found.steps.sum()),
        "ours_converged": int(found.converged.sum()),
        "sklearn_s": round(whole, 1),
        "sklearn_ran": len(some),
        "sklearn_is_scaled_up": len(some) < len(PENALTIES),
        "sklearn_tol": asked.tolerance,
        "sklearn_max_iter": asked.iterations,
        "ratio": round(whole / seconds, 1),
        "at": [
            {"l2": f"{penalty:.1e}", "sklearn_s": round(took, 2), "iterations": count}
            | {"loss": own, "sklearn_above": f"{loss / own - 1:.1e}"}
            for penalty, (took, loss, count), own in zip(some, sklearn, losses, strict=True)
        ],
    }
    print(json.dumps(answer | environment(asked.device, "scikit-learn")))


if __name__ == "__main__":
    main()

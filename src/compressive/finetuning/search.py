"""Choose the learning rate on held-out labels."""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from compressive.distributed import rank, wait_for_all
from compressive.finetuning.plan import Plan
from compressive.rundir.files import SEARCH
from compressive.train.loop import TrainingFailed

_MOST_BEYOND = 3  # further rates if the best one ends the grid
Scores = dict[str, float | None]  # accuracy and nll; None if training diverged


def search(
    plan: Plan,
    out: Path,
    grid: Sequence[float],
    by: str,
    try_rate: Callable[[float, Path, str], Scores | None],
) -> float | None:
    """Return the best learning rate; None if a request to stop came before the end.

    `try_rate` trains with a rate in a folder and returns its scores, or None if it was stopped.
    Rates that are already in the plan are not tried again. If the best rate ends the grid, rates
    beyond it are tried, at most three.
    """
    rates = list(grid)
    for _ in range(_MOST_BEYOND + 1):
        for number, rate in enumerate(rates, 1):
            if f"{rate:g}" in plan.scores:
                continue
            folder, title = out / SEARCH / f"lr-{rate:g}", f"{number} of {len(rates)}"
            scores = try_rate(rate, folder, title)
            if scores is None:
                return None
            plan.scores[f"{rate:g}"] = scores
            plan.write(out)
            wait_for_all()  # nobody may still read the folder
            if rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
        best = best_rate(plan, by)
        if best not in (max(rates), min(rates)):
            break
        rates.append(2 * best if best == max(rates) else best / 2)
    if rank() == 0:
        shutil.rmtree(out / SEARCH, ignore_errors=True)
    plan.chosen = best_rate(plan, by)
    plan.write(out)
    return plan.chosen


def best_rate(plan: Plan, by: str) -> float:
    """Return the rate with the best accuracy or log-loss; the other one breaks ties."""

    def order(text: str) -> tuple[float, float]:
        scores = plan.scores[text]
        accuracy, nll = scores["accuracy"] or 0.0, scores["nll"]
        loss = math.inf if nll is None else nll
        return (-accuracy, loss) if by == "accuracy" else (loss, -accuracy)

    best = min(plan.scores, key=order)
    if plan.scores[best]["nll"] is None:
        tried = ", ".join(plan.scores)
        raise TrainingFailed(f"fine-tuning diverged with every learning rate ({tried}); lower --lr")
    return float(best)

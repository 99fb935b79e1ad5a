"""Print how a training run ended."""

from typing import TYPE_CHECKING

from compressive.cli.terminal import print_line, print_next
from compressive.rundir.files import ENCODER

if TYPE_CHECKING:
    from compressive.train.outcome import Outcome


def print_outcome(outcome: "Outcome") -> None:
    """Print the final accuracy and the encoder, or where the run stopped and how to resume."""
    if outcome.step < outcome.total:
        print_stopped(outcome)
        return
    if outcome.accuracy is not None:
        print_line(
            f"held-out labels: kNN {outcome.accuracy.neighbors:.1%}, "
            f"linear probe {outcome.accuracy.probe:.1%} of {outcome.accuracy.count:,} images"
        )
    print_line(f"encoder: {outcome.folder / ENCODER}")
    print_line(f'in Python: compressive.load("{outcome.folder}")')
    print_next("evaluate", outcome.folder)


def print_stopped(outcome: "Outcome") -> None:
    """Print where a run stopped and how to resume it."""
    step = f"{outcome.step:,} of {outcome.total:,}"
    stopped = f"stopped and saved at step {step} in {outcome.folder}"
    if outcome.saved < outcome.step:
        stopped = (
            f"stopped at step {step}, where the run seemed to fail; the last checkpoint in "
            f"{outcome.folder} is of step {outcome.saved:,}"
        )
    print_line(f"{stopped}; run the same command to resume")

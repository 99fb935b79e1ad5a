"""A NaN in a batch, gradient, weight or moment is detected, undone and never saved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Written, last, tensors, tiny
from torch import Tensor, nn

from compressive.config import Config
from compressive.encoder import load
from compressive.methods import Builder, Method, build
from compressive.rundir import checkpoint
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5
CHANGES = (f"train.steps={STEPS}", "train.save_every=1e-9")  # a checkpoint at every step


def injecting(place: str, step: int, value: float = torch.nan) -> Builder:
    """Return a method builder that injects `value` once, at `step` of the first attempt."""

    def built(config: Config) -> Method:
        method, calls = build(config), 0
        weight = next(method.encoder.parameters())

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal calls
            calls += 1
            views: Sequence[Tensor] = inputs[0]
            if calls == step and place == "batch":
                views = [view.clone() for view in views]
                views[0][2, 1, 3, 4] = value
            if calls == step and place == "weight":
                weight.data[0, 1, 2, 0] = value
            return (views, *inputs[1:])

        def change(gradient: Tensor) -> Tensor:
            if calls == step and place == "gradient":
                gradient = gradient.clone()
                gradient[0, 1, 2, 0] = value
            return gradient

        method.register_forward_pre_hook(before)
        weight.register_hook(change)
        return method

    return built


def not_finite(state: Any) -> list[str]:
    parts = {name: state[name] for name in ("learner", "optimizer", "probe_optimizer")}
    leaves = tensors(parts).items()
    return [name for name, leaf in leaves if isinstance(leaf, Tensor) and not leaf.isfinite().all()]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Assert that every written checkpoint is finite; return the saved steps."""
    steps: list[int] = []
    write = checkpoint.save_step

    def checked(folder: Path, step: int, state: dict[str, Any]) -> Path:
        assert not_finite(state) == []
        steps.append(step)
        return write(folder, step, state)

    monkeypatch.setattr(checkpoint, "save_step", checked)
    return steps


def assert_recovered(out: Path, display: Written, saved: list[int], found: int) -> None:
    (line,) = [line for line in display.said if "restarting from the last good" in line]
    assert line.startswith(f"step {found}: nan: ")
    assert saved[-1] == STEPS
    assert not_finite(last(out)) == []
    assert load(out)(torch.zeros(2, 3, 16, 16)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "step"),
    [("batch", 1), ("batch", 3), ("gradient", 1), ("gradient", STEPS), ("weight", 3)],
)
def test_single_nan_is_detected_and_undone(
    place: str, step: int, saved: list[int], tmp_path: Path
) -> None:
    display = Written()
    pretrain(tiny(*CHANGES), tmp_path, display=display, method=injecting(place, step))
    # A bad gradient shows in the loss one step later, or in the weights after the last step.
    found = min(step + (place == "gradient"), STEPS)
    assert_recovered(tmp_path, display, saved, found)
    (resumed,) = [line for line in display.said if line.startswith("resuming from step")]
    assert resumed == f"resuming from step {step - 1} of {STEPS}"


@pytest.mark.slow
def test_moment_that_overflows_is_not_saved(saved: list[int], tmp_path: Path) -> None:
    """AdamW divides by the moment: weights stay finite, but this one would never change again."""
    display, builder = Written(), injecting("gradient", 3, 1e30)
    pretrain(tiny("optim.name=adamw", *CHANGES), tmp_path, display=display, method=builder)
    assert_recovered(tmp_path, display, saved, STEPS)

"""Unused settings change no weight, and all others do."""

import re
from pathlib import Path

import pytest
import torch
from tiny import last, silent, tiny, words
from torch import Tensor
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import METHODS, Config, unused_settings
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = {  # values that differ from `tiny`
    "bottleneck.kappa_e": "77",
    "bottleneck.kappa_b": "3",
    "bottleneck.backward_view": "other",
    "bottleneck.beta": "0.3",
    "bottleneck.schedule": "cosine",
    "bottleneck.adaptive_weight": "rank",
    "bottleneck.warmup_epochs": "3",
    "bottleneck.residual_estimator": "analytic",
    "decoder.kappa_d": "7",
    "decoder.same_view_negatives": "false",
    "target.ema_decay": "0.5",
    "target.independent": "false",
    "optim.momentum": "0.1",
    "optim.trust_coefficient": "0.5",
    "train.epochs": "7",
}
OPTIMIZERS = ("optim.momentum", "optim.trust_coefficient", "train.epochs")


def weights(out: Path, *changes: str) -> dict[str, Tensor]:
    """Return the weights after three steps."""
    pretrain(tiny("train.steps=3", *changes), out, display=silent())
    return last(out)["learner"]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def changed(names: list[str]) -> list[str]:
    return [f"{name}={OTHER[name]}" for name in names]


# Settings that a method reads; the others are the same for all methods.
TRIED = {
    "simclr": ["bottleneck.kappa_b", "decoder.same_view_negatives"],
    "c-simclr": [
        "bottleneck.kappa_e",
        "bottleneck.beta",
        "bottleneck.schedule",
        "bottleneck.residual_estimator",
    ],
    "byol": ["decoder.kappa_d", "target.ema_decay", "target.independent"],
    "c-byol": [
        "bottleneck.kappa_b",
        "bottleneck.backward_view",
        "bottleneck.beta",
        "decoder.kappa_d",
    ],
    "moco-v3": ["bottleneck.kappa_b", "target.ema_decay", "target.independent"],
    "c-simsiam": ["bottleneck.kappa_e", "bottleneck.backward_view"],
}


OF_COMPRESSION = {
    *(
        "bottleneck.kappa_e",
        "bottleneck.beta",
        "bottleneck.schedule",
        "bottleneck.residual_estimator",
    ),
    "bottleneck.warmup_epochs",
    "bottleneck.adaptive_weight",
}
OF_TARGET = {"target.ema_decay", "target.independent"}
NEGATIVES, DECODER = "decoder.same_view_negatives", "decoder.kappa_d"
B, B_SEES = "bottleneck.kappa_b", "bottleneck.backward_view"
OF_SCHEDULES = {"bottleneck.warmup_epochs", "bottleneck.adaptive_weight"}


@pytest.mark.slow
def test_each_method_reads_its_own_settings() -> None:
    """The expected settings follow from the terms of the losses."""
    mine = {name for name in OTHER if not name.startswith(("optim", "train"))}
    found = {method: mine & unused_settings(tiny(f"method={method}")).keys() for method in METHODS}
    assert found == {
        "simclr": OF_COMPRESSION | OF_TARGET | {B_SEES, DECODER},
        "c-simclr": OF_TARGET | OF_SCHEDULES | {B_SEES, DECODER},
        "byol": OF_COMPRESSION | {B, B_SEES, NEGATIVES},
        "c-byol": OF_SCHEDULES | {NEGATIVES},
        "moco-v3": OF_COMPRESSION | {B_SEES, DECODER, NEGATIVES},
        "c-moco-v3": OF_SCHEDULES | {B_SEES, DECODER, NEGATIVES},
        "simsiam": OF_COMPRESSION | OF_TARGET | {B, B_SEES, NEGATIVES},
        "c-simsiam": OF_TARGET | OF_SCHEDULES | {NEGATIVES},
        "dcl": OF_COMPRESSION | OF_TARGET | {B_SEES, DECODER},
        "vicreg": OF_COMPRESSION | OF_TARGET | {B, B_SEES, DECODER, NEGATIVES},
    }
    assert "bottleneck.residual_estimator" in unused_settings(tiny("bottleneck.stochastic=false"))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_only_used_settings_change_the_weights(method: str, tmp_path: Path) -> None:
    base = ("train.steps=3", f"method={method}")
    found = unused_settings(tiny(*base))
    plain = weights(tmp_path / "plain", *base)
    without = [name for name in OTHER if name in found]
    assert same(plain, weights(tmp_path / "idle", *base, *changed(without)))
    for name in TRIED.get(method, []):
        assert name not in found
        assert not same(plain, weights(tmp_path / name, *base, *changed([name]))), name
    # Other values of these are rejected or need another setting as well.
    others = {"bottleneck.stochastic", "bottleneck.target_residual", "views.strength"}
    others |= {"train.gather_chunk"}  # changes rounding only
    assert found.keys() - OTHER.keys() <= others


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_each_optimizer_reads_its_own_settings(optimizer: str, tmp_path: Path) -> None:
    base = ("train.steps=3", f"optim.name={optimizer}")
    found, plain = unused_settings(tiny(*base)), weights(tmp_path / "plain", *base)
    for name in OPTIMIZERS:
        moved = not same(plain, weights(tmp_path / name, *base, *changed([name])))
        assert moved == (name not in found), name


@pytest.mark.slow
def test_linear_beta_schedule_reads_its_warmup(tmp_path: Path) -> None:
    rising = ("train.steps=20", "bottleneck.schedule=linear", "bottleneck.warmup_epochs=1")
    assert "bottleneck.warmup_epochs" in unused_settings(Config())
    assert "bottleneck.warmup_epochs" not in unused_settings(tiny(*rising))
    longer = weights(tmp_path / "b", *rising, "bottleneck.warmup_epochs=3")
    assert not same(weights(tmp_path / "a", *rising), longer)


@pytest.mark.slow
def test_adaptive_beta_schedule_reads_its_weight(tmp_path: Path) -> None:
    adaptive, rank = "bottleneck.schedule=adaptive", "bottleneck.adaptive_weight=rank"
    assert "bottleneck.adaptive_weight" not in unused_settings(tiny(adaptive))
    likely = weights(tmp_path / "a", adaptive)
    assert not same(likely, weights(tmp_path / "b", adaptive, rank))
    assert not same(likely, weights(tmp_path / "c"))


@pytest.mark.slow
def test_pretrain_notes_a_changed_setting_that_is_unused(tmp_path: Path) -> None:
    """There is one note per setting, and only for changes on the command line."""
    changes = ["--set", "bottleneck.beta=0.5", "--set", " bottleneck.beta =1"]
    config = tiny("method=simclr", "train.steps=1")
    line = ["pretrain", config.data.source, *words(config), "--out", str(tmp_path / "a")]
    result = CliRunner().invoke(app, [*line, *changes])
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"^note: bottleneck\.beta .*c-simclr", result.output, re.MULTILINE)) == 1

"""Settings that a run does not look at: those that are called so, and no others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import last, silent, tiny, words
from torch import Tensor
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.config import METHODS, Config, unused_settings
from compressive.networks import build
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = {  # than in `tiny`
    "bottleneck.kappa_e": "77",
    "bottleneck.kappa_b": "3",
    "bottleneck.backward_view": "other",
    "bottleneck.beta": "0.3",
    "bottleneck.schedule": "cosine",
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
    """What three steps come to."""
    pretrain(tiny("train.steps=3", *changes), out, display=silent())
    return last(out)["learner"]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def changed(names: list[str]) -> list[str]:
    return [f"{name}={OTHER[name]}" for name in names]


# Which of the method's own settings are looked at; the others are the same for all.
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


OF_PRICE = {
    *(
        "bottleneck.kappa_e",
        "bottleneck.beta",
        "bottleneck.schedule",
        "bottleneck.residual_estimator",
    ),
    "bottleneck.warmup_epochs",
}
OF_TARGET = {"target.ema_decay", "target.independent"}
NEGATIVES, DECODER = "decoder.same_view_negatives", "decoder.kappa_d"
B, B_SEES, RISE = "bottleneck.kappa_b", "bottleneck.backward_view", "bottleneck.warmup_epochs"


def test_each_method_has_settings_of_its_own() -> None:
    """By what the losses of the paper and of MoCo v3 and SimSiam are made of."""
    mine = {name for name in OTHER if not name.startswith(("optim", "train"))}
    found = {method: mine & unused_settings(tiny(f"method={method}")).keys() for method in METHODS}
    assert found == {
        "simclr": OF_PRICE | OF_TARGET | {B_SEES, DECODER},
        "c-simclr": OF_TARGET | {B_SEES, DECODER, RISE},
        "byol": OF_PRICE | {B, B_SEES, NEGATIVES},
        "c-byol": {RISE, NEGATIVES},
        "moco-v3": OF_PRICE | {B_SEES, DECODER, NEGATIVES},
        "c-moco-v3": {B_SEES, DECODER, NEGATIVES, RISE},
        "simsiam": OF_PRICE | OF_TARGET | {B, B_SEES, NEGATIVES},
        "c-simsiam": OF_TARGET | {NEGATIVES, RISE},
    }
    assert "bottleneck.residual_estimator" in unused_settings(tiny("bottleneck.stochastic=false"))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_called_idle_changes_no_bit_and_all_else_does(method: str, tmp_path: Path) -> None:
    base = ("train.steps=3", f"method={method}")
    found = unused_settings(tiny(*base))
    plain = weights(tmp_path / "plain", *base)
    without = [name for name in OTHER if name in found]
    assert same(plain, weights(tmp_path / "idle", *base, *changed(without)))
    for name in TRIED.get(method, []):
        assert name not in found
        assert not same(plain, weights(tmp_path / name, *base, *changed([name]))), name
    # Whose values elsewhere are refused, or need another setting beside them.
    others = {"bottleneck.stochastic", "bottleneck.target_residual", "views.strength"}
    assert found.keys() - OTHER.keys() <= others


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_optimizers_have_settings_of_their_own(optimizer: str, tmp_path: Path) -> None:
    base = ("train.steps=3", f"optim.name={optimizer}")
    found, plain = unused_settings(tiny(*base)), weights(tmp_path / "plain", *base)
    for name in OPTIMIZERS:
        moved = not same(plain, weights(tmp_path / name, *base, *changed([name])))
        assert moved == (name not in found), name


def test_a_price_that_rises_has_a_length(tmp_path: Path) -> None:
    rising = ("train.steps=20", "bottleneck.schedule=linear", "bottleneck.warmup_epochs=1")
    assert "bottleneck.warmup_epochs" in unused_settings(Config())
    assert "bottleneck.warmup_epochs" not in unused_settings(tiny(*rising))
    longer = weights(tmp_path / "b", *rising, "bottleneck.warmup_epochs=3")
    assert not same(weights(tmp_path / "a", *rising), longer)


def test_pretrain_says_what_was_changed_in_vain(tmp_path: Path) -> None:
    """Once each, and only what was asked for on the command line."""
    asked = ["--set", "bottleneck.beta=0.5", "--set", " bottleneck.beta =1"]
    config = tiny("method=simclr", "train.steps=1")
    line = ["pretrain", config.data.source, *words(config), "--out", str(tmp_path / "a")]
    result = CliRunner().invoke(app, [*line, *asked])
    assert result.exit_code == 0, result.output
    note = "note: bottleneck.beta changes nothing here: only c-simclr is compressed"
    assert result.output.splitlines().count(note) == 1


def test_a_deep_resnet_has_no_shortcut_to_lose() -> None:
    """Its first block changes the number of channels, so that it has one in any case."""
    for name, is_idle in (("resnet18", False), ("resnet50", True)):
        config = tiny(f"network.name={name}", "network.first_shortcut=true")
        found = set(build(config.network, 16).state_dict())
        plain = replace(config.network, first_shortcut=False)
        assert (found == set(build(plain, 16).state_dict())) == is_idle
        assert ("network.first_shortcut" in unused_settings(config)) == is_idle

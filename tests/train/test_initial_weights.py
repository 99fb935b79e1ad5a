"""Runs start from trained weights, follow their network, and resume without them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tiny import Written, differences, last, silent, sorted_photos, tiny
from torch import Tensor
from typer.testing import CliRunner

import compressive
from compressive import recipes
from compressive.augment.ops import colors, normalize
from compressive.cli.app import app
from compressive.config import Config, flat
from compressive.data.loaders import Batch
from compressive.encoder import load
from compressive.rundir.folder import read_config
from compressive.train import loop
from compressive.train.loop import pretrain
from compressive.train.step import view_maker

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = (
    *("network.hidden_dim=16", "network.projection_dim=8", "train.tensorboard=false"),
    *("health.min_participation_ratio=0", "health.collapse_std=0", "train.log_every=1"),
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights as timm writes them: 64 pixels, mean and std 0.5."""
    torch.manual_seed(1)
    network = timm.create_model("test_resnet", num_classes=4)
    folder = tmp_path_factory.mktemp("weights") / "hf"
    config = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.5, 0.5), "input_size": (3, 16, 16)}
    network.pretrained_cfg.update(config)  # pyright: ignore
    timm.models.save_for_hf(network, str(folder), safe_serialization=True)
    return folder


def start(out: Path, weights: Path | str, *settings: str, **options: Any) -> Written:
    shown = Written()
    given = {"steps": 2, "batch_size": 8, "device": "cpu", "method": "simclr"} | options
    changes = [*SMALL, *settings]
    compressive.pretrain(
        sorted_photos(), out, weights=weights, settings=changes, display=shown, **given
    )
    return shown


def encoder_of(state: dict[str, Any], prefix: str = "method.encoder.") -> dict[str, Tensor]:
    learner = state["learner"]
    return {n.removeprefix(prefix): v for n, v in learner.items() if n.startswith(prefix)}


def test_network_and_views_follow_from_the_weights(weights: Path, tmp_path: Path) -> None:
    shown = start(tmp_path / "a", weights)
    config = read_config(tmp_path / "a")
    assert config.network.name == "test_resnet"
    assert config.network.weights == str(weights)
    assert (config.views.size, config.views.antialias) == (16, True)
    assert (config.views.mean, config.views.std) == ("0.5,0.5,0.5", "0.25,0.5,0.5")
    scratch = recipes.auto_recipe(40, 16, given={"method": "simclr"}).config
    assert config.optim.lr == 0.25 * scratch.optim.lr
    for name in ("optim.lr", "optim.clip_norm", "optim.layer_decay", "train.frozen_epochs"):
        assert any(line.startswith(f"{name} = ") for line in shown.said), name
    assert any("test_resnet" in line and "heads" in line for line in shown.said)
    found = load(tmp_path / "a")
    assert (found.mean, found.std) == ((0.5, 0.5, 0.5), (0.25, 0.5, 0.5))
    black = found.preprocess(torch.zeros(3, 20, 20, dtype=torch.uint8))[0, :, 0, 0]
    torch.testing.assert_close(black, torch.tensor([-2.0, -1.0, -1.0]))


def test_given_settings_win_and_contradictions_are_one_line(weights: Path, tmp_path: Path) -> None:
    start(tmp_path / "a", weights, "optim.clip_norm=0", "views.std=1,1,1", image_size=24)
    config = read_config(tmp_path / "a")
    assert (config.optim.clip_norm, config.views.std, config.views.size) == (0.0, "1,1,1", 24)
    for options in ({"backbone": "resnet18"}, {"settings": ("network.width=2",)}):
        with pytest.raises(ValueError, match=r"test_resnet|network\.width") as caught:
            start(tmp_path / "b", weights, *options.pop("settings", ()), **options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "b").exists()


def trained(method: str, weights: Path, out: Path, *changes: str) -> dict[str, Any]:
    config = tiny(f"method={method}", f"network.weights={weights}", *changes)
    pretrain(config, out, display=silent())
    return last(out)


@pytest.mark.parametrize("method", ["simclr", "c-byol", "moco-v3", "vicreg"])
def test_encoder_and_target_start_as_the_weights(
    method: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def stop(run: Any, requests: list[int]) -> Any:
        seen.append({"learner": run.learner.state_dict()})
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        trained(method, weights, tmp_path / "a")
    expected = timm.models.load_state_dict(str(weights / "model.safetensors"))
    prefixes = ["method.encoder."]
    prefixes += ["method.target.network.0."] if method in ("c-byol", "moco-v3") else []
    for prefix in prefixes:
        state = encoder_of(seen[0], prefix)
        assert state.keys() == {name for name in expected if not name.startswith("fc.")}
        assert all(torch.equal(value, expected[name]) for name, value in state.items())


@pytest.mark.slow
def test_resumed_run_needs_no_weights_and_is_bitwise_equal(weights: Path, tmp_path: Path) -> None:
    """Layer-wise rates, frozen epochs and clipping continue as without the interruption."""
    own = shutil.copytree(weights, tmp_path / "hf")
    changes = ("optim.layer_decay=0.7", "train.frozen_epochs=0.4", "optim.clip_norm=0.5")
    changes = (*changes, "train.steps=4", "optim.name=adamw", "optim.lr=0.01")
    once = trained("simclr", own, tmp_path / "once", *changes)
    trained("simclr", own, tmp_path / "twice", *changes)
    for step in (4,):
        (tmp_path / "twice" / "checkpoints" / f"step_{step:08d}.safetensors").unlink(
            missing_ok=True
        )
    left = sorted(path.name for path in (tmp_path / "twice" / "checkpoints").iterdir())
    shutil.rmtree(own)
    twice = trained("simclr", own, tmp_path / "twice", *changes)
    assert left, "an earlier checkpoint is needed"
    assert not differences(once, twice)


@pytest.mark.parametrize("optimizer", ["lars", "sgd", "adamw"])
def test_encoder_is_frozen_for_its_epochs(
    optimizer: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = timm.models.load_state_dict(str(weights / "model.safetensors"))
    apply, seen = loop.apply_gradients, []

    def record(run: Any, residual: Any) -> None:
        apply(run, residual)
        own = dict(run.method.encoder.named_parameters())
        seen.append(all(torch.equal(own[n], before[n]) for n in own))

    monkeypatch.setattr(loop, "apply_gradients", record)
    changes = (f"optim.name={optimizer}", "optim.lr=0.01", "train.steps=4")
    trained("simclr", weights, tmp_path / "a", *changes, "train.frozen_epochs=0.4")  # two steps
    assert seen == [True, True, False, False]


def test_weights_and_continue_from_exclude_each_other(weights: Path, tmp_path: Path) -> None:
    start(tmp_path / "a", weights)
    arguments = ["pretrain", str(sorted_photos()), "--continue-from", str(tmp_path / "a")]
    arguments += ["--weights", str(weights), "--out", str(tmp_path / "b")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "--weights" in done.output
    assert not (tmp_path / "b").exists()


def test_bad_weights_leave_no_folder(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "a.pth")
    place, out = str(tmp_path / "a.pth"), tmp_path / "out"
    command = ["pretrain", str(sorted_photos()), "--weights", place, "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "a.pth" in done.output
    with pytest.raises(ValueError, match=r"a\.pth"):
        pretrain(tiny(f"network.weights={place}"), out, display=silent())
    assert not out.exists()


def test_gradients_are_clipped_to_a_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    step = torch.optim.SGD.step

    def record(optimizer: Any, *arguments: Any) -> Any:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(grads).item())
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", record)
    pretrain(tiny("train.steps=1"), tmp_path / "a", display=silent())
    pretrain(tiny("train.steps=1", "optim.clip_norm=0.01"), tmp_path / "b", display=silent())
    assert norms[0] > 0.02
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


def test_views_are_normalized_with_the_settings() -> None:
    images = torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8)
    index, side = torch.arange(2), torch.full((2,), 20)
    batch = Batch(images, side, side, index, index, index)
    plain = view_maker(tiny(), torch.float32, compiled=False)(batch)
    changed = tiny("views.mean=0.1,0.2,0.3", "views.std=1,2,4")
    other = view_maker(changed, torch.float32, compiled=False)(batch)
    for x, y in zip(plain, other, strict=True):
        expected = normalize(colors(x), mean=(0.1, 0.2, 0.3), std=(1, 2, 4))
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)


def test_channels_of_a_setting_are_checked() -> None:
    for change in ("views.mean=0.5", "views.mean=a,b,c", "views.std=0,1,1", "views.std=1,1,nan"):
        with pytest.raises(ValueError, match=change.partition("=")[0]):
            tiny(change)
    assert flat(Config())["network.weights"] == ""

"""Settings that are derived for a folder depend on the given ones and never conflict with them."""

from pathlib import Path

import pytest
from tiny import photos, silent
from typer.testing import CliRunner

from compressive import networks
from compressive.cli.app import app
from compressive.recipes import auto, auto_recipe
from compressive.rundir.folder import read_config
from compressive.train.auto_config import auto_config
from compressive.train.start import plan_pretraining, pretrain


def test_the_stem_follows_the_given_view_size(tmp_path: Path) -> None:
    images = str(photos(tmp_path, 4, side=64))
    assert auto_config(images).config.network.stem == "imagenet"
    found = auto_config(images, ["views.size=32"]).config
    assert (found.network.stem, found.views.blur) == ("cifar", False)
    assert (
        auto_config(images, ["views.size=32", "network.stem=imagenet"]).config.views.blur is False
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_resnet", "vit_tiny_patch16_224"])
def test_an_automatic_stem_does_not_block_a_given_network(name: str, tmp_path: Path) -> None:
    config = auto_config(str(photos(tmp_path, 4)), [f"network.name={name}"]).config
    assert config.network.stem == "imagenet"
    networks.build(config.network, config.views.size)


def test_every_given_setting_is_kept() -> None:
    """Check with a GPU of 24 GiB and without a GPU."""
    plain = auto_recipe(60_000, 300, memory=24.0).config
    large = auto_recipe(60_000, 300, memory=24.0, given={"network.name": "resnet152"}).config
    assert (plain.network.name, large.network.name) == ("resnet50", "resnet152")
    few = auto_recipe(60_000, 32, memory=2.0).config.train.batch_size
    given = {"network.stem": "imagenet"}
    assert auto_recipe(60_000, 32, memory=2.0, given=given).config.train.batch_size > few
    assert auto_recipe(1000, 64, given={"train.epochs": 5}).config.optim.warmup_epochs == 0.5


@pytest.mark.slow
def test_a_given_network_trains_on_small_images(tmp_path: Path) -> None:
    words = ["pretrain", str(photos(tmp_path / "photos", 8)), "--set", "network.name=test_resnet"]
    words += ["--set", "train.epochs=1", "--steps", "1", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    config = read_config(tmp_path / "run")
    assert (config.network.name, config.optim.warmup_epochs) == ("test_resnet", 0.1)


SHORT = ("network.name=test_resnet", "train.epochs=2", "train.batch_size=4", "train.device=cpu")


def test_a_run_resumes_with_the_settings_that_were_derived_when_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of the package or another machine may derive other settings."""
    data, out = photos(tmp_path / "photos", 8), tmp_path / "run"

    def derive_constant_beta(batch: int, warmup: float) -> dict[str, tuple[object, str]]:
        return {"bottleneck.beta": (0.1, "ours"), "probe.neighbors": (1, "ours")}

    with monkeypatch.context() as patch:
        patch.setattr(auto, "_adaptive", derive_constant_beta)
        pretrain(data, out, settings=SHORT, display=silent())
    before = read_config(out)
    assert before.bottleneck.beta == 0.1
    config, _, _ = plan_pretraining(data, out, SHORT)
    assert config.bottleneck == before.bottleneck
    pretrain(data, out, settings=SHORT, display=silent())  # it has finished
    # A change by the user is an error, and other images have their own settings.
    with pytest.raises(ValueError, match=r"holds a run with bottleneck\.beta = 0\.1, not 2\.0"):
        pretrain(data, out, settings=[*SHORT, "bottleneck.beta=2"], display=silent())
    fewer = [change for change in SHORT if not change.startswith("train.epochs")]
    with pytest.raises(ValueError, match=r"holds a run with train\.epochs = 2, not 200"):
        pretrain(data, out, settings=fewer, display=silent())
    other = photos(tmp_path / "other", 8)
    assert plan_pretraining(other, out, SHORT)[0].bottleneck.schedule == "adaptive"

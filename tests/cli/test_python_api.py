"""The Python functions have the arguments of the commands; their results have short reprs."""

import inspect
import shutil
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tiny import CHANGES, photos, silent, tiny

import compressive
from compressive.cli.app import app
from compressive.config import Config, override
from compressive.evaluation.results import Results
from compressive.pretrained import timm_weights as pretrained
from compressive.rundir.folder import read_config, write_config

PROGRAM: Any = typer.main.get_command(app)
# Options of commands that Python spells differently or does not need.
OTHERS = {"changes", "markdown", "help", "encoders"}
OTHERS |= {"engine", "cpus_per_task", "gpus_per_task"}  # a program on a cluster calls Ray itself

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["pretrain", "evaluate", "embed", "compare", "report", "convert"])
def test_function_has_the_arguments_of_the_command(name: str) -> None:
    function = getattr(compressive, name)
    options = {param.name for param in PROGRAM.commands[name].params} - OTHERS
    assert options <= set(inspect.signature(function).parameters)


def test_pretrain_takes_a_folder_and_options(tmp_path: Path) -> None:
    small = [each for each in CHANGES if not each.startswith(("views.size", "train.batch_size"))]
    outcome = compressive.pretrain(
        photos(tmp_path / "photos", 8),
        method="simclr",
        image_size=16,
        batch_size=4,
        settings=small,
        out=tmp_path / "run",
        display=silent(),
    )
    assert outcome.step == outcome.total == 2
    config = read_config(tmp_path / "run")
    assert (config.method, config.views.size, config.recipe) == ("simclr", 16, "folder")
    assert config.train.batch_size == 4
    with pytest.raises(ValueError, match=r"Config.*recipe"):
        compressive.pretrain(config, recipe="simclr/quickstart")


def test_pretrain_takes_a_config(tmp_path: Path) -> None:
    outcome = compressive.pretrain(tiny("method=simclr"), tmp_path / "run", display=silent())
    assert outcome.folder == tmp_path / "run"
    assert repr(compressive.load(tmp_path / "run")).count("\n") == 0


def evaluated(folder: Path, config: Config, value: float) -> Path:
    write_config(folder, config, torch.device("cpu"))
    results = Results(folder.name, set="images")
    hits = torch.arange(100) < 100 * value
    results.add("kNN 20", "images", "top-1", hits, protocol={}, images="same")
    results.write(folder / "evaluation")
    return folder


def test_compare_and_report_take_folders(tmp_path: Path) -> None:
    runs = [
        evaluated(tmp_path / name, override(Config(), f"bottleneck.beta={beta}"), beta / 10)
        for name, beta in (("<a>", 3), ("b", 6))
    ]
    (found,) = comparisons = compressive.compare(*runs)
    assert [each.difference for each in found.differences] == [pytest.approx(0.3)]
    assert "1 of 1" in repr(comparisons)
    assert repr(comparisons).count("\n") == 0
    html = comparisons._repr_html_()
    assert escape("<a>") in html
    assert "<a>" not in html
    assert "30.0" in html
    page = compressive.report(*runs, out=tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert page.is_file()
    assert compressive.report(runs[0]) == runs[0] / "report.html"
    assert repr(compressive.compare(tmp_path)) == repr(comparisons)  # a folder of both runs


def test_results_and_encoder_have_short_reprs() -> None:
    results = Results("runs/<a>", set="images")
    results.add("kNN 20", "images", "top-1", 0.5, protocol={})
    assert repr(results) == "<Results of runs/<a>: 1 numbers on images, kNN 20 50.0 %>"
    assert escape("runs/<a>") in results._repr_html_()
    assert "<td>50.0</td>" in results._repr_html_()
    encoder = compressive.load("cifar10-byol-r18")
    for word in ("resnet18", "32 pixels", "512 features"):
        assert word in repr(encoder)
    assert repr(encoder).count("\n") == 0
    assert escape(repr(encoder)) in encoder._repr_html_()


def test_load_reads_weights_of_torchvision(tmp_path: Path) -> None:
    """Features are those of timm's network with timm's preprocessing."""
    import timm

    network: Any = timm.create_model("resnet18", num_classes=10).eval()
    torch.save(network.state_dict(), tmp_path / "a.pth")
    encoder = compressive.load(tmp_path / "a.pth")
    assert (encoder.settings.name, encoder.size, encoder.feature_dim) == ("resnet18", 224, 512)
    images = torch.randint(0, 256, (2, 3, 40, 50), dtype=torch.uint8)
    pixels = encoder.preprocess(images)
    assert pixels.shape == (2, 3, 224, 224)
    assert not any(weight.requires_grad for weight in encoder.parameters())
    network.reset_classifier(0)
    torch.testing.assert_close(encoder(pixels), network(pixels), rtol=1e-4, atol=1e-4)
    black = encoder.preprocess(torch.zeros(3, 40, 40, dtype=torch.uint8))[0, :, 0, 0]
    mean, std = torch.tensor(encoder.mean), torch.tensor(encoder.std)
    torch.testing.assert_close(black, -mean / std)


def test_timm_name_without_network_access_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is told to be offline, where it fails at once instead of trying for a minute."""
    seen = []

    def create(*_: Any, **options: Any) -> object:
        if options.get("pretrained"):
            seen.append(pretrained.constants.HF_HUB_OFFLINE)
            raise OSError("several\nlines")
        return create_model(*_, **options)

    create_model: Any = pretrained.timm.create_model
    monkeypatch.setattr(pretrained, "_is_online", lambda: False)
    monkeypatch.setattr(pretrained.timm, "create_model", create)
    with pytest.raises(ValueError, match=r"resnet18.*no network access.*--network") as caught:
        compressive.load("resnet18")
    assert "\n" not in str(caught.value)
    assert seen == [True]
    assert not pretrained.constants.HF_HUB_OFFLINE


def test_unreachable_server_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "getproxies", dict)
    monkeypatch.setattr(pretrained.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert not pretrained._is_online()
    monkeypatch.setattr(pretrained, "getproxies", lambda: {"https": "proxy"})
    assert pretrained._is_online()


@pytest.mark.slow
def test_fewer_images_after_a_full_evaluation_get_their_own_folder(tmp_path: Path) -> None:
    compressive.pretrain(tiny("method=simclr"), tmp_path / "run", display=silent())
    options: dict[str, Any] = {"tasks": "calibration", "device": "cpu", "display": silent()}
    results, full = compressive.evaluate(tmp_path / "run", **options)
    assert "ece" in {record.metric for record in results.records}
    _, fewer = compressive.evaluate(tmp_path / "run", max_images=20, **options)
    assert full == tmp_path / "run" / "evaluation"
    assert fewer == tmp_path / "run" / "evaluation-20"
    shutil.rmtree(full)
    _, first = compressive.evaluate(tmp_path / "run", max_images=20, **options)
    assert first == full

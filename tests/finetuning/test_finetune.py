"""`finetune` trains an encoder and a linear layer on labels, and records its test accuracy."""

import copy
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from colored_images import paint
from command_line import error_line
from processes import together
from safetensors.torch import load_file
from tiny import noise, silent, tiny
from torch import Tensor, nn

import compressive
from compressive import encoder as encoder_file
from compressive.augment.ops import augment
from compressive.augment.params import View
from compressive.classifier import load_classifier
from compressive.config import Config, Network, Views, override
from compressive.data.sampler import batch_index_stream
from compressive.data.source import ImageSource
from compressive.data.sources import open_source
from compressive.data.splits import few_labels
from compressive.encoder import Encoder
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import Splits
from compressive.evaluation.features import Features
from compressive.evaluation.results import read
from compressive.evaluation.tasks import few_label
from compressive.finetuning import run as run_module
from compressive.finetuning import search as search_module
from compressive.finetuning.plan import BYOL_RATES, Plan, default_batch_size
from compressive.finetuning.run import finetune
from compressive.finetuning.subset import check_classes, draw_labels
from compressive.networks import build
from compressive.rng import image_keys
from compressive.rundir.files import CLASSIFIER, FINETUNE
from compressive.train import loop
from compressive.train.loop import TrainingFailed, pretrain
from compressive.train.step import view_pair

pytestmark = pytest.mark.usefixtures("one_thread")
FAST = {"device": "cpu", "settings": ("train.tensorboard=false",)}


def write_encoder(folder: Path, seed: int = 0) -> Path:
    """Write a network with random weights for images of 16 pixels."""
    torch.manual_seed(seed)
    settings = Network(name="test_resnet")
    return encoder_file.save(folder, build(settings, 16), settings, 16, 20)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of colored images: 8 to train on and 4 to test on, each."""
    folder = tmp_path_factory.mktemp("colored")
    paint(folder / "train", seed=0, each=8)
    paint(folder / "test", seed=1, each=4)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def tune(encoder: Path, data: Path, out: Path, **options: Any) -> Any:
    return finetune(encoder, data, out, **{**FAST, "display": silent(), **options})


def plain_loop(network: nn.Module, images: Tensor, labels: Tensor, *, lr: float, steps: int):
    """Fine-tune with torch alone: SGD with Nesterov momentum and a cosine schedule."""
    network, head = copy.deepcopy(network).train(), nn.Linear(network.num_features, 3)  # pyright: ignore
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    weights = [*network.requires_grad_(True).parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(weights, lr, momentum=0.9, nesterov=True)
    order = batch_index_stream(len(images), 8, seed=0)
    view = View(jitter=0.0, gray=0.0, blur=0.0)
    for step in range(steps):
        batch = next(order)
        keys = image_keys(batch.index, seed=0, epoch=batch.epoch, view=3)
        x = augment(images[batch.index], keys, view, 16)
        for group in optimizer.param_groups:
            group["lr"] = lr * 8 / 256 * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = F.cross_entropy(head(network(x)), labels[batch.index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network, head


def test_training_equals_a_plain_loop(encoder: Path, data: Path, tmp_path: Path) -> None:
    tune(encoder, data, tmp_path / "run", lr=0.5, epochs=2, batch_size=8)
    source = open_source(data, "train")
    assert source.labels is not None
    images = torch.stack([source.image(i) for i in range(len(source))])
    start = compressive.load(encoder).network
    network, head = plain_loop(start, images, source.labels, lr=0.5, steps=7)
    found = load_file(tmp_path / "run" / CLASSIFIER)
    expected = {**network.state_dict()}
    expected |= {f"classifier.{name}": value for name, value in head.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name
    changed = [(expected[name] - value).abs().max() for name, value in start.named_parameters()]
    assert max(changed) > 1e-3
    own, saved = load_classifier(tmp_path / "run").encoder, compressive.load(tmp_path / "run")
    assert (own.side, own.size, own.antialias) == (saved.side, saved.size, saved.antialias)
    for name, value in saved.network.state_dict().items():
        assert torch.equal(own.network.state_dict()[name], value)


def test_label_subsets_are_those_of_the_few_label_task(data: Path) -> None:
    source = open_source(data, "train")
    labels = source.labels
    assert labels is not None
    rows = Features(torch.zeros(len(labels), 1), labels, torch.arange(len(labels)))
    context = object.__new__(EvalContext)
    context.seed, context.device = 3, torch.device("cpu")
    context.splits = Splits("colored", source, source)
    first = next(iter(few_label._subsets(context, rows, 0.5, None)))
    drawn = draw_labels(source, 0.5, seed=3).source
    expected = [source.origin(i) for i in first.tolist()]
    assert [drawn.origin(i) for i in range(len(drawn))] == expected
    assert len(expected) == 12
    assert torch.equal(first, few_labels(labels, 0.5, seed=3))
    other = draw_labels(source, 0.5, seed=4).source
    assert [other.origin(i) for i in range(len(other))] != expected


def few_rates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_module, "SMALL_SET_RATES", (0.5, 0.05))
    patch.setattr(search_module, "_MOST_BEYOND", 0)


def stop_at(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Send Ctrl-C in one training step."""
    count, step = [0], loop.train_step

    def counted(*args: Any) -> Any:
        count[0] += 1
        if count[0] == calls:
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args)

    patch.setattr(loop, "train_step", counted)


@pytest.mark.slow
def test_a_resumed_run_gives_the_same_classifier(
    encoder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rates(monkeypatch)
    options = {"epochs": 2, "batch_size": 8}
    whole = tune(encoder, data, tmp_path / "whole", **options)
    assert whole.outcome.total == 7
    for calls in (7, 5):  # candidates have 5 steps: stop in the second, then in the last run
        with monkeypatch.context() as patch:
            stop_at(patch, calls)
            stopped = tune(encoder, data, tmp_path / "parts", **options)
            assert stopped.test is None
            assert not (tmp_path / "parts" / CLASSIFIER).exists()
    done = tune(encoder, data, tmp_path / "parts", **options)
    one, two = (load_file(tmp_path / name / CLASSIFIER) for name in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    plans = [json.loads((tmp_path / name / FINETUNE).read_text()) for name in ("whole", "parts")]
    assert plans[0] == plans[1]
    assert set(plans[0]["search"]) == {"0.5", "0.05"}
    assert done.test.value("top-1").value == whole.test.value("top-1").value
    assert not (tmp_path / "parts" / "search").exists()


def test_other_options_do_not_resume_a_run(encoder: Path, data: Path, tmp_path: Path) -> None:
    tune(encoder, data, tmp_path / "run", lr=0.5, epochs=1)
    with pytest.raises(ValueError, match="labels 100%, not 50%"):
        tune(encoder, data, tmp_path / "run", lr=0.5, epochs=1, labels="50%")
    with pytest.raises(ValueError, match=r"lr 0\.5, not 0\.1"):
        tune(encoder, data, tmp_path / "run", lr=0.1, epochs=1)
    other = write_encoder(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="another encoder"):
        tune(other, data, tmp_path / "run", lr=0.5, epochs=1)
    moved = shutil.copytree(encoder.parent, tmp_path / "moved") / encoder.name
    tune(moved, data, tmp_path / "run", lr=0.5, epochs=1)
    with pytest.raises(ValueError, match="not empty"):
        tune(encoder, data, encoder.parent, lr=0.5, epochs=1)


@pytest.mark.slow
def test_test_labels_do_not_influence_training(
    encoder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rates(monkeypatch)
    swapped = tmp_path / "data" / "swapped"
    shutil.copytree(data / "train", swapped / "train")
    paint(swapped / "test", seed=1, each=4, swap=True)
    found = [tune(encoder, place, tmp_path / place.name, epochs=1) for place in (data, swapped)]
    one, two = (load_file(each.folder / CLASSIFIER) for each in found)
    assert all(torch.equal(one[name], two[name]) for name in one)
    losses = [each.test.value("nll").value for each in found]
    assert losses[0] != losses[1]


def in_processes(rank: int, folder: Path, encoder: Path, data: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        few_rates(patch)
        tune(encoder, data, folder / "two", epochs=1, batch_size=8)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_agree_with_one(
    encoder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together(in_processes, (tmp_path, encoder, data), 2)
    few_rates(monkeypatch)
    tune(encoder, data, tmp_path / "one", epochs=1, batch_size=8)
    one, two = (load_file(tmp_path / name / CLASSIFIER) for name in ("one", "two"))
    for name, value in one.items():
        assert torch.allclose(two[name], value, rtol=1e-3, atol=1e-5), name
    scores = [
        json.loads((tmp_path / name / FINETUNE).read_text())["search"] for name in ("one", "two")
    ]
    assert scores[0]["0.5"]["nll"] == pytest.approx(scores[1]["0.5"]["nll"], rel=1e-3)


# --- search of the learning rate ------------------------------------------------------------------


def losses(best: float) -> Any:
    """Return a function for `search` whose log-loss is lowest at one rate."""

    def try_rate(rate: float, folder: Path, title: str) -> dict[str, float | None]:
        return {"accuracy": 0.5, "nll": abs(math.log(rate / best))}

    return try_rate


@pytest.mark.parametrize(
    ("best", "chosen", "tried"), [(0.05, 0.05, 5), (0.2, 0.2, 7), (9.0, 0.8, 8), (2e-3, 0.0025, 7)]
)
def test_search_extends_the_grid_beyond_its_ends(
    best: float, chosen: float, tried: int, tmp_path: Path
) -> None:
    plan = Plan({})
    assert search_module.search(plan, tmp_path, BYOL_RATES, "log-loss", losses(best)) == chosen
    assert len(plan.scores) == tried


def test_search_by_accuracy_breaks_ties_by_the_loss() -> None:
    scores: dict[str, dict[str, float | None]] = {
        "0.1": {"accuracy": 0.9, "nll": 2.0},
        "0.05": {"accuracy": 0.9, "nll": 1.0},
        "0.02": {"accuracy": 0.8, "nll": 0.5},
        "0.01": {"accuracy": 0.0, "nll": None},
    }
    assert search_module.best_rate(Plan({}, scores), "accuracy") == 0.05
    assert search_module.best_rate(Plan({}, scores), "log-loss") == 0.02
    with pytest.raises(TrainingFailed, match=r"0\.01"):
        search_module.best_rate(Plan({}, {"0.01": scores["0.01"]}), "log-loss")


def test_default_batches_have_about_twelve_steps_per_epoch() -> None:
    assert [default_batch_size(count) for count in (9, 60, 500, 12_811, 1_281_167)] == [
        *(8, 16, 32, 1024, 1024)
    ]


# --- records --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_record_is_next_to_the_results_of_the_run(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny(f"data.source={data}", "train.batch_size=4", "train.steps=1")
    pretrain(config, run, display=silent())
    compressive.evaluate(run, tasks="knn", device="cpu", display=silent())
    before = read(run / "evaluation").records
    found = tune(run, data, tmp_path / "tuned", lr=0.5, epochs=1, labels="50%")
    results = read(run / "evaluation")
    assert [record.key for record in results.records[: len(before)]] == [r.key for r in before]
    record = next(r for r in results.records if r.key == f"finetune 50%/{data.name}/top-1")
    assert record.low is not None
    assert record.high is not None
    assert record.low < record.value < record.high
    assert (record.n, record.protocol["labels"], record.protocol["label_fraction"]) == (12, 12, 0.5)
    assert record.protocol["chosen"] == {"learning_rate_for_256": 0.5}
    assert found.test.folder == run / "evaluation"
    # The same settings again replace the record; an encoder that is no run has its own results.
    tune(run, data, tmp_path / "tuned", lr=0.5, epochs=1, labels="50%")
    assert len(read(run / "evaluation").records) == len(results.records)
    page = compressive.report(run, out=tmp_path / "report.html")
    assert "finetune 50%" in page.read_text()
    # Results of other images are not replaced.
    other = tune(run, data, tmp_path / "seed1", lr=0.5, epochs=1, seed=1)
    assert other.test.folder == tmp_path / "seed1" / "evaluation"
    assert len(read(run / "evaluation").records) == len(results.records)


def test_two_tuned_encoders_can_be_compared(encoder: Path, data: Path, tmp_path: Path) -> None:
    other = write_encoder(tmp_path / "other", seed=1)
    for place, name in ((encoder, "a"), (other, "b")):
        tune(place, data, tmp_path / name, lr=0.5, epochs=1)
    (found,) = compressive.compare(tmp_path / "a", tmp_path / "b")
    keys = {each.key: each for each in found.differences}
    difference = keys[f"finetune 100%/{data.name}/top-1"]
    assert difference.verdict != "measured differently"


# --- the method -----------------------------------------------------------------------------------


def test_a_tuned_encoder_keeps_the_normalization(data: Path, tmp_path: Path) -> None:
    settings = Network(name="test_resnet")
    channels: dict[str, Any] = {"mean": (0.48145466, 0.4, 0.3), "std": (0.26862954, 0.3, 0.1)}
    place = encoder_file.save(tmp_path / "start", build(settings, 16), settings, 16, 20, **channels)
    tune(place, data, tmp_path / "run", lr=0.5, epochs=1)
    for loaded in (
        compressive.load(tmp_path / "run"),
        load_classifier(tmp_path / "run").encoder,
    ):
        assert isinstance(loaded, Encoder)
        assert (loaded.mean, loaded.std) == (channels["mean"], channels["std"])


def test_crop_views_keep_colors() -> None:
    for view in view_pair(Views(policy="crop")):
        assert (view.jitter, view.gray, view.blur, view.solarize) == (0, 0, 0, 0)
        assert (view.crop, view.crop_scale_min, view.flip) == (True, 0.08, 0.5)


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match=r"optim\.momentum"):
        override(Config(), "optim.name=sgd", "optim.nesterov=true", "optim.momentum=0")


# --- invalid input --------------------------------------------------------------------------------


def test_invalid_options_are_rejected(encoder: Path, data: Path, tmp_path: Path) -> None:
    start = f"finetune {encoder} {data} --device cpu --out {tmp_path / 'run'}"
    for option, expected in {
        "--labels 0%": "0%",
        "--labels 200%": "200%",
        "--labels 1": "'1'",
        "--labels 5%": "3 classes",
        "--epochs 0": "train.epochs",
        "--lr -1": "optim.lr",
        "--batch-size 1": "train.batch_size",
        "--set views.size=8": "views.size",
        "--set network.width=2": "network.width",
        "--benchmark-root /nowhere": "/nowhere",
    }.items():
        assert expected in error_line(f"{start} {option}"), option
    assert not (tmp_path / "run").exists()
    assert "finetune" in error_line(f"pretrain {data} --method finetune --out {tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_unsuitable_data_are_rejected(encoder: Path, tmp_path: Path) -> None:
    def write(*names: str) -> None:
        for i, name in enumerate(names):
            (tmp_path / name).mkdir(parents=True)
            for k in range(3):
                noise(16, 16, seed=3 * i + k).save(tmp_path / name / f"{k}.png")

    write("flat", "one/train/cat", "one/test/cat")
    write("differ/train/cat", "differ/train/dog", "differ/test/cat", "differ/test/emu")
    for name, expected in {"flat": "labels", "one": "labels", "differ": "'emu'"}.items():
        line = f"finetune {encoder} {tmp_path / name} --device cpu --out {tmp_path / 'run'}"
        assert expected in error_line(line), name
        assert not (tmp_path / "run").exists()


def test_one_class_is_rejected() -> None:
    def read(i: int) -> Tensor:
        return torch.zeros(3, 4, 4, dtype=torch.uint8)

    labels = torch.ones(4, dtype=torch.long)
    parts: dict[str, Any] = {"count": 4, "read": read, "place": str, "classes": ("dog", "cat")}
    source = ImageSource(name="pets", labels=labels, **parts)
    with pytest.raises(ValueError, match="'cat'"):
        check_classes(Splits("pets", source, source), "pets")


def test_a_damaged_plan_is_rejected(encoder: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / FINETUNE).write_text('{"format_version": 1, "about": {}}')
    with pytest.raises(ValueError, match=FINETUNE):
        tune(encoder, data, tmp_path, lr=0.5)

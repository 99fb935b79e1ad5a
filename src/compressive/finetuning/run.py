"""Fine-tune an encoder: choose the learning rate on held-out labels, train, test once."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compressive.classifier import Classifier, save_classifier
from compressive.config import Config, override
from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.loaders import canvas_side
from compressive.data.location import ImageData
from compressive.data.several import count_table, is_path, place_of
from compressive.data.source import Source, subset
from compressive.device import pick_device
from compressive.device import precision as pick_precision
from compressive.distributed import rank, wait_for_all
from compressive.encoder import Encoder
from compressive.evaluation.dataset import Splits, open_splits
from compressive.evaluation.features import network_fingerprint
from compressive.evaluation.frozen_model import load_encoder
from compressive.finetuning.classify import Classified, classify
from compressive.finetuning.label_share import parse_fraction
from compressive.finetuning.plan import (
    BYOL_RATES,
    DEFAULT_RATE,
    SMALL_SET_RATES,
    Plan,
    build_config,
    default_batch_size,
    default_epochs,
    open_plan,
)
from compressive.finetuning.record import Recorded, record_test
from compressive.finetuning.search import Scores, search
from compressive.finetuning.subset import Labeled, check_classes, draw_labels, hold_out
from compressive.methods.supervised import Supervised
from compressive.metrics import nll, top_k_accuracy
from compressive.progress import Display
from compressive.recipes.options import as_changes
from compressive.rundir.files import CLASSIFIER, local_path
from compressive.rundir.folder import read_run_id
from compressive.rundir.lock import ensure_writable
from compressive.rundir.places import describe_places
from compressive.tracking import check_trackers, track_records
from compressive.train import loop
from compressive.train.loop import TrainingFailed
from compressive.train.outcome import Outcome
from compressive.train.schedule import Schedule

_PROTOCOL = "whole network, SGD with Nesterov momentum 0.9, cosine, no decay"
_AUGMENTATION = "random crop of 8 to 100 % of the area, flip"


class Finetuned(NamedTuple):
    """The result of fine-tuning; without `test` if training was stopped early."""

    folder: Path
    outcome: Outcome  # of the training run that ended last
    test: Recorded | None = None


def finetune(
    encoder: str | Path,
    data: ImageData,
    out: str | Path | None = None,
    *,
    labels: str = "100%",
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: str = "auto",
    network: str = "",
    size: int = 0,
    benchmark_root: str | Path | None = None,
    track: str | None = None,
    settings: Sequence[str] = (),
    display: Display | None = None,
) -> Finetuned:
    """Train the whole network and a linear layer on labels; test once on the test split.

    The arguments are those of `compressive finetune`. `labels` is the percentage of the training
    labels to use. `lr` is for 256 images; without it, the learning rate is chosen on a fifth of the
    used labels, and the network is then trained on all of them.

    Resume if `out` holds an unfinished fine-tuning run with the same options.
    """
    share = parse_fraction(labels)
    where = pick_device(device, called="--device")
    place, root = str(encoder), None if benchmark_root is None else local_path(benchmark_root)
    if root is not None and not root.is_dir():
        raise ValueError(f"--benchmark-root must be the folder with 1percent.txt, got {root}")
    source = load_encoder(encoder, network=network or None, size=size)
    images = place_of(data)
    splits = open_splits(images if is_path(data) else data, seed=seed)
    names = check_classes(splits, describe_places(images))
    labeled = draw_labels(splits.train, share, seed=seed, benchmark_root=root)
    config = build_config(
        source,
        images,
        count=len(labeled.source),
        epochs=default_epochs(share) if epochs is None else epochs,
        batch_size=default_batch_size(len(labeled.source)) if batch_size is None else batch_size,
        seed=seed,
        device=device,
        precision=precision,
        settings=as_changes({"track": track}, settings),
    )
    check_trackers(config.train.track)
    if lr is not None:
        config = override(config, f"optim.lr={lr!r}")
    Schedule(config, len(labeled.source))  # checks the batch size before anything is written
    folder = local_path(out or _default_folder(place, splits.name, share, seed))
    ensure_writable(folder)
    about = {
        "labels": f"{100 * share:g}%",
        "seed": seed,
        "epochs": config.train.epochs,
        "batch_size": config.train.batch_size,
        "lr": lr,
        "settings": list(settings),
        "weights": network_fingerprint(source.network),
        "images": DatasetFingerprint(labeled.source).of(),
        "encoder": place,
    }
    trainer = _Trainer(source, names, config, where, display or Display(quiet=rank() > 0))
    for line in count_table(splits.train):
        trainer.display.say(line)
    plan = open_plan(folder, about)
    plan.about["encoder"] = place
    return _run(trainer, plan, folder, splits, labeled, share, lr)


def _default_folder(place: str, data: str, share: float, seed: int) -> Path:
    name = Path(place).stem if Path(place).is_file() else Path(place).name
    return Path("runs") / f"finetune-{name}-{data}-{100 * share:g}pct-seed{seed}"


def _run(
    trainer: "_Trainer",
    plan: Plan,
    out: Path,
    splits: Splits,
    labeled: Labeled,
    share: float,
    lr: float | None,
) -> Finetuned:
    """Choose the learning rate if it is not given, train on all labels, and test."""
    assert labeled.source.labels is not None
    is_imagenet = len(trainer.names) == 1000
    by, grid = ("accuracy", BYOL_RATES) if is_imagenet else ("log-loss", SMALL_SET_RATES)
    parts = None if lr is not None else hold_out(labeled.source.labels, seed=trainer.config.seed)
    rate = lr or DEFAULT_RATE
    if parts is not None:
        fit, held = (subset(labeled.source, part) for part in parts)

        def try_rate(rate: float, folder: Path, title: str) -> Scores | None:
            trainer.display.say(
                f"learning rate {rate:g} ({title}): {len(fit):,} labels to train on, "
                f"{len(held):,} held out"
            )
            return trainer.score(rate, folder, fit, held)

        found = plan.chosen or search(plan, out, grid, by, try_rate)
        if found is None:
            assert trainer.outcome is not None
            return Finetuned(out, trainer.outcome)
        rate = found
        trainer.display.say(f"learning rate {rate:g}, chosen by {by}; training on all labels")
    classifier = trainer.train(rate, out, labeled.source)
    assert trainer.outcome is not None
    if classifier is None:
        return Finetuned(out, trainer.outcome)
    if rank() == 0:
        save_classifier(out / CLASSIFIER, classifier, run_id=read_run_id(out))
    test = trainer.classify(classifier, splits.test, "test images")
    chosen = f"rate by {by}" if lr is None else "rate given"
    protocol = {
        "classifier": f"{_PROTOCOL}, {chosen}",
        "augmentation": _AUGMENTATION,
        "epochs": trainer.config.train.epochs,
        "batch": trainer.config.train.batch_size,
        "steps": trainer.outcome.total,
        "labels": len(labeled.source),
        "label_fraction": share,
        "chosen": {"learning_rate_for_256": rate},
        "chosen_on": _chosen_on(lr, parts, by),
        "scores_there": plan.scores,
        **({"list": str(labeled.list_file)} if labeled.list_file else {}),
    }
    recorded = record_test(
        plan.about["encoder"],
        classifier,
        splits,
        test,
        out,
        share=share,
        seed=trainer.config.seed,
        precision=trainer.precision,
        protocol=protocol,
        display=trainer.display,
    )
    if rank() == 0:
        track_records(out, recorded.records, trainer.display.say)
    return Finetuned(out, trainer.outcome, recorded)


def _chosen_on(lr: float | None, parts: Any, by: str) -> str:
    if lr is not None:
        return "given by the user"
    if parts is None:
        return "not chosen: half of the classes or more have one image"
    return f"the {by} of {len(parts[1]):,} held-out labels, then trained on all of them"


class _Trainer:
    """Trains classifiers that start from the same encoder."""

    def __init__(
        self,
        encoder: Encoder,
        names: tuple[str, ...],
        config: Config,
        device: torch.device,
        display: Display,
    ) -> None:
        self.encoder, self.names, self.config = encoder, names, config
        self.device, self.display = device, display
        self.precision = pick_precision(config.train.precision, device)
        self.outcome: Outcome | None = None  # of the last run
        self._method: Supervised | None = None

    def score(self, rate: float, folder: Path, fit: Source, held: Source) -> Scores | None:
        """Train on `fit` and return the scores on `held`; None if training was stopped."""
        try:
            short = ("train.tensorboard=false", "train.track=", "health.max_restarts=0")
            classifier = self.train(rate, folder, fit, *short)
        except TrainingFailed:
            self.display.say(f"learning rate {rate:g} diverged")
            return {"accuracy": 0.0, "nll": None}
        if classifier is None:
            return None
        found = self.classify(classifier, held, "held-out images")
        accuracy = float(top_k_accuracy(found.logits, found.labels))
        loss = float(nll(found.logits, found.labels))
        self.display.say(f"learning rate {rate:g}: {accuracy:.1%}, log-loss {loss:.3f}")
        return {"accuracy": accuracy, "nll": loss}

    def train(self, rate: float, out: Path, source: Source, *changes: str) -> Classifier | None:
        """Train on all images of a source; None if training was stopped before its end."""
        config = override(self.config, f"optim.lr={rate!r}", *changes)
        self.outcome = loop.pretrain(
            config, out, source=source, method=self._build, display=self.display
        )
        wait_for_all()
        if self.outcome.step < self.outcome.total:
            return None
        assert self._method is not None
        start, method = self.encoder, self._method
        trained = Encoder(
            method.encoder,
            start.settings,
            start.size,
            canvas_side(source, start.size, config.data.max_side),
            antialias=config.views.antialias,
            mean=start.mean,
            std=start.std,
        )
        return Classifier(trained, method.head, self.names).eval()

    def classify(self, classifier: Classifier, source: Source, title: str) -> Classified:
        """Classify the central crops of all images of a source."""
        with self.display:
            self.display.begin(title)
            return classify(
                classifier, source, precision=self.precision, display=self.display, title=title
            )

    def _build(self, config: Config) -> Supervised:
        """Build the method with a copy of the encoder; the loop calls this once per run."""
        network = copy.deepcopy(self.encoder.network).train().requires_grad_(True)
        self._method = Supervised(network, len(self.names))
        return self._method

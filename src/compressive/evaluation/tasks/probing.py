"""Tasks beyond accuracy: geometry of the features, corruptions, smoothness, information."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from compressive.augment.ops import augment_pair, normalize
from compressive.augment.params import View
from compressive.config import Config
from compressive.corruptions.corrupt import EXTRAS, NAMES, corrupt, default_table
from compressive.data.loaders import Batch
from compressive.evaluation.context import EvalContext
from compressive.evaluation.datasets.layouts import SEVERITIES
from compressive.evaluation.features import forward
from compressive.evaluation.tasks.classify import linear
from compressive.evaluation.tasks.information import direction_of
from compressive.evaluation.tasks.information import information as measure_information
from compressive.evaluation.tasks.robustness_scores import mean_corruption_error
from compressive.evaluation.tasks.smoothness import histogram
from compressive.evaluation.tasks.smoothness import smoothness as measure_smoothness
from compressive.metrics import effective_rank, hits, uniformity
from compressive.rng import image_keys
from compressive.train.step import view_pair

SOME, RANKED = 10_000, 25_600  # images for what is quadratic in them, and for RankMe as its authors
_SMOOTH = {"train": 10_000, "test": 50_000}  # images, as in the paper
PAIRS = 256  # images whose views are each other's candidates


def geometry(exam: EvalContext) -> None:
    """How the features of test images lie: alignment, uniformity, RankMe, effective rank."""
    name, test = exam.splits.name, exam.features("test")
    random = torch.Generator().manual_seed(exam.seed)
    feats = test.feats[torch.randperm(len(test.feats), generator=random).to(exam.device)]
    on = "normalized h"
    few = feats[:SOME]
    figures = {
        "uniformity": (uniformity(few), len(few), {"on": on, "t": 2, "pairs": "all"}),
        "RankMe": (effective_rank(feats[:RANKED]), len(feats[:RANKED]), {"on": "h"}),
        "effective rank": (
            effective_rank(feats[:RANKED], center=True),
            len(feats[:RANKED]),
            {"on": "h, centered; exp of the entropy of the singular values"},
        ),
    }
    for metric, (value, n, words) in figures.items():
        protocol = exam.protocol(**words)
        exam.results.add("geometry", name, metric, float(value), n=n, protocol=protocol)
    pair = _view_pair(exam)
    apart = torch.cat([_apart(exam, batch, pair) for batch in exam.batches("test")])
    of = "the run's own" if exam.subject.config else "the paper's"
    words = {"augmentations": of, "views": [asdict(view) for view in pair]}
    protocol = exam.protocol(on=on, alpha=2, **words)
    images = exam.images("test", test.index)
    exam.results.add("geometry", name, "alignment", apart, protocol=protocol, images=images)


def corruptions(
    exam: EvalContext, *, frost: Sequence[UInt8[Tensor, "3 h w"]] | None = None, epochs: int = 0
) -> None:
    """Accuracy on test images corrupted here: 15 types (and 4 more), 5 severities each.

    The classifier is that of the linear evaluation, trained on clean train images.
    """
    classifier = exam.classifier or linear(exam, epochs=epochs)
    names = [name for name in (*NAMES, *EXTRAS) if name != "frost" or frost is not None]
    if frost is None:
        exam.skip("frost, which needs six photographs (--frost DIR); not in the mean")
    cells = [(name, severity) for name in names for severity in SEVERITIES]
    found: dict[tuple[str, int], list[Tensor]] = {cell: [] for cell in cells}
    count = len(exam.source("test"))
    for number, (batch, images) in enumerate(_bytes(exam)):
        for cell in cells:
            x = corrupt(images, *cell, index=batch.index, seed=exam.seed, frost=frost)
            x = normalize(x / 255, mean=exam.subject.mean, std=exam.subject.std)
            logits = classifier(forward(exam.subject.network, x, exam.dtype))
            found[cell].append(hits(logits, batch.label))
        exam.tell("corruptions", min(count, (number + 1) * len(images)), count)
    right = {cell: torch.cat(parts).double().cpu() for cell, parts in found.items()}
    _record_corruptions(exam, names, right)


def smoothness(exam: EvalContext, *, most: int = 0) -> None:
    """Local Lipschitz estimates for eight changes of color, on train and test images.

    As the paper has it, on 10,000 of train and at most 50,000 of test; `most`: on so many of each.
    """
    method = exam.subject.method
    if method is None:
        why = exam.subject.why_no_method or "which needs the projection of a run of ours"
        exam.skip(f"smoothness, {why}")
        return
    for split in ("train", "test"):
        found = measure_smoothness(
            direction_of(method),
            _first(exam, split, most or _SMOOTH[split]),
            size=exam.subject.size,
            seed=exam.seed,
            antialias=exam.subject.antialias,
        )
        dataset = f"{exam.splits.name} {split}"
        for name, local in found.local.items():
            if not len(local.value):
                exam.skip(f"smoothness, {name}: it changes none of the images of {dataset}")
                continue
            bins = histogram(local.value)
            shape = {"edges": bins.edges.tolist(), "density": bins.first.tolist()}
            images = exam.images(split, local.index)
            protocol = {
                **found.protocol,
                "unchanged_images": local.dropped,
                "mean_in_normalized_units": float(local.normalized.mean()),
                "histogram": {**shape, "share_beyond": bins.first_beyond},
            }
            add = exam.results.add
            task, bound = f"smoothness {name}", {**found.protocol, "largest": local.bound**2}
            add(task, dataset, "lipschitz", local.value, protocol=protocol, images=images)
            squared = local.squared
            add(task, dataset, "lipschitz_squared_kl", squared, protocol=bound, images=images)


def information(exam: EvalContext) -> None:
    """The meter of the objectives on pairs of views of test images."""
    method, config = exam.subject.method, exam.subject.config
    if method is None or config is None:
        why = exam.subject.why_no_method or "which needs the heads of a run of ours"
        exam.skip(f"information, {why}")
        return
    places = exam.features("test").index.cpu()  # that can be read, so that batches are whole
    # Folders come class by class, and candidates of one class are harder to tell apart.
    random = torch.Generator().manual_seed(exam.seed)
    places = places[torch.randperm(len(places), generator=random)]
    found = measure_information(
        method,
        exam.some("test", places, min(PAIRS, len(places))),
        view_pair(config.views),
        size=exam.subject.size,
        seed=exam.seed,
        precision=exam.dtype,
    )
    protocol = {**found.protocol, "bound": found.bound, "images_left_out": found.dropped}
    protocol["candidates"] = "at random"
    for metric in ("residual", "reducible_residual", "predictive", "positive_cosine"):
        values = getattr(found, metric)
        if values is not None:
            images = exam.images("test", found.index)
            exam.results.add(
                "information", exam.splits.name, metric, values, protocol=protocol, images=images
            )


def _record_corruptions(
    exam: EvalContext, names: Sequence[str], right: dict[tuple[str, int], Float[Tensor, " count"]]
) -> None:
    protocol = exam.protocol(
        source="generated here from the crops as bytes, no JPEG in between",
        table=f"{default_table(exam.subject.size)} pixels",
        **exam.head,
    )
    images = exam.images("test", exam.features("test").index)
    official = [name for name in names if name in NAMES]
    cells = [right[name, severity] for name in official for severity in SEVERITIES]
    left_out = sorted(set(NAMES) - set(official))
    name = f"{exam.splits.name}-C"
    words = {"types": len(official), "left_out": left_out}
    mean = torch.stack(cells).mean(0)
    record = {**protocol, **words}
    exam.results.add("corruptions", name, "top-1", mean, protocol=record, images=images)
    for kind in names:
        each = [right[kind, severity] for severity in SEVERITIES]
        by_severity = {"by_severity": [float(values.mean()) for values in each]}
        values = torch.stack(each).mean(0)
        task = "corruption" if kind in NAMES else "extra corruption"
        record = {**protocol, **by_severity}
        dataset = f"{name} {kind}"
        exam.results.add(task, dataset, "top-1", values, protocol=record, images=images)
    if exam.classes == 1000:
        by_kind = {k: [float(right[k, s].mean()) for s in SEVERITIES] for k in official}
        error = mean_corruption_error(by_kind).value
        record = {**protocol, **words}
        exam.results.add("corruptions", name, "mce", error, n=len(mean), protocol=record)


def _bytes(exam: EvalContext) -> Iterator[tuple[Batch, UInt8[Tensor, "batch 3 size size"]]]:
    """Test images as the encoder sees them, as bytes."""
    size = 2048 if exam.subject.size <= 64 else 256
    for batch in exam.batches("test", size if exam.device.type != "cpu" else 256):
        yield batch, exam.crop.pixels(batch).mul(255).round().byte()


def _first(exam: EvalContext, split: str, most: int) -> Iterator[Batch]:
    """Some images of a split, spread over it."""
    count = len(exam.source(split))
    chosen = torch.arange(count)
    if count > most:
        random = torch.Generator().manual_seed(exam.seed)
        chosen = torch.randperm(count, generator=random)[:most].sort().values
    yield from exam.some(split, chosen)


def _view_pair(exam: EvalContext) -> tuple[View, View]:
    """How views are made where there may be no run: its own, or else the paper's."""
    config = exam.subject.config or Config()
    return view_pair(
        replace(config.views, size=exam.subject.size, antialias=exam.subject.antialias)
    )


def _apart(exam: EvalContext, batch: Batch, pair: tuple[View, View]) -> Float[Tensor, " batch"]:
    """Squared distances of the normalized features of two views."""
    views = [exam.recolored(view) for view in _pair(exam, batch, pair)]
    feats = [forward(exam.subject.network, view, exam.dtype) for view in views]
    x, y = (torch.nn.functional.normalize(f.double(), dim=1) for f in feats)
    return (x - y).square().sum(1)


def _pair(exam: EvalContext, batch: Batch, pair: tuple[View, View]) -> tuple[Tensor, Tensor]:
    number = torch.arange(2, device=exam.device).repeat_interleave(len(batch.index))
    index = torch.cat([batch.index, batch.index])
    keys = image_keys(index, seed=exam.seed, epoch=2**32 - 3, view=number)
    height, width, size = batch.height, batch.width, exam.subject.size
    return augment_pair(batch.images, keys, pair, size, height=height, width=width)

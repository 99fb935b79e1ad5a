"""Record the test accuracy of a fine-tuned classifier in results.json."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from compressive.classifier import Classifier
from compressive.distributed import rank
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import Splits
from compressive.evaluation.frozen_model import FrozenModel, from_encoder, open_model
from compressive.evaluation.results import Results
from compressive.evaluation.results_folder import (
    default_results_folder,
    locked_folder,
    refuse_other_files,
)
from compressive.evaluation.scores import add_scores
from compressive.evaluation.suite import describe_results, keep_earlier_results
from compressive.finetuning.classify import Classified
from compressive.progress import Display
from compressive.rundir.files import CONFIG, EVALUATION
from compressive.rundir.folder import command
from compressive.rundir.records import Record


class Recorded(NamedTuple):
    """The records of a fine-tuning run, and the folder of their results.json."""

    records: tuple[Record, ...]
    folder: Path

    def value(self, metric: str) -> Record | None:
        """Return the record of a metric, or None."""
        return next((each for each in self.records if each.metric == metric), None)


def task_name(share: float) -> str:
    """Return the name of the task, such as "finetune 1%"."""
    return f"finetune {100 * share:g}%"


def record_test(
    place: str,
    classifier: Classifier,
    splits: Splits,
    test: Classified,
    out: Path,
    *,
    share: float,
    seed: int,
    precision: torch.dtype,
    protocol: dict[str, Any],
    display: Display,
) -> Recorded:
    """Add the test scores to the results of the encoder's run, next to its linear evaluation.

    If the encoder is no run, or its results are of other images, they are stored in the folder of
    the fine-tuning run.
    """
    device = torch.device("cpu")
    models: list[tuple[FrozenModel, Path]] = []
    if (Path(place) / CONFIG).is_file():
        folder = default_results_folder(place, EVALUATION, 0)
        models.append((open_model(place, device), folder))
    models.append((from_encoder(classifier.encoder, str(out)), out / EVALUATION))
    for model, folder in models:
        try:
            results = Results(model.name, seed=seed, command=command())
            refuse_other_files(folder)
            with locked_folder(folder):
                context = EvalContext(
                    model,
                    splits,
                    results,
                    device=device,
                    seed=seed,
                    bf16=precision == torch.bfloat16,
                )
                return _add(context, folder, test, share, protocol)
        except ValueError as problem:
            if folder == models[-1][1]:
                raise
            display.say(f"note: {problem}; the result is stored in {models[-1][1]}")
    raise AssertionError


def _add(
    context: EvalContext, folder: Path, test: Classified, share: float, protocol: dict[str, Any]
) -> Recorded:
    results, splits = context.results, context.splits
    results.about |= {"max_images": 0, **describe_results(context)}
    results.set, results.of = splits.name, context.fingerprint
    context.task = task_name(share)
    keep_earlier_results(context, folder, [context.task], is_own=False)
    if test.unreadable:
        context.skip(f"{len(test.unreadable)} images of test that cannot be read")
    before = set(map(id, results.records))
    assert splits.train.labels is not None
    add_scores(
        results,
        context.task,
        splits.name,
        test.logits,
        test.labels,
        context.protocol(**protocol),
        seen=splits.train.labels,
        classes=splits.train.classes,
        images=context.images("test", test.index),
    )
    if rank() == 0:
        results.write(folder)
    return Recorded(tuple(r for r in results.records if id(r) not in before), folder)

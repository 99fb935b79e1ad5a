"""Evaluate an encoder: run a suite of tasks and write one record per number."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from compressive.corruptions.corrupt import load_frost
from compressive.data.location import PYTHON, ImageData
from compressive.data.several import is_path, place_of
from compressive.data.source import Source
from compressive.data.sources import open_source
from compressive.device import pick_device
from compressive.distributed import rank, stop, world_size
from compressive.evaluation.context import EvalContext, TaskOptions
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.features import network_fingerprint, remember_weights
from compressive.evaluation.frozen_model import FrozenModel, open_model
from compressive.evaluation.results import Results, read
from compressive.evaluation.results_folder import (
    default_results_folder,
    locked_folder,
    refuse_other_files,
)
from compressive.evaluation.task_clock import TaskClock
from compressive.evaluation.tasks import TASKS, select_tasks, split_names
from compressive.platforms.accelerators import device_name
from compressive.progress import Display
from compressive.rundir.files import EVALUATION, HELD_OUT, RESULTS, UNREADABLE, local_path
from compressive.rundir.folder import command
from compressive.rundir.lock import ensure_writable
from compressive.rundir.places import split_places
from compressive.tracking import track_records
from compressive.train.images import list_unreadable

TaskFunction = Callable[[EvalContext], object]
_OF_DATASET = ("data", "train_images", "test_images", "classes")  # keys of `results.about`


def evaluate(
    encoder: str | Path,
    *,
    suite: str = "standard",
    tasks: str | Sequence[str] = (),
    data: ImageData = "",
    labels: str = "",
    out: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    network: str = "",
    size: int = 0,
    max_images: int = 0,
    epochs: int = 0,
    held_out: bool = False,
    benchmark_root: str | Path | None = None,
    frost: str | Path | None = None,
    display: Display | None = None,
    more: Mapping[str, TaskFunction] | None = None,
) -> tuple[Results, Path]:
    """Evaluate an encoder; return the results and the folder that they were written to.

    The arguments are those of `compressive evaluate`. A task that is impossible here is skipped and
    listed. Results are written after every task. `tasks` are names, or one text with commas.
    `more` are your own tasks, which run after those of the suite, or if `tasks` names them.
    `held_out` evaluates on a fifth of the training images and opens no test image, so that
    hyperparameters can be tuned on the results.
    """
    clock, more = TaskClock(), more or {}
    place, data = str(encoder), place_of(data) if is_path(data) else data
    chosen = select_tasks(suite, split_names(tasks), tuple(more))
    _check_range(size=size, max_images=max_images, epochs=epochs, seed=seed)
    root = None if benchmark_root is None else local_path(benchmark_root)
    if root is not None and not root.is_dir():
        raise ValueError(f"--benchmark-root must be the folder with the data sets, got {root}")
    photographs = None if frost is None else load_frost(Path(frost))
    torch_device = pick_device(device, called="--device")
    with clock.measure("open"):
        model = open_model(place, torch_device, network=network, size=size)
        splits = open_splits(
            _data_of(model, data),
            seed=seed,
            most=max_images,
            held_out=held_out,
            max_pixels=model.max_pixels,
            labels=_uses_labels(model, data, labels),
        )
    splits = splits._replace(notes=(*splits.notes, *_trained_on_test(model, splits.test)))
    kind = HELD_OUT if held_out else EVALUATION
    out = local_path(out or default_results_folder(place, kind, max_images))
    ensure_writable(out)
    refuse_other_files(out)
    results = Results(model.name, seed=seed, command=command())
    results.about["max_images"] = max_images
    display = display or Display(quiet=rank() > 0)
    with locked_folder(out), display:
        context = EvalContext(
            model,
            splits,
            results,
            device=torch_device,
            seed=seed,
            cache=out / "features",
            display=display,
            options=TaskOptions(out, epochs, root, photographs),
            clock=clock,
        )
        try:
            _run_suite(context, chosen, more, out, is_own=_is_own(data))
        finally:
            context.close()
    return results, out


def _run_suite(
    context: EvalContext,
    chosen: Sequence[str],
    more: Mapping[str, TaskFunction],
    out: Path,
    *,
    is_own: bool,
) -> None:
    """Run the tasks in order and write the results after each; raise if none measured anything."""
    results, network = context.results, context.model.network
    results.about, results.set = results.about | describe_results(context), context.splits.name
    results.of = context.fingerprint
    keep_earlier_results(context, out, chosen, is_own=is_own)
    if world_size() > 1:  # all processes extract features; the first one does the rest alone
        for split in ("train", "test"):
            context.features(split)
        is_first = rank() == 0
        stop()
        if not is_first:
            return
    earlier, has_result = len(results.skipped), False
    changed, before = remember_weights(network), results.seconds
    for name in chosen:
        has_result |= _run_task(name, more.get(name) or TASKS[name].load(), context)
        results.about["seconds"] = {**before, **context.clock.rounded()}
        if changed():
            raise RuntimeError(f"weights or statistics of the network changed in {name}")
        if has_result:
            results.write(out)
            while context.after_results:
                context.after_results.pop()()
            list_unreadable(context.unreadable, out / UNREADABLE)
    if not has_result:
        raise ValueError(f"nothing was measured; skipped: {'; '.join(results.skipped[earlier:])}")
    track_records(Path(context.model.name), results.records, context.display.say)


def _run_task(name: str, task: TaskFunction, context: EvalContext) -> bool:
    """Run a task, or list it as skipped; return whether it did anything."""
    context.task, known, results = name, TASKS.get(name), context.results
    skipped, records = len(results.skipped), set(map(id, results.records))
    if known is not None and known.reads_test_sets and context.splits.held_out:
        context.skip(f"{name}, which reads test images")
        return False
    labels = context.splits.train.labels
    classes = 0 if labels is None else len(labels[labels >= 0].unique())
    if known is not None and known.needs_labels and classes < 2:
        where = f"{context.splits.name} has {'1 to train on' if classes else 'none'} (--data DATA)"
        context.skip(f"{name}, which needs labels of two classes: {where}")
        return False
    context.display.say(f"{name} ...")
    context.display.begin(name)
    try:
        with context.clock.measure(name):
            task(context)
    except (ValueError, FileNotFoundError) as problem:
        context.skip(f"{name}: {problem}")
    context.display.say(f"{name} took {context.clock.seconds[name]:.1f} s")
    return len(results.skipped) == skipped or any(id(r) not in records for r in results.records)


def keep_earlier_results(
    context: EvalContext, out: Path, chosen: Sequence[str], *, is_own: bool
) -> None:
    """Start with the records in `out` if they are of the same weights.

    Raise ValueError if some of them could not be kept, or if one evaluation is on test images and
    the other on held-out images. If the data set is not the encoder's own, the results keep the
    name of the earlier one.
    """
    if not (out / RESULTS).is_file():
        return
    old, results = read(out), context.results
    was_held_out = bool(old.about.get("held_out"))
    if was_held_out != context.splits.held_out:
        there, here = ("held-out", "test") if was_held_out else ("test", "held-out")
        raise ValueError(
            f"{out} has results on {there} images, but this evaluation is on {here} images; choose "
            "another --out"
        )
    if old.about.get("weights") != results.about["weights"]:
        return
    prepared = context.preprocessing()
    if any(old.about.get(name, value) != value for name, value in prepared.items()):
        lost, why = len(old.records), "--size"
    else:
        results.begin_with(old)
        results.about["seconds"] = old.seconds
        lost, why = (
            len(old.records) - len(results.records),
            "--max-images, --data, --labels or --seed",
        )
    now = {f"{task} on {context.splits.name}" for task in chosen}
    for text, place in old.skipped_in.items():
        if place not in now:
            context.skip(text, place)
    if not is_own:
        results.about |= {name: old.about[name] for name in _OF_DATASET if name in old.about}
    if lost:
        raise ValueError(
            f"{out} has {lost} records of other images or of another size, which would be lost "
            f"({why} differs); choose another --out, or delete {out / RESULTS}"
        )


def describe_results(context: EvalContext) -> dict[str, object]:
    """Describe the encoder, the data and the machine of the results."""
    return {
        "encoder": context.model.name,
        "weights": network_fingerprint(context.model.network),
        "held_out": context.splits.held_out,
        **context.preprocessing(),
        "data": context.splits.name,
        "train_images": len(context.source("train")),
        "test_images": len(context.source("test")),
        "classes": context.classes,
        "device": device_name(context.device) or "cpu",
        "torch": torch.__version__,
    }


def _check_range(**options: int) -> None:
    for name, value in options.items():
        if not 0 <= value < 2**32:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be 0 or more and below 2**32, got {value}")


def _is_own(data: ImageData) -> bool:
    """Return whether no images are given, so that those of the run are used."""
    return isinstance(data, str) and not data


def _data_of(model: FrozenModel, data: ImageData) -> ImageData:
    """Return the data set to evaluate on: `data`, or that of the run."""
    if not _is_own(data):
        return data
    if model.config is None:
        raise ValueError(f"--data is needed: {model.name} does not say which images to use")
    source = model.config.data.source
    for place in split_places(source):
        if place.startswith(PYTHON) or (Path(place).is_absolute() and not Path(place).exists()):
            raise ValueError(
                f"{model.name} was trained on {place}, which is not here; name the images to "
                "evaluate on with --data"
            )
    return source


def _uses_labels(model: FrozenModel, data: ImageData, labels: str) -> bool:
    """Return whether to use labels: as `labels` says, else as the run did on the same data."""
    if labels not in ("", "folder", "none"):
        raise ValueError(f"--labels must be folder or none, got {labels!r}")
    of_run = "folder" if not _is_own(data) or model.config is None else model.config.data.labels
    return (labels or of_run) == "folder"


def _trained_on_test(model: FrozenModel, test: Source) -> Iterator[str]:
    """Yield a note if a run was trained on the split that it is evaluated on."""
    data = None if model.config is None else model.config.data
    if data is None or data.split == "train":
        return
    with suppress(ValueError, OSError):  # the training data may be gone if --data is given
        trained = open_source(data.source, data.split)
        if any(trained.origin(i) == test.origin(0) for i in range(len(trained))):
            yield f"the encoder was trained on these test images (data.split={data.split})"

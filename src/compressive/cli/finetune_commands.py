"""Commands that learn from labels and predict them: finetune, predict."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressive.cli.evaluate_commands import DeviceName, EncoderName, InputSize, TimmName
from compressive.cli.outcome import print_stopped
from compressive.cli.terminal import (
    one_line_errors,
    path_argument,
    path_option,
    print_line,
    print_next,
    require_at_least,
)
from compressive.cli.train_commands import Changes, TrackerNames
from compressive.config import Config, check_device_name, override
from compressive.data.location import check_exists
from compressive.finetuning.label_share import parse_fraction
from compressive.recipes.options import as_changes
from compressive.rundir.files import CLASSIFIER, RESULTS
from compressive.rundir.places import join_places
from compressive.tracking import check_trackers
from compressive.weights import require_path

if TYPE_CHECKING:
    from compressive.finetuning.run import Finetuned

_LABELED_HELP = "Labeled images, as for pretrain, with a test split if there is one."
_SHARE_HELP = "Percentage of the training labels to use, balanced over classes, such as 1%."
_TUNING_EPOCHS_HELP = "Passes over the images; default: 60 up to 2% of the labels, else 30."
_RATE_HELP = "Peak learning rate for 256 images; default: chosen on held-out labels."
_BATCH_HELP = "Images per step over all processes; default: by the number of labels."
_ROOT_HELP = "Folder of SimCLR's 1percent.txt and 10percent.txt for ImageNet."
_FOLDER_HELP = "Folder of the run; default: runs/finetune-ENCODER-DATA-LABELS-seedN."
_CLASSIFIER_HELP = "The folder of a fine-tuning run, or its classifier.safetensors."
_training: partial[Any] = partial(typer.Option, rich_help_panel="Training")


def finetune_command(
    encoder: EncoderName,
    data: Annotated[list[str], path_argument(help=_LABELED_HELP)],
    labels: Annotated[str, _training(help=_SHARE_HELP)] = "100%",
    epochs: Annotated[int | None, _training(help=_TUNING_EPOCHS_HELP)] = None,
    lr: Annotated[float | None, _training(help=_RATE_HELP)] = None,
    batch_size: Annotated[int | None, _training(help=_BATCH_HELP)] = None,
    seed: Annotated[int, _training(help="Random seed.")] = 0,
    benchmark_root: Annotated[
        Path | None, path_option(help=_ROOT_HELP, rich_help_panel="Training")
    ] = None,
    device: DeviceName = "auto",
    precision: Annotated[
        str, typer.Option(help="auto, bf16 or float32.", rich_help_panel="Machine")
    ] = "auto",
    network: TimmName = "",
    size: InputSize = 0,
    out: Annotated[
        Path | None, path_option(help=_FOLDER_HELP, rich_help_panel="Output and resuming")
    ] = None,
    track: TrackerNames = None,
    changes: Changes = None,
) -> None:
    """Train an encoder and a linear layer on all or few labels, and test the classifier once.

    Follows the protocol of SimCLR and BYOL. Without --lr, the learning rate is chosen on a fifth of
    the used labels; then all of them are trained on. No hyperparameter is tuned on test images.

    Stops and saves on Ctrl-C; run the same command to resume. Under torchrun all processes train
    together.
    """
    with one_line_errors():
        # Check options before torch is imported, which takes seconds.
        check_device_name(device, "--device")
        require_at_least(0, seed=seed, size=size)
        parse_fraction(labels)
        numbers = {"train.epochs": epochs, "optim.lr": lr, "train.batch_size": batch_size}
        given = [f"{name}={value}" for name, value in numbers.items() if value is not None]
        given += as_changes({"track": track}, changes or ())
        config = override(Config(), f"train.precision={precision}", *given)
        check_trackers(config.train.track)
        require_path(encoder)
        place = join_places(data)
        check_exists(place)
        from compressive import distributed
        from compressive.finetuning.run import finetune

        distributed.start()
    try:
        with one_line_errors():
            found = finetune(
                encoder,
                place,
                out,
                labels=labels,
                epochs=epochs,
                lr=lr,
                batch_size=batch_size,
                seed=seed,
                device=device,
                precision=precision,
                network=network,
                size=size,
                benchmark_root=benchmark_root,
                track=track,
                settings=changes or (),
            )
        if distributed.rank() == 0:
            _print_finetuned(found, data)
    finally:
        distributed.stop()
    if found.test is None:
        raise typer.Exit(130)


def _print_finetuned(found: "Finetuned", data: Sequence[str]) -> None:
    """Print the test accuracy and the files, or where the run stopped and how to resume."""
    if found.test is None:
        print_stopped(found.outcome)
        return
    for metric in ("top-1", "top-5"):
        if (record := found.test.value(metric)) is not None:
            assert record.low is not None
            assert record.high is not None
            print_line(
                f"{record.task}, {metric} on {record.n:,} test images: {record.value:.1%} "
                f"(95 % interval {record.low:.1%} to {record.high:.1%})"
            )
    print_line(f"classifier: {found.folder / CLASSIFIER}")
    print_line(f"results: {found.test.folder / RESULTS}")
    print_next("predict", found.folder, *data)


def predict_command(
    classifier: Annotated[str, path_argument(help=_CLASSIFIER_HELP)],
    images: Annotated[list[str], path_argument(help="Images, as for pretrain; need no labels.")],
    out: Annotated[Path, path_option(help="File to write: .parquet or .csv.")] = Path(
        "predictions.parquet"
    ),
    split: Annotated[str, typer.Option(help="Split of the images.")] = "train",
    device: DeviceName = "auto",
) -> None:
    """Write the predicted class of each image, its probability, and the four next classes.

    Prints the accuracy if the images are sorted into folders with the names of the classes.
    """
    with one_line_errors():
        check_device_name(device, "--device")
        require_path(classifier)
        place = join_places(images)
        check_exists(place)
        from compressive.distributed import launched
        from compressive.finetuning.predict import predict

        if launched("WORLD_SIZE", 1) > 1:
            raise ValueError("predict runs in one process; start it without torchrun")
        found = predict(classifier, place, out, split=split, device=device)
    for origin, reason in found.unreadable:
        print_line(f"skipped: {origin}: {reason}")
    print_line(f"predictions: {found.path}, {found.count:,} images")
    if found.accuracy is not None:
        print_line(f"accuracy: {found.accuracy:.1%} of {found.labeled:,} labeled images")
    elif found.unknown:
        shown = ", ".join(found.unknown[:3]) + (", ..." if len(found.unknown) > 3 else "")
        print_line(f"note: no accuracy, because the classifier has no class {shown}")

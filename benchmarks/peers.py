"""Compare pretraining with lightly: same images, network, batch and schedule on one machine.

    python benchmarks/peers.py cifar --data /cifar --epochs 10       # ResNet-18, 32 px, batch 512
    python benchmarks/peers.py photos --steps 30                      # ResNet-50, 224 px, from JPEG
    python benchmarks/peers.py cifar --data builtin --small --epochs 1   # a test on any machine

Prints one JSON line. Each contestant runs in a separate process, one after the other. `ours` is
`pretrain` including logging and online probe, without and with train.activation_checkpointing.
`lightly` is lightly's transform, projection head, loss and data loader in the training loop of its
documentation, with our network, in bfloat16 and channels last, with and without compilation of the
network. Seconds are those of an epoch after the first. Memory is the peak of allocated tensors.
Accuracy is kNN on test images (k = 20), computed by the same function for all. lightly must be
installed. For 224 pixels both read the same files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from loader import write_photos
from step import begun, stepper
from timing import environment

from compressive import networks, optim, recipes
from compressive.config import Config, override, total_steps
from compressive.data.loaders import Resident
from compressive.data.sampler import BatchIndices
from compressive.data.sources import open_source
from compressive.device import pick_device
from compressive.train.knn import nearest_neighbors
from compressive.train.online_eval import features

CONTESTANTS = ("ours", "ours, recompute", "lightly", "lightly, compiled")
Step = Callable[[], object]


def settings(what: str, data: str, small: bool) -> Config:
    """Return the settings of our SimCLR recipe; `small` is for a machine without a GPU."""
    recipe = "simclr/cifar10-r18-200" if what == "cifar" else "simclr/imagenet-r50-300"
    changes = [f"data.source={data}", "train.tensorboard=false", "train.save_every=1000"]
    changes += ["probe.every_epochs=10000", "train.epochs=200"]
    if what == "photos":
        changes += ["train.batch_size=256", "data.cache_on_device=no"]
    if small:
        changes += [
            "train.batch_size=32",
            "data.limit=128",
            "views.size=32",
            "network.hidden_dim=64",
        ]
    return override(recipes.get(recipe).config, *changes)


def ours(config: Config, folder: Path) -> tuple[Step, nn.Module, int]:
    """Return a training step of `train`, the encoder, and the number of images."""
    run = begun(config, folder)
    return stepper(run), run.method.encoder, run.count


class Pictures(torch.utils.data.Dataset[tuple[tuple[Tensor, Tensor], int]]):
    """Decoded images in memory, as in torchvision's CIFAR10."""

    def __init__(self, images: Any, transform: Callable[[Any], Any]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        return self.transform(Image.fromarray(self.images[i])), 0


def lightly(config: Config, device: torch.device, compiled: bool) -> tuple[Step, nn.Module, int]:
    """Return a step of the loop in lightly's documentation, the encoder, the number of images."""
    from lightly.data import LightlyDataset  # pyright: ignore
    from lightly.loss import NTXentLoss  # pyright: ignore
    from lightly.models.modules import SimCLRProjectionHead  # pyright: ignore
    from lightly.transforms import SimCLRTransform  # pyright: ignore

    size, batch = config.views.size, config.train.batch_size
    transform = SimCLRTransform(input_size=size, gaussian_blur=0.5 if config.views.blur else 0.0)
    if config.data.cache_on_device == "no":
        data: Any = LightlyDataset(config.data.source, transform=transform)
        count = len(data)
        # Use one long epoch, because the workers restart at the end of each epoch.
        data = torch.utils.data.ConcatDataset([data] * max(1, 100 * batch // count))
    else:
        source = open_source(config.data.source, "train")
        count = min(len(source), config.data.limit or len(source))
        held = [source.image(i).permute(1, 2, 0).numpy() for i in range(count)]
        data = Pictures(held, transform)
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=len(os.sched_getaffinity(0)),
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    torch.manual_seed(config.seed)
    encoder = networks.build(config.network, size)
    head = SimCLRProjectionHead(
        networks.feature_dim(encoder), config.network.hidden_dim, config.network.projection_dim
    )
    model = nn.Sequential(encoder, head).to(device)
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    run = torch.compile(model, dynamic=False) if compiled else model
    criterion = NTXentLoss(temperature=1 / config.bottleneck.kappa_b)
    peak = optim.scaled_lr(config.optim.lr, batch)
    optimizer = torch.optim.SGD(
        model.parameters(), peak, momentum=0.9, weight_decay=config.optim.weight_decay
    )
    warmup = optim.warmup_steps(count, config.optim.warmup_epochs, batch)
    total = total_steps(count, config.train.epochs, batch)
    batches, number = _endless(loader), iter(range(10**9))

    def step() -> None:
        for group in optimizer.param_groups:
            group["lr"] = optim.warmup_cosine(next(number), peak=peak, warmup=warmup, total=total)
        x, y = next(batches)[0]
        views = torch.cat([x, y]).to(device, non_blocking=True)
        views = views.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            z_x, z_y = run(views).chunk(2)
            loss = criterion(z_x, z_y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, encoder, count


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def neighbors(encoder: nn.Module, config: Config, device: torch.device) -> float | None:
    """Return the kNN accuracy on test images, with features of whole images."""
    found = []
    for split in ("train", "test"):
        try:
            source = open_source(config.data.source, split)
        except (ValueError, FileNotFoundError):
            return None
        if source.labels is None:
            return None
        loaded = Resident(source, side=max(source.image(0).shape[1:]), device=device)
        plan = (BatchIndices(i, torch.zeros_like(i)) for i in torch.arange(len(source)).split(500))
        with torch.no_grad():
            feats, index = features(
                encoder, loaded.batches(plan), config.views.size, torch.bfloat16
            )
        found.append((feats, source.labels.to(device)[index]))
    (train, labels), (test, right) = found
    votes = nearest_neighbors(train, labels, test, classes=int(labels.max()) + 1)
    return float((votes.argmax(1) == right).double().mean())


def worker(asked: argparse.Namespace, born: float) -> dict[str, Any]:
    """Run one contestant in this process and return its measurements."""
    device = pick_device("auto")
    config = settings(asked.what, asked.data, asked.small)
    with tempfile.TemporaryDirectory() as folder:
        if asked.worker.startswith("ours"):
            if asked.worker != "ours":
                config = override(
                    config, "train.activation_checkpointing=true", "train.compile=yes"
                )
            step, encoder, count = ours(config, Path(folder) / "run")
        else:
            step, encoder, count = lightly(config, device, asked.worker != "lightly")

        def some(steps: int) -> float:
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        some(1)
        first = time.time() - born
        batch = config.train.batch_size
        each = asked.steps or max(1, count // batch)
        seconds = [some(each - 1 if not i else each) for i in range(asked.epochs)]
        steady = seconds[1:] or seconds
        rate = each * batch * len(steady) / sum(steady)
        return {
            "seconds_to_the_first_step": round(first, 1),
            "seconds_of_an_epoch": [round(s, 3) for s in seconds],
            "images/s": round(rate),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "kNN": neighbors(encoder, config, device) if asked.what == "cifar" else None,
        }


def main() -> None:
    """Run all contestants in separate processes, or one of them in this process."""
    born = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cifar", "photos"))
    parser.add_argument(
        "--data", default="builtin", help="data source of cifar; photos are generated"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="steps per epoch; 0: all images")
    parser.add_argument("--small", action="store_true", help="a tiny network and few images")
    parser.add_argument(
        "--only", default=";".join(CONTESTANTS), help="contestants to run, separated by semicolons"
    )
    parser.add_argument("--worker", choices=CONTESTANTS)
    asked = parser.parse_args()
    if asked.worker:
        print(json.dumps(worker(asked, born)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = asked.data
        if asked.what == "photos":
            data = folder
            write_photos(folder, 128 if asked.small else 2048)
        given = [asked.what, "--data", data, "--epochs", asked.epochs, "--steps", asked.steps]
        words = [sys.executable, __file__, *map(str, given), *(["--small"] * asked.small)]
        for name in [n for n in CONTESTANTS if n in asked.only.split(";")]:
            done = subprocess.run([*words, "--worker", name], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    ratios = {
        f"{name} / ours, seconds": round(found["ours"]["images/s"] / found[name]["images/s"], 2)
        for name in found
        if name != "ours" and "ours" in found
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    answer = {"what": asked.what, "epochs": asked.epochs, "runs": found, "ratio": ratios}
    print(json.dumps(answer | environment(device, "lightly", "torchvision", "timm")))


if __name__ == "__main__":
    main()

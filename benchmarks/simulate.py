"""Predict the time of a training step on several GPUs, and what limits it first.

    python benchmarks/simulate.py            # the tables of docs/scale.md
    python benchmarks/simulate.py --gpus 8,64 --batch 16384 --internode 25e9 --latency 100e-6
    python benchmarks/simulate.py measure    # calibrate with gloo here, predict, compare

The network's time is interpolated between steps measured on one H200 (docs/scale.md). Bandwidths
and latencies of links are parameters: they have not been measured. `measure` times steps of a small
network with 1 process and collectives with 2, and predicts steps of 2 and 4 processes. It uses the
processor time of a process, because the machine is shared, so that nothing overlaps.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

# Milliseconds per view of a forward and backward pass, by views: one H200, ResNet-50 at 224 px. 512
# and 1,024 are measured. Assumption: 128 views run at 80 % of the speed of 512.
H200_VIEWS = ((128, 69.5 / 512 / 0.8), (512, 69.5 / 512), (1024, 169.3 / 1024))


@dataclass(frozen=True)
class Machine:
    """Speeds of a cluster, in seconds and bytes; defaults are H200s in machines of eight."""

    ms_per_view: tuple[tuple[int, float], ...] = H200_VIEWS
    overhead: float = 72.95 / 69.5  # a step from memory, relative to the bare network
    gpus_per_machine: int = 8
    cores_per_machine: int = 128
    decoded_per_core: float = 271.0  # images per second
    decoded_per_gpu: float = 2_750.0  # nvJPEG next to training; 6,244 alone
    memory: float = 141e9
    intranode: float = 300e9  # bytes per second and GPU and direction; assumption for NVLink
    internode: float = 50e9  # assumption: one 400 Gb/s link per GPU
    latency: float = 50e-6  # of a collective on all GPUs; assumption
    hops: bool = False  # latency grows with the number of processes, as in a ring of gloo
    several: float = 0.0  # milliseconds that a step of several processes takes in addition
    overlap: float = 0.9  # share of the backward pass that hides the exchange of gradients


@dataclass(frozen=True)
class Job:
    """A training run: C-SimCLR with ResNet-50 on 256-pixel images by default."""

    batch: int = 4096
    weights: int = 33_000_000
    norm_collectives: int = 108  # 54 batch norms, forward and backward
    other_collectives: int = 4  # gathers of directions, and their gradients
    dim: int = 256
    images: int = 1_281_167
    image_bytes: int = 3 * 256 * 256
    bytes_per_view: float = 22e9 / 512  # measured with 512 views; twice as much with 1,024
    loading: str = "split"  # split: from the memory of all GPUs; gpu, cpu: decode JPEG files


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a step by part; parts after `network` are not hidden by it."""

    network: float
    norms: float
    gathering: float
    gradients: float
    loading: float  # in the background: it limits the step only if it takes longer
    gigabytes: float  # per GPU: activations, weights, and a share of the images if they are split
    fits: bool

    @property
    def busy(self) -> float:
        """Time of the step without loading."""
        return self.network + self.norms + self.gathering + self.gradients

    @property
    def step(self) -> float:
        """Time of the step."""
        return max(self.busy, self.loading)

    @property
    def bottleneck(self) -> str:
        """Return what limits the step first, apart from the network."""
        if not self.fits:
            return "memory"
        if self.loading > self.busy:
            return "loading"
        parts = {"batch norms": self.norms, "gathering": self.gathering}
        parts["gradients"] = self.gradients
        name = max(parts, key=lambda part: parts[part])
        return name if parts[name] > 0.01 * self.step else "none"


def interpolate(points: tuple[tuple[int, float], ...], views: float) -> float:
    """Return milliseconds per view, linear in log(views) and constant outside the points."""
    low = max((p for p in points if p[0] <= views), default=points[0])
    high = min((p for p in points if p[0] >= views), default=points[-1])
    if low[0] >= high[0]:
        return low[1]  # a point itself, or outside of them
    share = math.log(views / low[0]) / math.log(high[0] / low[0])
    return low[1] + share * (high[1] - low[1])


def predict(machine: Machine, job: Job, gpus: int) -> Prediction:
    """Return the parts of a step on this many GPUs."""
    images = job.batch / gpus
    per_view = interpolate(machine.ms_per_view, 2 * images)
    network = 2 * images * per_view * machine.overhead
    used = 2 * images * job.bytes_per_view
    if job.loading == "split":
        used += job.images * job.image_bytes / min(gpus, machine.gpus_per_machine)
    rest = (_loading(machine, job, gpus), used / 1e9, used <= machine.memory)
    if gpus == 1:
        return Prediction(network, 0.0, 0.0, 0.0, *rest)
    link = machine.intranode if gpus <= machine.gpus_per_machine else machine.internode
    latency = 1e3 * machine.latency * ((gpus - 1) if machine.hops else 1)
    others = (gpus - 1) / gpus
    norms = job.norm_collectives * latency + machine.several
    gathered = 2 * job.batch * job.dim * 4  # directions of both views; gradients twice as much
    gathering = job.other_collectives * latency + 1e3 * 3 * gathered * others / link
    reduced = latency + 1e3 * 2 * others * 4 * job.weights / link
    hidden = machine.overlap * 2 / 3 * network  # two thirds are the backward pass
    return Prediction(network, norms, gathering, max(0.0, reduced - hidden), *rest)


def _loading(machine: Machine, job: Job, gpus: int) -> float:
    """Return milliseconds to load the images of a step."""
    images, local = job.batch / gpus, min(gpus, machine.gpus_per_machine)
    if job.loading == "cpu":
        return 1e3 * images * local / (machine.cores_per_machine * machine.decoded_per_core)
    if job.loading == "gpu":
        return 1e3 * images / machine.decoded_per_gpu
    # The GPUs of a machine hold the set together, so only their links are used.
    return 1e3 * images * job.image_bytes * (local - 1) / local / machine.intranode


def table(machine: Machine, batches: list[int], gpus: list[int]) -> list[str]:
    """Return a Markdown table of predictions."""
    head = ["batch", "GPUs", "images from", "network", "batch norms", "gathering", "gradients"]
    head += ["loading", "step", "images/s", "GB", "first bottleneck"]
    lines = [f"| {' | '.join(head)} |", "|--:|--:|---|" + "--:|" * 8 + "---|"]
    for batch in batches:
        for count in gpus:
            for loading in ("split", "gpu", "cpu"):
                found = predict(machine, Job(batch=batch, loading=loading), count)
                parts = (found.network, found.norms, found.gathering, found.gradients)
                cells = [f"{value:.1f}" for value in (*parts, found.loading, found.step)]
                row = [f"{batch:,}", str(count), loading, *cells]
                row += [f"{1e3 * batch / found.step:,.0f}", f"{found.gigabytes:.0f}"]
                row += [found.bottleneck]
                lines.append(f"| {' | '.join(row)} |")
    return lines


def held_out_points() -> list[tuple[str, float, float]]:
    """Return name, prediction and measurement of H200 steps that the defaults do not use."""
    one = replace(Machine(), gpus_per_machine=1, cores_per_machine=16)
    files = predict(one, Job(batch=256, loading="cpu"), 1)
    small = replace(one, ms_per_view=((1024, 11.98 / 1024),))
    cifar = predict(small, Job(batch=512), 1)
    return [
        ("ResNet-50, 256 images from JPEG files, 16 cores", files.step, 74.44),
        ("ResNet-18 at 32 px, 512 images, from its bare network (11.98 ms)", cifar.step, 12.50),
    ]


SETTINGS = ("views.size=32", "network.name=test_resnet", "network.hidden_dim=256", "optim.name=sgd")
SETTINGS += ("network.projection_dim=128", "train.device=cpu")
SETTINGS += ("train.tensorboard=false", "train.steps=10000", "train.log_every=10000")
SETTINGS += ("train.precision=float32", "probe.every_epochs=10000")


def timed(function: Callable[[], object], rounds: int) -> float:
    """Return the median processor time of several calls, of all threads of this process."""
    times: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def worker(rank: int, world: int, batch: int, folder: str, rounds: int) -> None:
    """Time steps and collectives in one of several gloo processes; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    from compressive.config import Config, override
    from compressive.data.source import ImageSource
    from compressive.progress import Display
    from compressive.train.loop import train_step
    from compressive.train.run import Run

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    counted = {"count": 0}
    found: dict[str, float] = {}
    if world > 1:
        small, large = torch.zeros(256), torch.zeros(4_000_000)
        found["latency"] = timed(lambda: dist.all_reduce(small), 40 * rounds)
        found["large"] = timed(lambda: dist.all_reduce(large), rounds)
        for name in ("all_reduce", "all_gather_into_tensor", "all_gather"):
            setattr(dist, name, _counted(getattr(dist, name), counted))
    config = override(Config(), *SETTINGS, f"train.batch_size={batch}")
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    source = ImageSource(name="noise", count=512, read=lambda i: image, place=str)
    out, display = Path(folder) / "run", Display(quiet=True)
    run = Run(config, out, display, resume=False, source=source)
    run.restore()
    batches = run.batches()
    for _ in range(3):
        train_step(run, batches)
    counted["count"] = 0
    train_step(run, batches)
    found["collectives"] = counted["count"]
    found["weights"] = sum(p.numel() for p in run.learner.parameters() if p.requires_grad)
    found["step"] = timed(lambda: train_step(run, batches), rounds)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    batches.close()
    run.close()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _counted(function: Callable[..., Any], counted: dict[str, int]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        counted["count"] += 1
        return function(*arguments, **options)

    return call


def measured(world: int, batch: int, rounds: int) -> dict[str, float]:
    """Return the times of `worker` with this many processes."""
    import compressive.train.run  # noqa: F401 (forks need not import it)

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, batch, folder, rounds)
        every = [context.Process(target=worker, args=(k, *arguments)) for k in range(world)]
        for process in every:
            process.start()
        for process in every:
            process.join()
        return json.loads((Path(folder) / "found.json").read_text())


def compare(found: dict[str, Any]) -> list[tuple[int, int, float, float]]:
    """Return processes, batch, prediction and measurement, from the output of `measure`.

    The first row calibrates the constant cost of several processes. The others are predicted.
    """
    machine = Machine(found["ms_per_view"], 1.0, intranode=found["bandwidth"], hops=True)
    machine = replace(machine, latency=found["latency"], overlap=0.0)
    job = Job(0, found["weights"], found["collectives"], 0, 128)
    (world, batch, first), *_ = found["steps"]
    rest = first - predict(machine, replace(job, batch=batch), world).step
    machine = replace(machine, several=rest)
    return [
        (world, batch, predict(machine, replace(job, batch=batch), world).step, real)
        for world, batch, real in found["steps"]
    ]


def measure(batch: int, rounds: int) -> None:
    """Calibrate with one and two processes; predict another batch size and four processes."""
    alone = {size: measured(1, size, rounds) for size in (batch // 4, batch // 2, batch)}
    two = measured(2, batch, rounds)
    more = [(2, batch // 2), (4, batch)]
    steps = [(2, batch, two), *((*case, measured(*case, rounds)) for case in more)]
    found = {
        "ms_per_view": [(2 * size, 1e3 * row["step"] / (2 * size)) for size, row in alone.items()],
        "latency": two["latency"],
        "bandwidth": 2 * 0.5 * 16e6 / max(1e-9, two["large"] - two["latency"]),
        "collectives": int(two["collectives"]),
        "weights": int(two["weights"]),
        "steps": [(world, size, 1e3 * row["step"]) for world, size, row in steps],
    }
    print(json.dumps(found))
    print("\n".join(comparison(found)))


def comparison(found: dict[str, Any]) -> list[str]:
    """Return a Markdown table of predicted and measured steps."""
    lines = ["| processes | batch | predicted ms | measured ms | error |", "|--:|--:|--:|--:|--:|"]
    for k, (world, batch, guess, real) in enumerate(compare(found)):
        error = f"{guess / real - 1:+.0%}" if k else "calibrated"
        lines.append(f"| {world} | {batch} | {guess:.0f} | {real:.0f} | {error} |")
    return lines


def main() -> None:
    """Print predictions, or calibrate and compare on this machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("predict", "measure"), default="predict")
    parser.add_argument("--gpus", default="8,64")
    parser.add_argument("--batch", default="", help="default: 4096,16384; measure: 64")
    parser.add_argument("--rounds", type=int, default=15)
    for name in ("intranode", "internode", "latency"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Machine, name))
    parser.add_argument("--cores", type=int, default=Machine.cores_per_machine)
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(int(asked.batch or 64), asked.rounds)
        return
    links = {name: getattr(asked, name) for name in ("intranode", "internode", "latency")}
    machine = replace(Machine(), cores_per_machine=asked.cores, **links)
    batches = [int(size) for size in (asked.batch or "4096,16384").split(",")]
    print("\n".join(table(machine, batches, [int(count) for count in asked.gpus.split(",")])))
    print("\n| not used for calibration | predicted ms | measured ms | error |\n|---|--:|--:|--:|")
    for name, guess, real in held_out_points():
        print(f"| {name} | {guess:.2f} | {real:.2f} | {guess / real - 1:+.1%} |")


if __name__ == "__main__":
    main()

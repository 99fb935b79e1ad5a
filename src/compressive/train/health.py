"""Asynchronous metrics; detection of divergence and collapse."""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from compressive.checks import full_precision, promote_to_float32
from compressive.config import Config, is_compressed
from compressive.distributed import any_process, gather, is_sharded, local_shard, world_size

# All values are assumptions.
_WINDOW = 20  # log points in the moving mean of the loss: about two epochs
_FEWEST = 5  # log points that are needed before a spike is reported
_LEAST_DEVIATION = 0.01  # lower limit, relative to the mean, for a nearly constant loss
_PERSISTENT = 3  # consecutive log points that make a collapse
_STARVED = 0.1  # data-wait fraction above which a run is reported as starved

State = Literal["ok", "spike", "nan", "collapse", "starved"]


class Reading(NamedTuple):
    """Means over the steps since the previous reading, on the host."""

    step: int
    means: dict[str, float]


class AsyncMetrics:
    """Metrics that are copied from the device to the host asynchronously.

    `add` sums on the device. `flush` starts the copy of the means at a log point, and `poll`
    returns them at a later one. Means are over all processes and bitwise the same in each. If
    several processes decide by them, call `poll(wait=True)` after `flush`, so that all decide at
    the same step.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._counts: dict[tuple[str, ...], int] = {}
        self._sent: deque[tuple[int, list[str], Tensor, torch.cuda.Event | None]] = deque()

    @torch.no_grad()
    def add(self, values: Mapping[str, Float[Tensor, ""]]) -> None:
        """Add values; each name is averaged over the calls that had it."""
        names = tuple(values)  # names of one call share one sum tensor
        row = torch.stack([value.float() for value in values.values()])
        if names in self._sums:
            row += self._sums[names].to(row.device)  # a checkpoint may load it on the host
        self._sums[names] = row
        self._counts[names] = self._counts.get(names, 0) + 1

    @torch.no_grad()
    def flush(self, step: int) -> None:
        """Start copying the means to the host, and reset the sums."""
        if not self._sums:
            return
        names = [name for group in self._sums for name in group]
        means = torch.cat([total / self._counts[group] for group, total in self._sums.items()])
        means = gather(means.unsqueeze(0), "metrics").mean(0)
        event, host = None, means
        if means.is_cuda:
            host = torch.empty(means.shape, dtype=means.dtype, pin_memory=True)
            host.copy_(means, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(means.device))
        self._sent.append((step, names, host, event))
        self._sums, self._counts = {}, {}

    def poll(self, *, wait: bool = False) -> Reading | None:
        """Return the oldest pending reading if it has arrived, else None; `wait` waits for it."""
        if not self._sent:
            return None
        step, names, host, event = self._sent[0]
        if event is not None and not event.query():
            if not wait:
                return None
            event.synchronize()
        self._sent.popleft()
        return Reading(step, dict(zip(names, host.tolist(), strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last flush; all flushed readings must have been polled."""
        assert not self._sent, "call poll(wait=True) before a checkpoint"
        sums = self._sums.items()
        return {"groups": [{"names": n, "sum": s, "count": self._counts[n]} for n, s in sums]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums, and drop pending readings."""
        groups = [(tuple(group["names"]), group) for group in state["groups"]]
        self._sums = {names: group["sum"] for names, group in groups}
        self._counts = {names: group["count"] for names, group in groups}
        self._sent.clear()


class EmbeddingStats(NamedTuple):
    """Statistics of a batch of unit vectors; 0-dim, on their device.

    Reference values: a ResNet-18 with the paper's head and random weights, on 128 random images of
    32 pixels. In training mode it has standard deviation 0.79 to 0.82, cosine 0.33 to 0.36 and
    participation ratio 30 to 74. In evaluation mode it has standard deviation 0.15 to 0.68 and
    cosine 0.53 to 0.98.
    """

    embedding_std: Float[Tensor, ""]  # mean over coordinates: 1 if uniform, 0 if all are equal
    cosine: Float[Tensor, ""]  # mean over pairs of images: 0 if uniform, 1 if all are equal
    participation_ratio: Float[Tensor, ""]  # effective dimension: 1 to min(dim, batch - 1)


@torch.no_grad()
def embedding_stats(r: Float[Tensor, "batch dim"]) -> EmbeddingStats:
    """Measure whether projections collapse, without waiting for the device.

    `participation_ratio` is (sum of v)^2 / sum of v^2 over the eigenvalues v of the covariance of
    the directions. Two traces are enough to compute it. `metrics.effective_rank` needs the
    eigenvalues, for which torch waits, and gives larger numbers.
    """
    batch, dim = r.shape
    assert batch > 1, "one image has no spread"
    with full_precision(r):
        unit = F.normalize(promote_to_float32("r", r), dim=-1)
        total = unit.sum(0)
        cosine = (total.square().sum() - unit.square().sum()) / (batch * (batch - 1))
        apart = unit - unit.mean(0)
        spread = (apart.square().sum(0) / (batch - 1)).sqrt().mean() * math.sqrt(dim)
        moments = apart.T @ apart if dim < batch else apart @ apart.T  # the same eigenvalues
        squared, squares = apart.square().sum().square(), moments.square().sum()
        return EmbeddingStats(spread, cosine, torch.where(squares > 0, squared / squares, 0.0))


def are_finite(learner: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether weights, statistics and moments are finite; waits for the device.

    If weights are sharded, every process must call this.
    """
    tensors = list(learner.state_dict().values())
    # A moment may overflow while weights stay finite, because AdamW divides by it. Skip AdamW's
    # step counts, which are on the host.
    for optimizer in optimizers:
        for weight, state in optimizer.state.items():
            found = [value for value in state.values() if isinstance(value, Tensor)]
            tensors += [value for value in found if value.device == weight.device]
    # Of a sharded tensor, each process checks its part.
    floats = [local_shard(tensor) for tensor in tensors if tensor.is_floating_point()]
    finite = bool(torch.stack(torch._foreach_norm(floats)).isfinite().all())
    if is_sharded(learner):
        return not any_process(not finite, floats[0].device)
    return finite


class HealthStatus(NamedTuple):
    """Health of a run: a state and a one-line message."""

    state: State
    text: str

    @property
    def is_failed(self) -> bool:
        """Return whether to restart from the last good checkpoint; other states only warn."""
        return self.state in ("nan", "collapse")


class Health:
    """Detects failures from readings, which must have `loss` and the names of `EmbeddingStats`.

    A collapse must last for three log points. During `warmup` the rules are weaker. A low standard
    deviation counts only if it was higher before. A low rank does not count, because BYOL passes
    through one (ResNet-18, LARS, 96 images: rank 29 at step 0, 3.8 at 40).
    """

    def __init__(self, config: Config, *, warmup: int) -> None:
        self._settings, self._warmup = config.health, warmup
        self._dim = config.network.projection_dim
        images = config.train.batch_size / config.train.grad_accum_steps / world_size()
        # A small batch limits the participation ratio, even of a healthy run.
        self._min_participation_ratio = min(config.health.min_participation_ratio, (images - 1) / 4)
        self._cure = "lower optim.lr or lengthen optim.warmup_epochs"
        if is_compressed(config):
            steered = config.bottleneck.target_residual is not None
            price = "raise bottleneck.target_residual" if steered else "lower bottleneck.beta"
            self._cure = f"{price}, {self._cure}"
        self._faster = "set data.cache_on_device=yes"
        if config.data.decode_on_device == "no":
            self._faster += " or, for JPEG files on an NVIDIA GPU, data.decode_on_device=yes"
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._was_wide = False
        self._low = 0  # consecutive suspicious log points

    @property
    def is_well(self) -> bool:
        """Return whether the last reading was unsuspicious, so that the run can be saved."""
        return self._low == 0

    def check(self, reading: Reading, data_wait_fraction: float = 0.0) -> HealthStatus:
        """Return the worst finding for a reading and the fraction of time waiting for data."""
        means = {name: reading.means[name] for name in ("loss", *EmbeddingStats._fields)}
        if lost := [name for name, value in means.items() if not math.isfinite(value)]:
            self._low += 1
            return HealthStatus("nan", f"nan: {' and '.join(lost)} not finite; {self._cure}")
        loss, spread, _, axes = means.values()
        where = f"directions spread {spread:.2f} of uniform, rank {axes:.1f} of {self._dim}"
        above = self._deviations_above(loss)
        if self._has_collapsed(reading.step, spread, axes):
            return HealthStatus("collapse", f"collapse: {where}; {self._cure}")
        if above > self._settings.spike_sigma:
            text = f"spike: loss {loss:.4g}, {above:.1f} deviations above its recent mean"
            return HealthStatus("spike", text)
        if data_wait_fraction > _STARVED:
            return HealthStatus("starved", f"data wait {data_wait_fraction:.0%}: {self._faster}")
        return HealthStatus("ok", f"ok: {where}")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later checks depend on."""
        return {"losses": list(self._losses), "was_wide": self._was_wide, "low": self._low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, so that a resumed run gives the same results."""
        self._losses = deque(state["losses"], maxlen=_WINDOW)
        self._was_wide, self._low = state["was_wide"], state["low"]

    def _deviations_above(self, loss: float) -> float:
        """Return how many standard deviations a loss is above the recent mean; 0 at the start."""
        recent = list(self._losses)
        self._losses.append(loss)
        if len(recent) < _FEWEST:
            return 0.0
        mean = statistics.fmean(recent)
        deviation = max(statistics.stdev(recent), _LEAST_DEVIATION * abs(mean), 1e-12)
        # Clip a stored spike: it would inflate the deviation and hide the next spike.
        self._losses[-1] = min(loss, mean + self._settings.spike_sigma * deviation)
        return (loss - mean) / deviation

    def _has_collapsed(self, step: int, spread: float, axes: float) -> bool:
        is_narrow = spread < self._settings.collapse_std
        is_flat = axes < self._min_participation_ratio
        self._was_wide |= not is_narrow
        is_late = step >= self._warmup
        is_low = (is_narrow and (is_late or self._was_wide)) or (is_flat and is_late)
        self._low = self._low + 1 if is_low else 0
        return self._low >= _PERSISTENT

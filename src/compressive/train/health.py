"""What a run shows while it goes on, and whether it is well."""

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
from compressive.distributed import gather, world_size

# All assumed.
_WINDOW = 20  # log points that the recent mean of the loss spans: about two epochs
_FEWEST = 5  # of them that must be there before a spike is called
_LEAST_DEVIATION = 0.01  # of the mean: a loss that hardly moves has hardly a deviation
_PERSISTENT = 3  # log points in a row that make a collapse
_STARVED = 0.1  # share of the time spent waiting for images above which it is said

State = Literal["ok", "spike", "nan", "collapse", "starved"]


class Reading(NamedTuple):
    """Means over the steps since the reading before, on the host."""

    step: int
    means: dict[str, float]


class AsyncMetrics:
    """Numbers on their way from the device to the host, which need not wait for them.

    `add` sums on the device, `flush` at a log point sends the means off, and `poll` at a later one
    finds them. Means are over all processes and bitwise the same in each. Where several processes
    decide by them, `poll(wait=True)` after `flush` lets all decide at the same step.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}
        self._counts: dict[tuple[str, ...], int] = {}
        self._sent: deque[tuple[int, list[str], Tensor, torch.cuda.Event | None]] = deque()

    @torch.no_grad()
    def add(self, values: Mapping[str, Float[Tensor, ""]]) -> None:
        """Count these values in; each name is averaged over the calls that brought it."""
        names = tuple(values)  # those that come together are summed together
        row = torch.stack([value.float() for value in values.values()])
        if names in self._sums:
            row += self._sums[names].to(row.device)  # from a checkpoint it may come on the host
        self._sums[names] = row
        self._counts[names] = self._counts.get(names, 0) + 1

    @torch.no_grad()
    def flush(self, step: int) -> None:
        """Send off the means of what was added, and begin anew."""
        if not self._sums:
            return
        names = [name for group in self._sums for name in group]
        means = torch.cat([total / self._counts[group] for group, total in self._sums.items()])
        means = gather(means.unsqueeze(0)).mean(0)
        event, host = None, means
        if means.is_cuda:
            host = torch.empty(means.shape, dtype=means.dtype, pin_memory=True)
            host.copy_(means, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(means.device))
        self._sent.append((step, names, host, event))
        self._sums, self._counts = {}, {}

    def poll(self, *, wait: bool = False) -> Reading | None:
        """The oldest reading not yet collected, if it has arrived; `wait` until it has."""
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
        """What was added and not yet posted; what was posted must have been collected."""
        assert not self._sent, "collect with wait=True before a checkpoint"
        sums = self._sums.items()
        return {"groups": [{"names": n, "sum": s, "count": self._counts[n]} for n, s in sums]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; what was on its way is forgotten."""
        groups = [(tuple(group["names"]), group) for group in state["groups"]]
        self._sums = {names: group["sum"] for names, group in groups}
        self._counts = {names: group["count"] for names, group in groups}
        self._sent.clear()


class EmbeddingStats(NamedTuple):
    """How a batch of directions lies on the sphere; 0-dim, on their device.

    A ResNet-18 with the paper's head and random weights, on 128 random images of 32 pixels, has
    spread 0.79 to 0.82, cosine 0.33 to 0.36 and participation 30 to 74 in training mode, and spread
    0.15 to 0.68 and cosine 0.53 to 0.98 in evaluation mode.
    """

    embedding_std: Float[Tensor, ""]  # of a coordinate: 1 if uniform, 0 if all agree
    cosine: Float[Tensor, ""]  # mean over pairs of different images: 0 if uniform, 1 if all agree
    participation_ratio: Float[Tensor, ""]  # axes they vary along, from 1 to min(dim, batch - 1)


@torch.no_grad()
def embedding_stats(r: Float[Tensor, "batch dim"]) -> EmbeddingStats:
    """Measure whether projections collapse, without waiting for the device.

    `participation_ratio` is (sum of v)^2 / sum of v^2 over the eigenvalues v of the covariance of
    the directions. It needs two traces, where `metrics.effective_rank` needs the eigenvalues, for
    which torch waits, and gives larger numbers.
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
    """Return whether weights, statistics and moments are finite; waits for the device."""
    tensors = list(learner.state_dict().values())
    # A moment may overflow although weights stay finite: AdamW divides by it. AdamW counts its
    # steps on the host.
    for optimizer in optimizers:
        for weight, state in optimizer.state.items():
            found = [value for value in state.values() if isinstance(value, Tensor)]
            tensors += [value for value in found if value.device == weight.device]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return bool(torch.stack(torch._foreach_norm(floats)).isfinite().all())


class HealthStatus(NamedTuple):
    """How a run is, in a word and in a line."""

    state: State
    text: str

    @property
    def is_failed(self) -> bool:
        """Whether to go back to the last good checkpoint; the rest is only worth a word."""
        return self.state in ("nan", "collapse")


class Health:
    """Judge a run by its readings, which must hold `loss` and the names of `EmbeddingStats`.

    A collapse must last for three log points. During `warmup`, when the learning rate rises,
    directions that agree count only if they did not agree from the start, and a low rank does not
    count: BYOL passes through one (ResNet-18, LARS, 96 images: rank 29 at step 0, 3.8 at 40).
    """

    def __init__(self, config: Config, *, warmup: int) -> None:
        self._settings, self._warmup = config.health, warmup
        self._dim = config.network.projection_dim
        images = config.train.batch_size / config.train.grad_accum_steps / world_size()
        # So few images cannot vary along more axes, however well the run is.
        self._min_participation_ratio = min(config.health.min_participation_ratio, (images - 1) / 4)
        self._cure = "lower optim.lr or lengthen optim.warmup_epochs"
        if is_compressed(config):
            steered = config.bottleneck.target_residual is not None
            price = "raise bottleneck.target_residual" if steered else "lower bottleneck.beta"
            self._cure = f"{price}, {self._cure}"
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._was_wide = False
        self._low = 0  # log points in a row that looked like a collapse

    @property
    def is_well(self) -> bool:
        """Whether the last reading raised no suspicion of an illness: a good time to save."""
        return self._low == 0

    def check(self, reading: Reading, data_wait_fraction: float = 0.0) -> HealthStatus:
        """Judge a reading and the share of time without images; return the worst finding."""
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
            cure = "raise data.workers or set data.cache_on_device=yes"
            return HealthStatus("starved", f"data wait {data_wait_fraction:.0%}: {cure}")
        return HealthStatus("ok", f"ok: {where}")

    def state_dict(self) -> dict[str, Any]:
        """All that the next verdicts depend on."""
        return {"losses": list(self._losses), "was_wide": self._was_wide, "low": self._low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Judge on as if never interrupted."""
        self._losses = deque(state["losses"], maxlen=_WINDOW)
        self._was_wide, self._low = state["was_wide"], state["low"]

    def _deviations_above(self, loss: float) -> float:
        """How far a loss lies above the recent ones, in their deviations; 0 while they are few."""
        recent = list(self._losses)
        self._losses.append(loss)
        if len(recent) < _FEWEST:
            return 0.0
        mean = statistics.fmean(recent)
        deviation = max(statistics.stdev(recent), _LEAST_DEVIATION * abs(mean), 1e-12)
        # A spike is remembered cut, else it would hide the next one behind its own deviation.
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

"""Schedules of a run: steps, learning rate, EMA decay, beta, logging and evaluation."""

from collections.abc import Mapping
from typing import Any

from compressive import optim
from compressive.config import Config, is_compressed, total_steps, unused_settings
from compressive.distributed import world_size
from compressive.watchdog.limits import process_counts


class Schedule:
    """The steps of a run on `count` images; `notes` are messages for the user."""

    config: Config
    count: int
    notes: list[str]
    total: int
    warmup: int
    rise: int
    frozen: int  # steps in which the encoder does not change
    log_every: int
    evaluate_every: int

    def __init__(self, config: Config, count: int) -> None:
        train = config.train
        each = train.grad_accum_steps * world_size()
        if train.batch_size % each or train.batch_size < 2 * each:
            fits = process_counts(world_size(), train.batch_size, train.grad_accum_steps)
            hint = f"; start {fits[-1]} processes, or choose another batch size" if fits else ""
            raise ValueError(
                "train.batch_size must be a multiple of train.grad_accum_steps x processes "
                f"({train.grad_accum_steps} x {world_size()}) and at least twice as large, "
                f"got {train.batch_size}{hint}"
            )
        self.config, self.count, self.notes = config, count, []
        self.total = train.steps or total_steps(count, train.epochs, train.batch_size)
        self.warmup = self._steps("optim.warmup_epochs", "warm-up", config.optim.warmup_epochs)
        self.frozen = self._steps("train.frozen_epochs", "the frozen part", train.frozen_epochs)
        self.rise, rising = 0, "bottleneck.warmup_epochs"
        if rising not in unused_settings(config):
            self.rise = self._steps(rising, "the warm-up of beta", config.bottleneck.warmup_epochs)
        if train.batch_size > count:
            self.notes.append(
                f"note: train.batch_size is {train.batch_size:,} but there are only {count:,} "
                "images, so a batch repeats some; avoid this with --set "
                f"train.batch_size={2 ** (count.bit_length() - 1)}"
            )
        per_epoch = max(1, count // train.batch_size)
        self.log_every = train.log_every or max(1, min(50, per_epoch // 10))
        every = config.probe.every_epochs * count / train.batch_size or self.total / 20
        self.evaluate_every = max(1, round(every))

    def _steps(self, setting: str, what: str, epochs: float) -> int:
        """Return the steps of a warm-up; add a note if it takes much of the run."""
        total = self.total
        found = optim.warmup_steps(self.count, epochs, self.config.train.batch_size)
        if found >= total:
            found = total // 10
            self.notes.append(
                f"note: the run is short, so {what} is reduced to {found} steps (10 % of the run)"
            )
        elif 2 * found > total:
            tenth = f"--set {setting}={self.epoch(total) / 10:.2g}"
            self.notes.append(
                f"note: {what} takes {found / total:.0%} of the run; for 10 % use {tenth}"
            )
        return found

    def epoch(self, step: int) -> float:
        """Return the epoch at a step."""
        return step * self.config.train.batch_size / self.count

    def group_lr(self, step: int, group: Mapping[str, Any]) -> float:
        """Return the learning rate of a group of weights: 0 for an encoder that is still frozen."""
        if group.get("is_encoder") and step < self.frozen:
            return 0.0
        return self.lr(step) * group.get("lr_scale", 1.0)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        peak = optim.scaled_lr(self.config.optim.lr, self.config.train.batch_size)
        return optim.warmup_cosine(step, peak=peak, warmup=self.warmup, total=self.total)

    def ema_decay(self, step: int) -> float:
        """Return the decay of the target network in a step."""
        return optim.ema_decay(step, base=self.config.target.ema_decay, total=self.total)

    def beta(self, step: int) -> float:
        """Return the weight of the residual at a step, if no controller sets it."""
        bottleneck = self.config.bottleneck
        if not is_compressed(self.config):
            return 0.0
        if bottleneck.schedule in ("linear", "adaptive"):
            return optim.linear_beta(step, beta=bottleneck.beta, warmup=self.rise)
        if bottleneck.schedule == "cosine":
            return optim.cosine_beta(step, beta=bottleneck.beta, total=self.total)
        return bottleneck.beta

    def is_time_to_log(self, step: int) -> bool:
        """Return whether to log after a step: a few times per epoch, and at the end."""
        return step % self.log_every == 0 or step == self.total

    def is_time_to_evaluate(self, step: int) -> bool:
        """Return whether a log point is the first one of an evaluation period."""
        return step % self.evaluate_every < self.log_every

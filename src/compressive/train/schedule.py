"""When what happens in a run: how many steps, at which rates and price, and when to look."""

from compressive import optim
from compressive.config import Config, is_compressed, total_steps, unused_settings
from compressive.distributed import world_size


class Schedule:
    """The steps of a run on `count` images; `remarks` are for whoever started it."""

    def __init__(self, config: Config, count: int) -> None:
        train = config.train
        each = train.grad_accum_steps * world_size()
        if train.batch_size % each or train.batch_size < 2 * each:
            raise ValueError(
                "train.batch_size must be a multiple of grad_accum_steps x processes, and twice as "
                "large or "
                f"more: {train.grad_accum_steps} x {world_size()}, got {train.batch_size}"
            )
        self.config, self.count, self.remarks = config, count, []
        self.total = train.steps or total_steps(count, train.epochs, train.batch_size)
        self.warmup = self._steps("optim.warmup_epochs", "warm-up", config.optim.warmup_epochs)
        self.rise, rising = 0, "bottleneck.warmup_epochs"
        if rising not in unused_settings(config):
            self.rise = self._steps(rising, "rise of beta", config.bottleneck.warmup_epochs)
        if train.batch_size > count:
            self.remarks.append(
                f"train.batch_size is {train.batch_size:,} and there are {count:,} images, so a "
                "batch has "
                f"some twice; with --set train.batch_size={2 ** (count.bit_length() - 1)} it has "
                "not"
            )
        per_epoch = max(1, count // train.batch_size)
        self.look_every = train.log_every or max(1, min(50, per_epoch // 10))
        every = config.probe.every_epochs * count / train.batch_size or self.total / 20
        self.judge_every = max(1, round(every))

    def _steps(self, setting: str, what: str, epochs: float) -> int:
        """Steps in which something rises; remarks on it where that is much of the run."""
        total = self.total
        found = optim.warmup_steps(self.count, epochs, self.config.train.batch_size)
        if found >= total:
            found = total // 10
            self.remarks.append(f"{what} shortened to {found} steps, a tenth of the run")
        elif 3 * found > total:
            tenth = f"--set {setting}={self.epoch(total) / 10:.2g}"
            self.remarks.append(f"{what} is {found / total:.0%} of the run; {tenth}: 10%")
        return found

    def epoch(self, step: int) -> float:
        """How often each image has been seen by then."""
        return step * self.config.train.batch_size / self.count

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        peak = optim.scaled_lr(self.config.optim.lr, self.config.train.batch_size)
        return optim.warmup_cosine(step, peak=peak, warmup=self.warmup, total=self.total)

    def ema_decay(self, step: int) -> float:
        """How much the target keeps of itself in a step."""
        return optim.ema_decay(step, base=self.config.target.ema_decay, total=self.total)

    def beta(self, step: int) -> float:
        """The price of a nat at a step, where nothing steers it."""
        bottleneck = self.config.bottleneck
        if not is_compressed(self.config):
            return 0.0
        if bottleneck.schedule == "linear":
            return optim.linear_beta(step, beta=bottleneck.beta, warmup=self.rise)
        if bottleneck.schedule == "cosine":
            return optim.cosine_beta(step, beta=bottleneck.beta, total=self.total)
        return bottleneck.beta

    def is_time_to_look(self, step: int) -> bool:
        """A few times in an epoch, and at the end."""
        return step % self.look_every == 0 or step == self.total

    def is_time_to_judge(self, step: int) -> bool:
        """At the first look of each period; asked when it is time to look."""
        return step % self.judge_every < self.look_every

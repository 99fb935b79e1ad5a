"""A run: its parts put together, where it stands, what it writes, and how it goes back.

Longer than 300 lines, since it is one object: what a checkpoint must hold is in one place.
"""

import os
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compressive import encoder
from compressive.augment.ops import colors
from compressive.config import Config, is_compressed
from compressive.data.loaders import Batch
from compressive.data.sampler import batch_index_stream
from compressive.data.source import Source
from compressive.device import is_compiled, pick_device, precision
from compressive.distributed import any_process, gather, parallel, rank, wait_for_all, world_size
from compressive.methods import Builder, Step, build
from compressive.progress import Display
from compressive.rundir import checkpoint, files, folder
from compressive.rundir.lock import acquire_lock
from compressive.rundir.metrics_log import STOPPED, MetricsLogger
from compressive.sync_batchnorm import synchronize
from compressive.train import images
from compressive.train.health import AsyncMetrics, Health, HealthStatus, Reading, embedding_stats
from compressive.train.online_eval import Accuracy, accuracy, evenly_spaced_indices, held_out
from compressive.train.rate_controller import Controller
from compressive.train.schedule import Schedule
from compressive.train.step import Learner, optimizer, recompute, require_size, view_maker
from compressive.train.throughput import Throughput


class Outcome(NamedTuple):
    """What a run came to."""

    folder: Path
    step: int
    saved: int  # the step of the last checkpoint
    total: int
    accuracy: Accuracy | None  # of the labels held out, when it was last measured


class TrainingFailed(RuntimeError):
    """A run that diverged or collapsed more often than its settings allow."""


class Run:
    """The parts of a run, and where it stands."""

    def __init__(
        self,
        config: Config,
        out: Path,
        display: Display,
        *,
        resume: bool,
        source: Source | None = None,
        method: Builder = build,
    ) -> None:
        self.config, self.out, self.display = config, out, display
        self.is_own = method is not build  # which only its program can make again
        self.device = pick_device(config.train.device)
        if rank() == 0:
            folder.open_folder(out, config, resume=resume)
        if source is not None:
            self.config = config = images.from_python(config, source)
        source = images.load_source(config, source)
        self.count, self.labels = len(source), source.labels
        self.held = held_out(self.count, config.probe.holdout, config.seed)
        self.visible = torch.full((self.count,), -1, device=self.device)
        if source.labels is not None:
            self.visible.copy_(source.labels.masked_fill(self.held, -1))
        self.schedule = Schedule(config, self.count)
        for remark in self.schedule.remarks:
            display.say(remark)
        self.total = self.schedule.total
        self.step = self.attempt = self._saved = self._told = 0
        self.readings, self.pace = AsyncMetrics(), Throughput()
        self.health = Health(config, warmup=self.schedule.warmup)
        self.accuracy: Accuracy | None = None
        self.saved_at = time.monotonic()
        # Before images are read, which may take long: not every network can be built.
        self._assemble(method, 0 if source.labels is None else int(source.labels.max()) + 1)
        self.side = images.side(source, config)
        decoding = partial(display.progress, "decoding")
        self.loader = images.load(source, config, self.device, decoding)
        self._hold: int | None = None
        try:
            self.shades = images.color_fingerprint(self.loader, self.count)
            self._enter(resume=resume)
        except BaseException:
            self.close()  # else the folder would stay locked as long as this process lives
            raise

    def _enter(self, *, resume: bool) -> None:
        """Make the folder this run's own; the first process does."""
        if rank() == 0:
            self._hold = acquire_lock(self.out)
            # Asked again: another process may have been there while images were read.
            if not folder.open_folder(self.out, self.config, resume=resume):
                folder.write_config(self.out, self.config, self.device)
        wait_for_all()  # none may look for a checkpoint before the folder is there

    def _assemble(self, method: Builder, classes: int) -> None:
        """Network, optimizers, and the functions of a step."""
        config, device = self.config, self.device
        self.dtype = precision(config.train.precision, device)
        compiled = is_compiled(config.train.compile, device)
        if config.train.activation_checkpointing and (not compiled or world_size() > 1):
            raise ValueError(
                "train.activation_checkpointing=true needs steps that are compiled "
                "(train.compile=yes), in one "
                "process"
            )
        torch.manual_seed(config.seed)  # the same weights in every process
        learner = Learner(method(config), classes)
        learner.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        require_size(learner.method.encoder, config.network.name, config.views.size)
        synchronize(learner)
        self.inner, self.method = learner, learner.method
        self.optimizer = optimizer(config.optim, learner.method)
        self.probe_optimizer = None
        if learner.probe is not None:
            self.probe_optimizer = torch.optim.AdamW(learner.probe.parameters(), config.probe.lr)
        self.learner = parallel(learner)
        self.views = view_maker(config, self.dtype, compiled=compiled)
        if config.train.activation_checkpointing:
            recompute(learner.method.encoder)
        if compiled and world_size() == 1:
            # As CUDA graphs, since launching BYOL's kernels takes longer than running them
            # (ResNet-18, H200: 28 and 19 ms). Graphs overwrite gradients, so none may be added up.
            graphs = device.type == "cuda" and config.train.grad_accum_steps == 1
            learner.compile(dynamic=False, mode="reduce-overhead" if graphs else "default")
        elif compiled:  # collectives stay outside of the graph
            learner.method.encoder.compile(dynamic=False)
        self._beta, self.controller = torch.zeros((), device=device), None
        self._reducible_residual: list[Tensor] = []  # of the portions of a step
        bottleneck = config.bottleneck
        if is_compressed(config) and bottleneck.target_residual is not None:
            # A fiftieth of the run, so that even a short one comes to rest.
            horizon = max(10, min(200, self.total // 50))
            self.controller = Controller(
                bottleneck.target_residual, beta=bottleneck.beta, horizon=horizon, device=device
            )

    @property
    def beta(self) -> Float[Tensor, ""]:
        """The price of a nat, on the device: a number would be compiled anew when it changes."""
        return self._beta if self.controller is None else self.controller.beta

    def batches(self) -> Generator[Batch]:
        """This process's batches from the present step on."""
        train = self.config.train
        return self.loader.batches(
            batch_index_stream(
                self.count,
                train.batch_size,
                seed=self.config.seed,
                attempt=self.attempt,
                step=self.step,
                portions=train.grad_accum_steps,
                rank=rank(),
                world=world_size(),
            )
        )

    def set_rates(self) -> None:
        """Learning rate and price of a nat of this step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(self.step)
        if self.controller is None:
            self._beta.fill_(self.schedule.beta(self.step))

    def synchronized(self, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged over processes once a step, after its last portion."""
        if is_last or not isinstance(self.learner, DistributedDataParallel):
            return nullcontext()
        return self.learner.no_sync()

    def note(self, step: Step, probe_loss: Tensor) -> None:
        """Count in what a portion of a step has shown."""
        names = ("loss", "positive_cosine", "nll", "residual", "reducible_residual", "predictive")
        seen = {name: value for name in names if (value := getattr(step, name)) is not None}
        if is_compressed(self.config):
            seen["beta"] = self.beta
        if self.inner.probe is not None:
            seen["probe_loss"] = probe_loss
        self.readings.add(seen)
        if self.controller is not None and step.reducible_residual is not None:
            self._reducible_residual.append(step.reducible_residual.detach())

    def update(self, step: Step, probe_loss: Tensor) -> None:
        """Count in the last portion, and move the weights, the target and beta."""
        self.note(step, probe_loss)
        for each in (self.optimizer, self.probe_optimizer):
            if each is not None:
                each.step()
                each.zero_grad(set_to_none=True)
        self.method.update_target(self.schedule.ema_decay(self.step))
        if self.controller is not None and self._reducible_residual:
            self.controller.update(torch.stack(self._reducible_residual).mean())
            self._reducible_residual.clear()
        self.step += 1

    def is_time_to_look(self) -> bool:
        """A few times in an epoch, and at the end."""
        return self.schedule.is_time_to_look(self.step)

    def look(self, step: Step) -> HealthStatus:
        """Send off what the last steps have shown; judge by what has arrived; save if it is time.

        On one GPU the readings arrive a look later and nothing is waited for, except before
        a checkpoint or an evaluation. Several processes must judge by the same readings.
        """
        self.readings.add(embedding_stats(step.r)._asdict())
        self.readings.flush(self.step)
        is_end = self.step == self.total
        is_due = self.schedule.is_time_to_judge(self.step)
        is_judging = self.inner.probe is not None and is_due
        is_saving = time.monotonic() - self.saved_at > 60 * self.config.train.save_every
        self.pace.update(self.step, self.loader.waited)
        verdict = self._report(wait=is_end or is_judging or is_saving or world_size() > 1)
        if is_end and not verdict.is_failed and not self._is_finite():
            verdict = HealthStatus(
                "nan", "nan: weights not finite after the last step; lower optim.lr"
            )
        if not verdict.is_failed:
            if is_judging or (is_end and self.inner.probe is not None):
                self.judge()
            if is_due or is_end or self.step == self.schedule.look_every:
                self.draw(step)
            if is_saving and self.health.is_well:
                self.save()
        return verdict

    def _report(self, *, wait: bool) -> HealthStatus:
        """Write down and show every reading that has arrived, and judge by the last."""
        verdict = HealthStatus("ok", "")
        while (reading := self.readings.poll(wait=wait)) is not None:
            verdict = self.health.verdict(reading, self.pace.data_wait_fraction)
            rate = self.pace.steps_per_second * self.config.train.batch_size
            extra = {"images_per_second": rate, "data_wait_fraction": self.pace.data_wait_fraction}
            # A reading may arrive looks after its steps.
            extra["lr"] = self.schedule.lr(reading.step - 1)
            self.journal.write(reading.step, {**reading.means, **extra, "health": verdict.text})
            self._show(reading, rate, verdict)
            if verdict.is_failed:
                break
        return verdict

    def _show(self, reading: Reading, rate: float, verdict: HealthStatus) -> None:
        # The last ones are cut first where a terminal is narrow.
        shown = {"": f"{rate:,.0f} img/s"} if rate else {}  # not known at the first look
        shown["loss"] = f"{reading.means['loss']:.2f}"
        if self.accuracy is not None:
            shown["kNN"] = f"{self.accuracy.neighbors:.1%}"
        if "reducible_residual" in reading.means:
            shown["reducible_residual"] = f"{reading.means['reducible_residual']:.2f}"
        if "residual" in reading.means:
            shown["residual"] = f"{reading.means['residual']:.1f}"
        shown["wait"] = f"{self.pace.data_wait_fraction:.0%}"
        title = f"{self.config.method} epoch {self.schedule.epoch(reading.step):.1f}"
        self.display.progress(title, reading.step, self.total, shown)
        if verdict.state != "ok":
            self.display.say(f"step {reading.step}: {verdict.text}")

    def judge(self) -> None:
        """Ask probe and neighbors for the labels that were held out; the first process does."""
        if rank() > 0 or self.inner.probe is None or self.labels is None:
            return
        with self.pace.exclude(lambda: self.loader.waited):
            found = accuracy(
                self.method.encoder,
                self.inner.probe,
                self.loader.batches,
                self.labels,
                self.held,
                size=self.config.views.size,
                antialias=self.config.views.antialias,
                precision=self.dtype,
                neighbors=self.config.probe.neighbors,
                bank=self.config.probe.bank,
            )
        if found is not None:  # of a few images none may be held out, or none that can be read
            self.accuracy = found
            words = {"probe_accuracy": found.probe, "knn_accuracy": found.neighbors}
            self.journal.write(self.step, words)

    def draw(self, step: Step) -> None:
        """Views of some images, always the same, and how directions lie: for tensorboard."""
        if rank() > 0 or not self.config.train.tensorboard:
            return
        with self.pace.exclude(lambda: self.loader.waited):
            epoch = int(self.schedule.epoch(self.step))
            batch = images.some(self.loader, evenly_spaced_indices(self.count, 8), epoch)
            x, y = view_maker(self.config, self.dtype, compiled=False)(batch)
            self.journal.draw(self.step, colors(x), colors(y), step.r)

    def must_stop(self, asked: list[int]) -> bool:
        """Whether someone asked; several processes agree on it when they look."""
        if world_size() == 1:
            return bool(asked)
        return self.is_time_to_look() and any_process(bool(asked), self.device)

    def save(self) -> None:
        """A checkpoint and the encoder as it is now; the first process writes.

        A loss is computed before its step: it may be finite while the weights no longer are.
        """
        if rank() == 0 and not self._is_finite():
            self.display.say(f"step {self.step}: weights not finite; not saved")
        elif rank() == 0:
            state = {
                "step": self.step,
                "images": self.count,
                "shades": self.shades,
                "attempt": self.attempt,
                "own_method": self.is_own,
                "accuracy": None if self.accuracy is None else tuple(self.accuracy),
                **{name: part.state_dict() for name, part in self._parts()},
            }
            checkpoint.save_step(self.out / files.CHECKPOINTS, self.step, state)
            self._saved = self.step
            views = self.config.views
            encoder.save(
                self.out,
                self.method.encoder,
                self.config.network,
                views.size,
                self.side,
                antialias=views.antialias,
            )
            unreadable = images.list_unreadable(self.loader, self.out / files.UNREADABLE)
            if unreadable > self._told:
                self._told = unreadable
                path = self.out / files.UNREADABLE
                self.display.say(f"{unreadable:,} images that cannot be read: {path}")
        self.saved_at = time.monotonic()

    def _is_finite(self) -> bool:
        """Whether weights and statistics are numbers; waits for the device."""
        tensors = [t for t in self.inner.state_dict().values() if t.is_floating_point()]
        return bool(torch.stack(torch._foreach_norm(tensors)).isfinite().all())

    def restore(self) -> None:
        """Go on from the last whole checkpoint, or make one of the beginning."""
        # To the host, where AdamW counts its steps: elsewhere it would wait for each of them.
        path, state = checkpoint.latest(self.out / files.CHECKPOINTS) or (None, {})
        # Waits for all, so that none finds the checkpoint that the first is about to write.
        self._require_same(path)
        if path is None:
            if rank() == 0 and (self.out / files.ENCODER).exists():
                raise ValueError(
                    f"{self.out} holds an encoder, and no checkpoint to go on from: training "
                    "would begin anew and replace it; choose another --out, or delete it"
                )
            self.journal = MetricsLogger(self.out, tensorboard=self.config.train.tensorboard)
            self.save()
            return
        self._require_images(state)
        for group in state["readings"]["groups"]:
            group["sum"] = group["sum"].to(self.device)
        for name, part in self._parts():
            part.load_state_dict(state[name])
        for each in (self.optimizer, self.probe_optimizer):
            if each is not None:
                _lay_out(each)
        self.step = self._saved = state["step"]
        self.attempt = max(self.attempt, state["attempt"])
        self.accuracy = None if state["accuracy"] is None else Accuracy(*state["accuracy"])
        tensorboard = self.config.train.tensorboard
        self.journal = MetricsLogger(self.out, step=self.step, tensorboard=tensorboard)
        if self.step >= self.total:
            self.display.say(f"finished before: all {self.total:,} steps are done")
        else:
            self.display.say(f"going on from step {self.step:,} of {self.total:,}")

    def _require_same(self, path: Path | None) -> None:
        """Every process must have found the same checkpoint, or none of them any."""
        if world_size() == 1:
            return
        step = -1.0 if path is None else float(checkpoint.step_of(path))
        mine = torch.tensor([[step]], dtype=torch.float64, device=self.device)
        found = gather(mine).flatten().tolist()
        if len(set(found)) > 1:
            words = ", ".join("none" if step < 0 else f"step {step:.0f}" for step in found)
            raise ValueError(
                f"processes see different last checkpoints in {self.out / files.CHECKPOINTS}: "
                f"{words}; run the same command again when all machines see the same files"
            )

    def _require_images(self, state: dict[str, Any]) -> None:
        """A run goes on with the images it began with; an old checkpoint may not tell."""
        place = self.config.data.source
        if (count := state.get("images", self.count)) != self.count:
            raise ValueError(
                f"{self.out} holds a run on {count:,} images, and {place} has "
                f"{self.count:,}; choose another --out"
            )
        if images.are_others(state.get("shades", self.shades), self.shades):
            raise ValueError(
                f"{self.out} holds a run on other images than those of {place}, of the same "
                "number; choose another --out, or give data.source as it was"
            )

    def go_back(self, verdict: HealthStatus) -> None:
        """Back to the last good checkpoint with other random numbers, or out."""
        self.attempt += 1
        if self.attempt > self.config.health.max_restarts:
            self.journal.write(self.step, {STOPPED: verdict.text})
            raise TrainingFailed(
                f"stopped after {self.config.health.max_restarts} returns: {verdict.text}"
            )
        self.display.say(f"step {self.step}: {verdict.text}; back to the last good checkpoint")
        self.journal.close()
        self.restore()

    def finish(self) -> Outcome:
        """Save what there is and say where."""
        self._report(wait=True)
        if self.health.is_well or self.step == self.total:
            self.save()  # where an illness is suspected, the checkpoint before is the better one
        if self.step < self.total:
            self.journal.write(self.step, {STOPPED: "asked to"})
        return Outcome(self.out, self.step, self._saved, self.total, self.accuracy)

    def close(self) -> None:
        """End threads and files."""
        self.loader.close()
        try:
            if hasattr(self, "journal"):
                self.journal.close()
        finally:  # even where a disk is full
            if self._hold is not None:
                os.close(self._hold)
                self._hold = None

    def _parts(self) -> list[tuple[str, Any]]:
        """All that has a state."""
        parts = {
            "learner": self.inner,
            "optimizer": self.optimizer,
            "probe_optimizer": self.probe_optimizer,
            "controller": self.controller,
            "health": self.health,
            "readings": self.readings,
        }
        return [(name, part) for name, part in parts.items() if part is not None]


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Moments with the strides of their weights: torch fuses a step only where these agree."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            is_moment = isinstance(value, Tensor) and value.shape == p.shape
            if is_moment and value.stride() != p.stride():
                state[name] = torch.empty_like(p, dtype=value.dtype).copy_(value)

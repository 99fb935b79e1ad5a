"""The state of a run: build, save and restore it."""

import os
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from compressive.config import Config, is_compressed
from compressive.data.loaders import Batch, canvas_side
from compressive.data.source import Source
from compressive.device import is_compiled, pick_device, precision
from compressive.distributed import is_sharded, parallel, rank, wait_for_all
from compressive.methods import Builder, Method, build
from compressive.progress import Display
from compressive.rundir import checkpoint, files, folder
from compressive.rundir.lock import acquire_lock
from compressive.rundir.metrics_log import MetricsLogger
from compressive.rundir.sharded_checkpoint import load_shards
from compressive.tracking import tracked_run
from compressive.train import images
from compressive.train.compile_ahead import CompiledAhead, compile_ahead, prepare_compiling
from compressive.train.health import AsyncMetrics, Health, are_finite
from compressive.train.initial_weights import start_from_weights
from compressive.train.observers import Observers
from compressive.train.online_eval import Accuracy, held_out_labels
from compressive.train.rate_controller import Controller
from compressive.train.resume import (
    check_images_of_run,
    check_is_longer,
    check_same_checkpoint,
    check_same_colors,
    check_same_files,
    check_same_method,
    continued_state,
    reading,
    shared_run_id,
)
from compressive.train.saving import save_run
from compressive.train.schedule import Schedule
from compressive.train.sharding import shard_learner
from compressive.train.step import (
    build_learner,
    build_optimizer,
    compile_learner,
    match_strides,
    view_maker,
)
from compressive.train.throughput import Throughput


class Run:
    """Everything the training loop needs, and its position: `step` of `total` in an `attempt`."""

    step: int
    attempt: int
    saved_step: int
    unreadable: int  # images that were reported
    logger: MetricsLogger  # set by `restore`

    def __init__(
        self,
        config: Config,
        out: Path,
        display: Display,
        *,
        resume: bool,
        source: Source | None = None,
        method: Builder = build,
        given: Sequence[str] = (),
        continue_from: Path | None = None,
        observers: Observers | None = None,
    ) -> None:
        self.observers: Observers = observers or Observers(config, display)
        self.out: Path = out
        self.given: tuple[str, ...] = tuple(given)
        self.continue_from: Path | None = continue_from
        self.display: Display = display
        self.device: torch.device = pick_device(config.train.device)
        if rank() == 0:
            try:
                folder.open_folder(out, config, resume=resume, given=given)
            except folder.OtherSettings:  # other images may be the cause
                check_images_of_run(config, out, source)
                raise
        if source is not None:
            config = images.from_python(config, source)
        self.config: Config = config
        self.ahead: CompiledAhead | None = compile_ahead(config, self.device, method)
        source = images.load_source(config, source)
        classes = 0 if source.labels is None else int(source.labels.max()) + 1
        self.dtype: torch.dtype = precision(config.train.precision, self.device)
        prepare_compiling(self.ahead, config, self.device, self.dtype, classes)
        self.count: int = len(source)
        # Only the first process reads the state of all files: there may be a million.
        is_first, place = rank() == 0, config.data.source
        self.files: images.FileList | None = images.list_files(source, place) if is_first else None
        self.labels: Int[Tensor, " count"] | None = source.labels
        held_out = held_out_labels(self.count, config.probe.holdout, config.seed)
        self.held_out: Bool[Tensor, " count"] = held_out
        self.visible_labels: Tensor = torch.full((self.count,), -1, device=self.device)
        if source.labels is not None:
            self.visible_labels.copy_(source.labels.masked_fill(held_out, -1))
        self.schedule: Schedule = Schedule(config, self.count)
        self.notes: list[str] = [*self.schedule.notes, *images.source_notes(source)]
        self.total: int = self.schedule.total
        if continue_from is not None and not checkpoint.steps(out / files.CHECKPOINTS):
            check_is_longer(continue_from, self.total)
        self.step = self.attempt = self.saved_step = self.unreadable = 0
        self.saved_at: float = time.monotonic()
        self.metrics: AsyncMetrics = AsyncMetrics()
        self.throughput: Throughput = Throughput()
        self.health: Health = Health(config, warmup=self.schedule.warmup)
        self.accuracy: Accuracy | None = None
        # Build networks first: this may fail, and reading images may take long.
        self._build_networks(method, classes)
        self.side: int = canvas_side(source, config.views.size, config.data.max_side)
        decoding = partial(display.progress, "decoding", unit="images")
        self.loader: images.Loader = images.load_images(
            source, config, self.side, self.device, decoding
        )
        if self.ahead is not None:
            self.ahead.allow_step()  # the images have their memory
        self.notes.append(images.loader_note(self.loader))
        self._lock: int | None = None
        try:
            self.color_fingerprint: Tensor = images.color_fingerprint(self.loader, self.count)
            for note in images.uniform_data_notes(self.loader, self.labels, self.count):
                display.say(note)
            self._claim_folder(resume=resume)
        except BaseException:
            self.close()  # else the folder stays locked for the lifetime of this process
            raise

    def _build_networks(self, method: Builder, classes: int) -> None:
        """Build the learner, its optimizers, and the functions of a step."""
        config, device = self.config, self.device
        compiled = is_compiled(config.train.compile, device)
        self.learner = learner = build_learner(config, method, classes, device, compiled=compiled)
        self.method: Method = learner.method
        self.has_custom_method: bool = method is not build  # only its own program can build it
        if self.continue_from is None and not checkpoint.steps(self.out / files.CHECKPOINTS):
            self.notes.append(start_from_weights(self.method, config))
        shard_learner(learner, config)
        self.optimizer = build_optimizer(config.optim, self.method, frozen=self.schedule.frozen > 0)
        self.probe_optimizer: torch.optim.Optimizer | None = None
        if learner.probe is not None:
            self.probe_optimizer = torch.optim.AdamW(learner.probe.parameters(), config.probe.lr)
        self.parallel_learner: nn.Module = parallel(learner)
        numbers = learner.method.view_numbers
        self.make_views = view_maker(config, self.dtype, numbers, compiled=compiled)
        if compiled:
            compile_learner(learner, config, device)
        self.scheduled_beta: Float[Tensor, ""] = torch.zeros((), device=device)
        self.controller: Controller | None = None
        target, beta = config.bottleneck.target_residual, config.bottleneck.beta
        if is_compressed(config) and target is not None:
            # 2 % of the run, so that beta settles even in a short one.
            horizon = max(10, min(200, self.total // 50))
            self.controller = Controller(target, beta=beta, horizon=horizon, device=device)

    def _claim_folder(self, *, resume: bool) -> None:
        """Lock the folder and write config.json, in the first process only."""
        if rank() == 0:
            self._lock = acquire_lock(self.out)
            # Check again: another process may have used it while images were read.
            if not folder.open_folder(self.out, self.config, resume=resume, given=self.given):
                folder.write_config(self.out, self.config, self.device, given=self.given)
        wait_for_all()  # no process may search for a checkpoint before the folder exists
        self.run_id: str = shared_run_id(self.out, self.device)

    @property
    def beta(self) -> Float[Tensor, ""]:
        """Return the weight of the residual as a tensor: a changing float would recompile."""
        return self.scheduled_beta if self.controller is None else self.controller.beta

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the method and, if there is one, of the probe."""
        return [each for each in (self.optimizer, self.probe_optimizer) if each is not None]

    def batches(self) -> Generator[Batch]:
        """Yield this process's batches from the current step on."""
        at = {"attempt": self.attempt, "step": self.step}
        return images.training_batches(self.loader, self.config, self.count, **at)

    def is_finite(self) -> bool:
        """Return whether weights, statistics and moments are finite; waits for the device."""
        return are_finite(self.learner, self.optimizers)

    def save(self) -> None:
        """Write a checkpoint and the current encoder, in the first process.

        If weights are sharded, each process writes its part of the checkpoint.
        """
        if rank() == 0 or is_sharded(self.learner):
            save_run(self, self._state())
        self.saved_at = time.monotonic()

    def restore(self) -> None:
        """Resume from the last valid checkpoint, or save one of the initial state."""
        # Load to the host: AdamW's step counts on a GPU would synchronize at each step.
        place = self.out / files.CHECKPOINTS
        path, state = checkpoint.latest(place, self.run_id) or (None, {})
        # This synchronizes, so no process finds the checkpoint that the first one writes below.
        check_same_checkpoint(path, place, self.device)
        is_new = path is None
        if path is None:
            if rank() == 0 and (self.out / files.ENCODER).exists():
                held = f"{self.out} holds an encoder, but no checkpoint to resume from"
                raise ValueError(f"{held}; choose another --out")
            if (other := self.continue_from) is not None:
                path, state, note = continued_state(other, self.schedule)
                self._read_state(path, state, other)
                self.display.say(note)
        else:
            self._read_state(path, state, self.out)
        about = tracked_run(self.out, self.step, self.run_id, self.config)
        self.logger = self.observers.open(about, is_over=self.step >= self.total)
        if is_new:
            self.save()
        elif self.step >= self.total:
            self.display.say(f"already finished: all {self.total:,} steps are done")
        else:
            self.display.say(f"resuming from step {self.step:,} of {self.total:,}")

    def _read_state(self, path: Path, state: dict[str, Any], run: Path) -> None:
        """Check that a checkpoint of a run fits this one, and load it."""
        with reading(path):
            device, sharded = self.device, is_sharded(self.learner)
            state = load_shards(path, state, device, sharded=sharded)
        check_same_method(path, state, self.learner, self.has_custom_method)
        with reading(path):
            place, count = self.config.data.source, self.count
            if self.files is not None:
                where = {"place": place, "out": run, "loader": self.loader}
                if note := check_same_files(state, self.files, count=count, **where):
                    self.display.say(note)
            check_same_colors(state["color_fingerprint"], self.color_fingerprint, run, count, place)
            self._load_state(state)

    def use_code_of_process(self) -> AbstractContextManager[None]:
        """Return a block for the first step: it waits for the code of another process, if any."""
        ahead, self.ahead = self.ahead, None
        return nullcontext() if ahead is None else ahead.finished_before_compiling()

    def close(self) -> None:
        """Stop threads, close files and release the lock."""
        if self.ahead is not None:
            self.ahead.close()
        self.loader.close()
        try:
            self.observers.close()
        finally:  # even if the disk is full
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _parts(self) -> dict[str, Any]:
        """Return everything with a state_dict."""
        parts: dict[str, Any] = {"learner": self.learner, "optimizer": self.optimizer}
        parts |= {"probe_optimizer": self.probe_optimizer, "controller": self.controller}
        parts |= {"health": self.health, "metrics": self.metrics}
        return {name: part for name, part in parts.items() if part is not None}

    def _state(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "step": self.step,
            "images": self.count,
            "image_files": self.files,
            "color_fingerprint": self.color_fingerprint,
            "attempt": self.attempt,
            "custom_method": self.has_custom_method,
            "accuracy": None if self.accuracy is None else tuple(self.accuracy),
            **{name: part.state_dict() for name, part in self._parts().items()},
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        for group in state["metrics"]["groups"]:
            group["sum"] = group["sum"].to(self.device)
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        for optimizer in self.optimizers:
            match_strides(optimizer)
        self.step = self.saved_step = state["step"]
        self.attempt = max(self.attempt, state["attempt"])
        self.accuracy = None if state["accuracy"] is None else Accuracy(*state["accuracy"])

"""Pretraining: the loop from images to an encoder.

All randomness is a function of the seed and the step: the order of images (`data.sampler`), their
views (`rng.image_keys`) and the noise of a step (`seed_step`). A resumed run is
therefore bitwise equal to an uninterrupted one.
"""

import hashlib
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressive.checks import autocast, skip_value_checks
from compressive.config import Config
from compressive.data.loaders import Batch
from compressive.data.source import Source
from compressive.distributed import any_process, rank, world_size
from compressive.methods import Builder, Step, build
from compressive.platforms.garbage import collect_as_usual, collect_rarely
from compressive.progress import Display
from compressive.rundir.files import local_path
from compressive.rundir.machine_copies import copy_to_machines
from compressive.rundir.metrics_log import REQUESTED, STOPPED
from compressive.train.callbacks import Callback, LogFunction
from compressive.train.compile_ahead import end_compiling_ahead
from compressive.train.compile_cache import record_compiled
from compressive.train.health import HealthStatus
from compressive.train.log import add_metrics, log, write_arrived_metrics
from compressive.train.observers import Observers
from compressive.train.outcome import Outcome
from compressive.train.run import Run
from compressive.train.signals import handle_stop_signals
from compressive.watchdog.activity import Backward, Operation, begin_step


class TrainingFailed(RuntimeError):
    """Raised if a run diverges or collapses more often than health.max_restarts allows."""


def pretrain(
    config: Config,
    out: str | Path,
    *,
    resume: bool = True,
    display: Display | None = None,
    source: Source | None = None,
    method: Builder = build,
    given: Sequence[str] = (),
    continue_from: str | Path | None = None,
    callbacks: Sequence[Callback | LogFunction] = (),
) -> Outcome:
    """Train as the config says; write encoder, checkpoints and metrics to a folder.

    Resume if the folder holds an unfinished run with the same settings. Ctrl-C, SIGTERM and a
    closed terminal save a checkpoint and return early. A run that diverges or collapses
    restarts from its last good checkpoint with other random numbers. After `health.max_restarts`
    restarts it raises `TrainingFailed`.

    `source` replaces data.source. `method` builds the method in place of config.method. `given`
    names the settings that the user chose, for messages. `continue_from` is a run whose last
    checkpoint the new run starts from. `callbacks` are called during training: see `Callback`.
    """
    other = None if continue_from is None else local_path(continue_from)
    parts: dict[str, Any] = {"source": source, "method": method, "given": given}
    with display or Display(quiet=rank() > 0) as shown, started_fast():
        parts["observers"] = Observers(config, shown, callbacks)
        run = Run(config, local_path(out), shown, resume=resume, continue_from=other, **parts)
        shown.say(_summary(run))
        for note in filter(None, run.notes):
            shown.say(note)
        try:
            with stop_requests() as requests:  # earlier there is nothing to save
                run.restore()
                while (status := train(run, requests)).is_failed:
                    restart(run, status)
                outcome = finish(run)
            run.observers.callbacks.on_end(outcome)
            return outcome
        finally:
            run.close()


def train(run: Run, requests: list[int]) -> HealthStatus:
    """Train until the end, a failure or a request to stop; return the last health status."""
    batches, status, first = run.batches(), HealthStatus("ok", ""), run.step
    while run.step < run.total:
        step = train_step(run, batches)
        if run.step == first + 1:
            record_compiled()
            collect_as_usual()
        is_time_to_log = run.schedule.is_time_to_log(run.step)
        if is_time_to_log:
            status = log(run, step)
        if status.is_failed or _should_stop(run, requests, is_time_to_log):
            break
    batches.close()
    return status


def train_step(run: Run, batches: Iterator[Batch]) -> Step:
    """Make one optimizer step without waiting for the device; return the last batch's `Step`."""
    for group in run.optimizer.param_groups:
        group["lr"] = run.schedule.group_lr(run.step, group)
    if run.controller is None:
        run.scheduled_beta.fill_(run.schedule.beta(run.step))
    begin_step(run.step + 1)
    seed_step(run.config.seed, run.attempt, run.step)
    step, residual = compute_gradients(run, batches)
    apply_gradients(run, residual)
    return step


def compute_gradients(run: Run, batches: Iterator[Batch]) -> tuple[Step, Tensor | None]:
    """Accumulate the gradients of a step; return its last `Step` and mean reducible residual."""
    count = run.config.train.grad_accum_steps
    steps: list[Step] = []
    for batch in islice(batches, count):
        views, labels = run.make_views(batch), run.visible_labels[batch.index]
        synchronize = _average_gradients(run.parallel_learner, is_last=len(steps) == count - 1)
        code = run.use_code_of_process()
        with code, autocast(run.device, run.dtype), synchronize, skip_value_checks():
            step, probe_loss = run.parallel_learner(views, run.beta, labels)
            with Backward("the backward pass with its all-reduce"):
                ((step.loss + probe_loss) / count).backward()
        add_metrics(run, step, probe_loss)
        steps.append(step._replace(loss=step.loss.detach()))
    residuals = [s.reducible_residual for s in steps if s.reducible_residual is not None]
    return steps[-1], torch.stack(residuals).mean() if residuals else None


def apply_gradients(run: Run, residual: Tensor | None) -> None:
    """Update the weights, the target network and a controlled beta."""
    if (most := run.config.optim.clip_norm) > 0:
        # This never waits for the device, and gradients are equal in all processes.
        weights = [p for group in run.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(weights, most)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.method.update_target(run.schedule.ema_decay(run.step))
    if run.controller is not None and residual is not None:
        run.controller.update(residual)
    run.step += 1


def restart(run: Run, status: HealthStatus) -> None:
    """Return to the last good checkpoint with other random numbers, or raise TrainingFailed."""
    run.attempt += 1
    if run.attempt > run.config.health.max_restarts:
        run.logger.write(run.step, {STOPPED: status.text})
        raise TrainingFailed(
            f"training failed after {run.config.health.max_restarts} restarts: {status.text}"
        )
    run.display.say(f"step {run.step}: {status.text}; restarting from the last good checkpoint")
    run.logger.close()
    copy_to_machines(run.out)  # the checkpoints since the start
    run.restore()


def finish(run: Run) -> Outcome:
    """Save and return the outcome; do not save a stopped run that may be failing."""
    write_arrived_metrics(run, wait=True)
    if run.health.is_well or run.step == run.total:
        with Operation("saving"):
            run.save()
    run.observers.status = "finished" if run.step == run.total else "stopped"
    if run.step < run.total:
        run.logger.write(run.step, {STOPPED: _stop_reason(run)})
    return Outcome(run.out, run.step, run.saved_step, run.total, run.accuracy)


def seed_step(seed: int, attempt: int, step: int) -> None:
    """Seed torch for a step of an attempt, equally in all processes (see `distributed_rsample`)."""
    key = f"{seed}/{attempt}/{step}/0".encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1)


@contextmanager
def started_fast() -> Iterator[None]:
    """Search for reference cycles rarely until `train` has made the first step.

    If there is none, end the process that compiles the network.
    """
    collect_rarely()
    try:
        yield
    finally:
        end_compiling_ahead()
        collect_as_usual()


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect stop signals in a list; a second Ctrl-C interrupts immediately."""
    requests: list[int] = []

    def add(number: int) -> None:
        if requests and number == signal.SIGINT:
            raise KeyboardInterrupt
        requests.append(number)

    with handle_stop_signals(add):
        yield requests


def _average_gradients(learner: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
    """Average gradients over processes once per step, in the backward pass of the last batch."""
    if is_last or not isinstance(learner, DistributedDataParallel):
        return nullcontext()
    return learner.no_sync()


def _should_stop(run: Run, requests: list[int], is_time_to_log: bool) -> bool:
    """Return whether to stop; several processes decide together, at log points."""
    is_asked = bool(requests) or run.observers.callbacks.error is not None
    if world_size() == 1:
        return is_asked
    return is_time_to_log and any_process(is_asked, run.device)


def _stop_reason(run: Run) -> str:
    """Return why a run stopped early."""
    error = run.observers.callbacks.error
    return REQUESTED if error is None else f"a callback raised {type(error).__name__}: {error}"


def _summary(run: Run) -> str:
    """Describe a run in one line; count known unreadable images separately."""
    config, words, bad = run.config, "", run.loader.bad
    readable = torch.ones(run.count, dtype=torch.bool)
    readable[bad] = False
    if run.labels is not None:
        classes = len(run.labels[(run.labels >= 0) & readable].unique())
        held_out = int((run.held_out & readable).sum())
        words = f" in {classes:,} classes"
        words += f" ({held_out:,} labels held out)" if held_out else ""
    words += f", without {len(bad):,} unreadable ones" if bad else ""
    precision = str(run.dtype).removeprefix("torch.")
    processes = f", {world_size()} processes" if world_size() > 1 else ""
    return (
        f"{config.method} on {run.count - len(bad):,} images{words}: {config.network.name}, "
        f"{config.views.size}-pixel views, batch {config.train.batch_size}, {run.total:,} steps, "
        f"{run.device}, {precision}{processes}"
    )

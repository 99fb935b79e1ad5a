"""Pretraining: one loop from images to an encoder, readable top to bottom.

All that is random is a function of the seed and the step: the order of images (`data.plan`), their
views (`views.image_keys`) and the noise of a step (`seed_step`). A run that goes on from a
checkpoint therefore does what it would have done without the break, to the last bit.
"""

import hashlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from compressive.checks import autocast, skip_value_checks
from compressive.config import Config
from compressive.data.loaders import Batch
from compressive.data.source import Source
from compressive.distributed import rank
from compressive.methods import Builder, Step, build
from compressive.progress import Display
from compressive.train.health import HealthStatus
from compressive.train.run import Outcome, Run
from compressive.train.signals import handle_stop_signals


def pretrain(
    config: Config,
    out: str | Path,
    *,
    resume: bool = True,
    display: Display | None = None,
    source: Source | None = None,
    method: Builder = build,
) -> Outcome:
    """Train as the config says; leave encoder, checkpoints and readings in a folder.

    Goes on where a run in that folder stopped. Ctrl-C, SIGTERM and a closed terminal save and
    return early. A run that falls ill goes back to its last good checkpoint and on from there with
    other random numbers; after `health.max_restarts` such returns it ends with `Ill`.

    `source` takes the place of data.source, and `method` makes another one than config.method's.
    """
    with display or Display(quiet=rank() > 0) as shown:
        run = Run(config, Path(out), shown, resume=resume, source=source, method=method)
        shown.say(_summary(run))
        try:
            with requests_to_stop() as asked:  # not before: there is nothing to save yet
                run.restore()
                while (verdict := _train(run, asked)).is_failed:
                    run.go_back(verdict)
                return run.finish()
        finally:
            run.close()


def _summary(run: Run) -> str:
    """What a run is made of, in a line."""
    config = run.config
    of = ""
    if run.labels is not None:
        classes, held = len(run.labels[run.labels >= 0].unique()), int(run.held.sum())
        of = f" in {classes:,} classes ({held:,} held out, to watch)"
    precision = str(run.dtype).removeprefix("torch.")
    return (
        f"{config.method} on {run.count:,} images{of}: {config.network.name}, views of "
        f"{config.views.size} pixels, batch {config.train.batch_size}, {run.total:,} steps, "
        f"{run.device}, {precision}"
    )


def _train(run: Run, asked: list[int]) -> HealthStatus:
    """Steps until the end, an illness or a request to stop, and the last verdict."""
    batches, verdict = run.batches(), HealthStatus("ok", "")
    while run.step < run.total:
        run.set_rates()
        seed_step(run.config.seed, run.attempt, run.step)
        for batch in islice(batches, run.config.train.grad_accum_steps - 1):
            run.note(*gradients(run, batch, is_last=False))
        step, probe_loss = gradients(run, next(batches), is_last=True)
        run.update(step, probe_loss)
        if run.is_time_to_look():
            verdict = run.look(step)
        if verdict.is_failed or run.must_stop(asked):
            break
    batches.close()
    return verdict


def gradients(run: Run, batch: Batch, *, is_last: bool) -> tuple[Step, Tensor]:
    """Add the gradients of a portion to those that are there."""
    views = run.views(batch)
    with autocast(run.device, run.dtype), run.synchronized(is_last), skip_value_checks():
        step, probe_loss = run.learner(views, run.beta, run.visible[batch.index])
        ((step.loss + probe_loss) / run.config.train.grad_accum_steps).backward()
    return step, probe_loss


def seed_step(seed: int, attempt: int, step: int) -> None:
    """Make the noise of a step its own: of this run, this attempt, this step and this process."""
    words = f"{seed}/{attempt}/{step}/{rank()}".encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1)


@contextmanager
def requests_to_stop() -> Iterator[list[int]]:
    """A list that fills when someone asks to stop; a second Ctrl-C stops at once."""
    asked: list[int] = []

    def ask(number: int) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    with handle_stop_signals(ask):
        yield asked

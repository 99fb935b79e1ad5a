"""Between steps: log metrics, check the health of a run, evaluate it online and save it."""

import math
import time

from torch import Tensor

from compressive.augment.ops import colors
from compressive.config import is_compressed
from compressive.distributed import any_process, is_sharded, rank, watchdog_notes, world_size
from compressive.methods import Step
from compressive.train import images
from compressive.train.health import HealthStatus, Reading, embedding_stats
from compressive.train.online_eval import evenly_spaced_indices, online_accuracy
from compressive.train.run import Run
from compressive.train.step import view_channels, view_maker
from compressive.watchdog.activity import Collective, Operation

_STEP_METRICS = (
    *("loss", "accuracy", "positive_cosine", "nll", "residual", "reducible_residual", "predictive"),
    *(name for name in Step._fields if name.startswith("effective_beta")),
)


def add_metrics(run: Run, step: Step, probe_loss: Tensor) -> None:
    """Add the metrics of a micro-batch to the running means on the device."""
    found = {name: value for name in _STEP_METRICS if (value := getattr(step, name)) is not None}
    if is_compressed(run.config):
        found["beta"] = run.beta
    if run.learner.probe is not None:
        found["probe_loss"] = probe_loss
    run.metrics.add(found)


def log(run: Run, step: Step) -> HealthStatus:
    """Send metrics to the host, log what has arrived, and evaluate or save if due.

    On one GPU the metrics arrive by the next log point, so nothing waits for the device except
    before a checkpoint or an evaluation. Several processes wait, so that all decide on the same
    metrics.
    """
    run.metrics.add(embedding_stats(step.r)._asdict())
    run.metrics.flush(run.step)
    is_end = run.step == run.total
    is_due = run.schedule.is_time_to_evaluate(run.step)
    has_probe = run.learner.probe is not None
    is_saving = time.monotonic() - run.saved_at > 60 * run.config.train.save_every
    if is_sharded(run.learner):  # all processes save together, and their clocks differ
        is_saving = any_process(is_saving, run.device)
    run.throughput.update(run.step, run.loader.waited)
    for note in watchdog_notes():
        run.display.say(f"step {run.step}: {note}")
    must_wait = is_end or (has_probe and is_due) or is_saving or world_size() > 1
    with Collective("metrics of the step"):  # on a GPU the host waits here for collectives
        status = write_arrived_metrics(run, wait=must_wait)
    if is_end and not status.is_failed and not run.is_finite():
        text = "nan: weights or moments not finite after the last step; lower optim.lr"
        status = HealthStatus("nan", text)
    if status.is_failed:
        return status
    if has_probe and (is_due or is_end):
        with Operation("online evaluation"):
            evaluate_online(run)
    if is_due or is_end or run.step == run.schedule.log_every:
        _draw_views(run, step)
    if is_saving and run.health.is_well:
        with Operation("saving"):
            run.save()
    return status


def write_arrived_metrics(run: Run, *, wait: bool) -> HealthStatus:
    """Write and show all metrics that have arrived; return the health status of the last."""
    status = HealthStatus("ok", "")
    while (reading := run.metrics.poll(wait=wait)) is not None:
        status = run.health.check(reading, run.throughput.data_wait_fraction)
        rate = run.throughput.steps_per_second * run.config.train.batch_size
        line = {
            **reading.means,
            "images_per_second": rate,
            "data_wait_fraction": run.throughput.data_wait_fraction,
            "lr": run.schedule.lr(reading.step - 1),  # metrics may arrive after later steps
            "health": status.text,
        }
        run.logger.write(reading.step, line)
        run.observers.callbacks.on_log(reading.step, line)
        _show(run, reading, rate, status)
        if status.is_failed:
            break
    return status


def evaluate_online(run: Run) -> None:
    """Measure probe and kNN accuracy on held-out labels, in the first process.

    If weights are sharded, all processes do: every forward pass gathers weights.
    """
    needs_all = is_sharded(run.learner)
    if (rank() > 0 and not needs_all) or run.learner.probe is None or run.labels is None:
        return
    config = run.config
    with run.throughput.exclude(lambda: run.loader.waited):
        found = online_accuracy(
            run.method.encoder,
            run.learner.probe,
            run.loader.batches,
            run.labels,
            run.held_out,
            size=config.views.size,
            antialias=config.views.antialias,
            channels=view_channels(config.views),
            precision=run.dtype,
            neighbors=config.probe.neighbors,
            bank=config.probe.bank,
        )
    if found is not None:  # with few images, none may be held out and readable
        run.accuracy = found
        if rank() > 0:
            return
        measured = {"probe_accuracy": found.probe, "knn_accuracy": found.neighbors}
        run.logger.write(run.step, measured)
        run.observers.callbacks.on_evaluation(run.step, measured)


def _show(run: Run, reading: Reading, rate: float, status: HealthStatus) -> None:
    # Narrow terminals cut off the last entries.
    shown = {"": f"{rate:,.0f} img/s"} if rate else {}  # unknown at the first log point
    shown["loss"] = f"{reading.means['loss']:.2f}"
    if "accuracy" in reading.means:
        shown["accuracy"] = f"{reading.means['accuracy']:.1%}"
    if run.accuracy is not None:
        shown["kNN"] = f"{run.accuracy.neighbors:.1%}"
    if "reducible_residual" in reading.means:
        shown["reducible_residual"] = f"{reading.means['reducible_residual']:.2f}"
    if "residual" in reading.means:
        shown["residual"] = f"{reading.means['residual']:.1f}"
    shown["wait"] = f"{run.throughput.data_wait_fraction:.0%}"
    # A run of small data ends within an epoch: it has one step more than its full batches.
    last = run.config.train.epochs if not run.config.train.steps else math.inf
    title = f"{run.config.method} epoch {min(last, run.schedule.epoch(reading.step)):.1f}"
    run.display.progress(title, reading.step, run.total, shown)
    if status.state != "ok":
        run.display.say(f"step {reading.step}: {status.text}")


def _draw_views(run: Run, step: Step) -> None:
    """Write views of a few fixed images and histograms of the projections to TensorBoard."""
    if rank() > 0 or not run.config.train.tensorboard:
        return
    with run.throughput.exclude(lambda: run.loader.waited):
        epoch = int(run.schedule.epoch(run.step))
        batch = images.some(run.loader, evenly_spaced_indices(run.count, 8), epoch)
        numbers = run.method.view_numbers
        views = view_maker(run.config, run.dtype, numbers, compiled=False)(batch)
        x, y = (colors(each, *view_channels(run.config.views)) for each in (views[0], views[-1]))
        run.logger.draw(run.step, x, y, step.r)

"""A run that is killed, stopped or restarted matches a plain loop over the steps."""

import io
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import together
from rich.console import Console
from safetensors.torch import load_file
from tiny import Written, differences, journal, last, photos, silent, tensors, tiny, words
from torch import Tensor

from compressive import encoder
from compressive.cli.watch import frame
from compressive.config import METHODS, Config, override
from compressive.data.loaders import Resident, canvas_side
from compressive.data.sampler import batch_index_stream
from compressive.data.source import ImageSource
from compressive.methods import Method, Step, build
from compressive.progress import Display
from compressive.rundir import checkpoint
from compressive.rundir.folder import read_config
from compressive.rundir.metrics_log import MetricsLogger
from compressive.rundir.reader import unfinished
from compressive.train import images, log, loop, online_eval
from compressive.train import step as step_module
from compressive.train.arm_convolutions import speed_up_convolutions
from compressive.train.health import AsyncMetrics, HealthStatus, Reading
from compressive.train.images import load_source
from compressive.train.loop import TrainingFailed, pretrain, seed_step, stop_requests, train_step
from compressive.train.online_eval import Accuracy, held_out_labels
from compressive.train.rate_controller import Controller
from compressive.train.run import Run
from compressive.train.schedule import Schedule
from compressive.train.step import Learner, build_optimizer, check_view_size, view_maker
from compressive.train.throughput import Throughput

pytestmark = pytest.mark.usefixtures("one_thread")

STEERED = ("method=c-byol", "bottleneck.target_residual=0.5", "train.steps=24")
SHORT = (*STEERED, "train.steps=12")


def started(config: Config, out: Path, *, display: Display | None = None) -> Run:
    """Return a restored run that the test advances step by step."""
    run = Run(config, out, display or silent(), resume=True)
    run.restore()
    return run


def one_step(run: Run) -> Any:
    return train_step(run, run.batches())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run C-BYOL for 24 steps with noise, target network, controller, momentum and probe."""
    threads, out = torch.get_num_threads(), tmp_path_factory.mktemp("whole") / "run"
    torch.set_num_threads(1)
    outcome = pretrain(tiny(*STEERED), out, display=silent())
    torch.set_num_threads(threads)
    assert outcome.step == outcome.total == 24
    return out


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the first steps of the same settings."""
    out = tmp_path_factory.mktemp("short") / "run"
    assert pretrain(tiny(*SHORT), out, display=silent()).step == 12
    return out


def command(config: Config, out: Path) -> list[str]:
    place = [config.data.source, "--out", str(out), "--recipe", "c-simclr/quickstart"]
    return ["-m", "compressive", "pretrain", *place, *words(config)]


def killed(config: Config, out: Path, *, after: int) -> None:
    """Start a run in a subprocess and kill it once it has saved `after` steps."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command(config, out)], env=environment)
    while process.poll() is None:
        saved = checkpoint.steps(out / "checkpoints")
        if saved and checkpoint.step_of(saved[-1]) >= after:
            process.kill()
            break
        time.sleep(0.005)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"


@pytest.mark.slow
def test_killed_run_resumes_bitwise(tmp_path: Path, uninterrupted: Path) -> None:
    """Send SIGKILL while steps and saves alternate, then finish the run in this process."""
    out, config = tmp_path / "run", tiny(*STEERED)
    killed(override(config, "train.save_every=1e-9"), out, after=3)
    assert override(read_config(out), "recipe=", "train.save_every=10") == config
    assert 3 <= last(out)["step"] < 24
    assert pretrain(config, out, display=silent()).step == 24
    assert differences(last(out), last(uninterrupted)) == []
    assert journal(out) == journal(uninterrupted)
    assert [line["step"] for line in journal(out) if "loss" in line] == list(range(1, 25))
    encoders = [load_file(run / "encoder.safetensors") for run in (out, uninterrupted)]
    assert differences(*encoders) == []


def test_runs_with_different_seeds_differ(short: Path, tmp_path: Path) -> None:
    """A different seed changes weights, target, momentum, probe and beta."""
    pretrain(tiny(*SHORT, "seed=1"), tmp_path / "run", display=silent())
    different = differences(last(tmp_path / "run"), last(short))
    for part in (
        "learner.method.encoder.conv1",
        "learner.method.target.network.0.conv1",
        "learner.probe.linear.weight",
        "optimizer.state",
        "probe_optimizer.state",
        "controller.beta",
        "health.losses",
    ):
        assert any(part in name for name in different), part
    assert journal(tmp_path / "run") != journal(short)


class Interrupting(Display):
    """Send this process a signal when step `at` is displayed."""

    def __init__(self, number: int, at: int) -> None:
        super().__init__(quiet=True)
        self.number, self.at = number, at

    def progress(
        self, title: str, done: float, total: float, readings: Any = None, *, unit: str = ""
    ) -> None:
        if readings is not None and done == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.slow
def test_ignored_sighup_does_not_stop_the_run(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = tiny("train.steps=4", "train.log_every=1")
        assert pretrain(config, tmp_path, display=Interrupting(signal.SIGHUP, at=2)).step == 4
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_saves_and_rerun_resumes(number: int, tmp_path: Path, uninterrupted: Path) -> None:
    config, out = tiny(*STEERED), tmp_path / "run"
    before = signal.getsignal(number)
    outcome = pretrain(config, out, display=Interrupting(number, at=7))
    assert (outcome.step, outcome.total) == (7, 24)
    assert signal.getsignal(number) is before
    assert last(out)["step"] == 7
    assert journal(out)[-1] == {"step": 7, "stopped": "requested"}
    again = pretrain(config, out, display=silent())
    assert again.step == 24
    assert differences(last(out), last(uninterrupted)) == []
    assert journal(out) == journal(uninterrupted)


@pytest.mark.slow
def test_stop_between_log_steps_keeps_partial_means(tmp_path: Path) -> None:
    """Metrics are means over 3 steps; the stop falls after the first of the three."""
    config = tiny("method=c-simclr", "train.steps=6", "train.log_every=3")
    pretrain(config, tmp_path / "whole", display=silent())
    run = started(config, tmp_path / "run")
    for step in range(1, 5):  # a stop request takes effect after a step
        loop.train(run, [signal.SIGTERM])
        assert run.step == step
    assert loop.finish(run).step == 4
    run.close()
    pretrain(config, tmp_path / "run", display=silent())
    assert differences(last(tmp_path / "run"), last(tmp_path / "whole")) == []
    assert journal(tmp_path / "run") == journal(tmp_path / "whole")
    assert [line["step"] for line in journal(tmp_path / "run") if "loss" in line] == [3, 6]


def test_ctrl_c_while_decoding_is_not_deferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default SIGINT handler stays in place while images are decoded, which may take long."""
    before, read = signal.getsignal(signal.SIGINT), load_source

    def interrupted(config: Config, *given: Any) -> Any:
        assert signal.getsignal(signal.SIGINT) is before
        return read(config, *given)

    monkeypatch.setattr(images, "load_source", interrupted)
    assert pretrain(tiny("train.steps=1"), tmp_path / "a", display=silent()).step == 1


@pytest.mark.slow
def test_encoder_without_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    """Checkpoints may be deleted to free disk space; a rerun must not restart over the result."""
    config = tiny("train.steps=2")
    pretrain(config, tmp_path, display=silent())
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"no checkpoint.*--out"):
        pretrain(config, tmp_path, display=silent())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_failed_run_records_the_reason(steps: int, tmp_path: Path) -> None:
    """Cover a run that fails at its last step, too."""
    config = tiny(f"train.steps={steps}", "optim.lr=1e30", "health.max_restarts=1")
    with pytest.raises(TrainingFailed, match="after 1 restarts: nan"):
        pretrain(config, tmp_path, display=silent())
    assert journal(tmp_path)[-1]["stopped"].startswith("nan")
    assert f"step 0 of {steps}" in unfinished(tmp_path)
    seen = io.StringIO()
    Console(file=seen, width=120).print(frame(tmp_path))
    assert "given up: nan" in seen.getvalue()
    assert "finished" not in seen.getvalue()


@pytest.mark.slow
def test_suspected_collapse_is_not_saved(tmp_path: Path) -> None:
    """`outcome.saved` is the last good step; a spread of 5 times uniform is never reached."""
    ill = ("health.collapse_std=5", "train.steps=24", "train.log_every=2")
    outcome = pretrain(tiny(*ill), tmp_path, display=Interrupting(signal.SIGTERM, at=2))
    assert (outcome.step, outcome.saved) == (2, 0)
    well = pretrain(tiny("train.steps=3"), tmp_path / "b", display=silent())
    assert (well.step, well.saved) == (3, 3)


def test_second_ctrl_c_interrupts_immediately() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_no_signal_handlers_outside_the_main_thread() -> None:
    seen = []

    def inside() -> None:
        with stop_requests() as asked:
            seen.append((asked, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [([], signal.getsignal(signal.SIGTERM))]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_restores(method: str, tmp_path: Path) -> None:
    config = tiny(f"method={method}", "optim.name=lars")
    assert pretrain(config, tmp_path, display=silent()).step == 2
    state = last(tmp_path)
    numbers = [t for t in tensors(state).values() if isinstance(t, Tensor)]
    assert all(t.isfinite().all() for t in numbers if t.is_floating_point())
    assert all(math.isfinite(line["loss"]) for line in journal(tmp_path) if "loss" in line)
    run = started(config, tmp_path)
    for name, part in run._parts().items():
        assert differences(part.state_dict(), state[name]) == [], name
    assert (run.step, run.attempt, run.accuracy) == (2, 0, state["accuracy"])
    run.save()
    run.close()
    assert differences(last(tmp_path), state) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_every_optimizer_updates_all_weights_and_resumes(name: str, tmp_path: Path) -> None:
    """5 steps equal 2 + 3 resumed steps. Momentum, AdamW moments and step counts are restored."""
    config = tiny("method=simclr", f"optim.name={name}", "train.steps=5")
    pretrain(config, tmp_path / "whole", display=silent())
    run = started(config, tmp_path / "run")
    fresh = {name: p.clone() for name, p in run.method.named_parameters()}
    for _ in range(2):  # in step 1, zero-initialized residual branches have no gradient
        one_step(run)
    assert all(not torch.equal(p, fresh[name]) for name, p in run.method.named_parameters())
    run.save()
    run.close()
    pretrain(config, tmp_path / "run", display=silent())
    state, whole = last(tmp_path / "run"), last(tmp_path / "whole")
    for part in ("learner", "optimizer", "probe_optimizer"):
        assert differences(state[part], whole[part]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_restored_moments_have_the_strides_of_their_weights(name: str, tmp_path: Path) -> None:
    """torch falls back to a per-tensor loop if strides differ, and a file stores no strides."""
    config = tiny("method=simclr", f"optim.name={name}")
    pretrain(config, tmp_path, display=silent())
    run = started(config, tmp_path)
    assert any(not p.is_contiguous() for p in run.method.parameters())
    state = run.optimizer.state
    pairs = [(p, m) for p in state for m in state[p].values() if getattr(m, "ndim", 0)]
    assert len(pairs) == len(state) * (2 if name == "adamw" else 1)
    assert all(m.stride() == p.stride() for p, m in pairs)
    run.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_only_step_counts_are_restored_to_the_cpu(tmp_path: Path) -> None:
    """torch's "meta" replaces a GPU, where AdamW would synchronize on the count in every step."""
    changes = ("optim.name=adamw", "bottleneck.target_residual=1", "train.log_every=3")
    run = started(tiny("method=c-byol", *changes, "train.steps=6"), tmp_path)
    one_step(run)
    run.save()
    run.device, probe = torch.device("meta"), run.learner.to("meta").probe
    run.optimizer = build_optimizer(run.config.optim, run.method)
    assert probe is not None
    assert run.controller is not None
    run.probe_optimizer = torch.optim.AdamW(probe.parameters())
    run.controller.beta = run.controller.beta.to("meta")
    run.logger.close()
    run.restore()
    found = tensors({name: part.state_dict() for name, part in run._parts().items()})
    kinds = {name: leaf.device.type for name, leaf in found.items() if isinstance(leaf, Tensor)}
    counts = {name for name in kinds if name.endswith(".step")}
    assert {name for name, kind in kinds.items() if kind == "cpu"} == counts
    assert {name.split(".")[0] for name in counts} == {"optimizer", "probe_optimizer"}
    assert {"controller.sum", "metrics.groups.0.sum"} <= kinds.keys()
    run.close()


def by_hand(config: Config, steps: int) -> dict[str, Tensor]:
    """Return BYOL's learner after `steps` explicit steps of SGD with momentum.

    The gradient of a step is the mean of the gradients of its microbatch losses.
    """
    source = load_source(config)
    assert source.labels is not None
    held = held_out_labels(len(source), config.probe.holdout, config.seed)
    visible = source.labels.masked_fill(held, -1)
    side = canvas_side(source, config.views.size)
    loader = Resident(source, side=side, device="cpu")
    torch.manual_seed(config.seed)
    learner: Any = Learner(build(config), int(source.labels.max()) + 1)
    learner.to(memory_format=torch.channels_last)
    # Rounding must be that of the run: batch norms of four images amplify it.
    speed_up_convolutions(learner, torch.device("cpu"))
    views = view_maker(config, torch.float32, compiled=False)
    parts = config.train.grad_accum_steps
    portions = batch_index_stream(
        len(source), config.train.batch_size, seed=config.seed, portions=parts
    )
    batches = loader.batches(portions)
    weights = {n: p for n, p in learner.named_parameters() if p.requires_grad}
    probe = torch.optim.AdamW(learner.probe.parameters(), config.probe.lr)
    momenta = {name: torch.zeros_like(p) for name, p in weights.items()}
    for step in range(steps):
        seed_step(config.seed, 0, step)
        grads = {name: torch.zeros_like(p) for name, p in weights.items()}
        for _ in range(parts):
            batch = next(batches)
            shown, probe_loss = learner(views(batch), torch.zeros(()), visible[batch.index])
            found = torch.autograd.grad(shown.loss + probe_loss, list(weights.values()))
            for name, grad in zip(weights, found, strict=True):
                grads[name] += grad / parts
        lr = 0.5 * (1 + math.cos(math.pi * step / config.train.steps))
        lr *= config.optim.lr * config.train.batch_size / 256
        for name, p in weights.items():
            if name.startswith("probe."):
                p.grad = grads[name]
                continue
            decay = config.optim.weight_decay if p.ndim > 1 else 0.0
            momenta[name].mul_(config.optim.momentum).add_(grads[name] + decay * p.detach())
            p.data -= lr * momenta[name]
        probe.step()
        tau = 1 - (1 - config.target.ema_decay) * 0.5 * (
            1 + math.cos(math.pi * step / config.train.steps)
        )
        online = [*learner.method.encoder.parameters(), *learner.method.projection.parameters()]
        for slow, fast in zip(learner.method.target.network.parameters(), online, strict=True):
            slow.data = tau * slow + (1 - tau) * fast.data
    return learner.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_run_matches_plain_loop_over_microbatches(accumulate: int, tmp_path: Path) -> None:
    """Tolerance 1e-4 of a tensor's norm: float32 sums in another order over 3 batch-norm steps."""
    changes = ["method=byol", "optim.lr=0.5", "optim.weight_decay=0.01", "train.steps=3"]
    config = tiny(*changes, f"train.grad_accum_steps={accumulate}")
    pretrain(config, tmp_path, display=silent())
    found, expected = last(tmp_path)["learner"], by_hand(config, 3)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        gap = (found[name].double() - tensor.double()).norm()
        assert gap <= 1e-4 * tensor.double().norm() + 1e-7, name


@pytest.mark.slow
def test_gradient_accumulation_changes_batch_norm_statistics(tmp_path: Path) -> None:
    """Batch norm sees one microbatch, so accumulation changes the result."""
    found = []
    for accumulate in (1, 2):
        config = tiny("method=byol", f"train.grad_accum_steps={accumulate}")
        pretrain(config, tmp_path / str(accumulate), display=silent())
        found.append(last(tmp_path / str(accumulate))["learner"]["method.projection.0.weight"])
    assert (found[0] - found[1]).norm() > 1e-3 * found[0].norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "total"),
    [
        (["train.steps=0", "train.epochs=1"], 40 // 8 + 1),  # one more than the full batches
        (["train.steps=0", "train.epochs=3", "train.batch_size=16"], 120 // 16 + 1),
        (["train.steps=7", "train.epochs=3"], 7),  # train.steps takes precedence over train.epochs
        (["train.steps=3", "train.batch_size=64"], 3),  # a batch may exceed the dataset
    ],
)
def test_total_steps_follow_from_epochs_or_steps(
    changes: list[str], total: int, tmp_path: Path
) -> None:
    run = started(tiny(*changes), tmp_path)
    assert run.total == total
    run.close()


def test_warmup_longer_than_the_run_is_cut_to_a_tenth(tmp_path: Path) -> None:
    display = Written()
    run = started(tiny("optim.warmup_epochs=10", "train.steps=30"), tmp_path, display=display)
    run.close()
    assert run.schedule.warmup == 3
    assert any("warm-up" in line and " 3 steps" in line for line in run.notes)


@pytest.mark.slow
def test_long_warmup_and_oversized_batch_print_a_note(tmp_path: Path) -> None:
    """40 images make 5 steps per epoch."""
    display = Written()
    run = started(
        tiny("optim.warmup_epochs=2.4", "train.steps=20"), tmp_path / "a", display=display
    )
    run.close()
    assert run.schedule.warmup == 12
    note, *_ = run.notes
    assert "60%" in note
    assert "optim.warmup_epochs=0.4" in note
    assert display.said == ["decoding  100%"]
    display = Written()
    changes = ("optim.warmup_epochs=0.5", "train.steps=8", "train.batch_size=64")
    run = started(tiny(*changes), tmp_path / "b", display=display)
    run.close()
    note, *_ = run.notes
    assert re.search(r"train\.batch_size is 64 .* 40 images.*train\.batch_size=32", note)


@pytest.mark.parametrize(("compile", "processes"), [("auto", 1), ("no", 1), ("yes", 2)])
def test_activation_checkpointing_needs_compile_and_one_process(
    compile: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "world_size", lambda: processes)
    config = tiny(
        "train.activation_checkpointing=true", f"train.compile={compile}", "train.device=cpu"
    )
    with pytest.raises(
        ValueError, match=r"^train\.activation_checkpointing=true .*train\.compile=yes"
    ):
        pretrain(config, tmp_path / "run", display=silent())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_activation_checkpointing_wraps_only_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target network has no gradient and needs no recomputation."""
    # Replace compilation: it turns off torch's argument checks of distributions for the whole
    # process.
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for setting in ("true", "false"):
        changes = (
            f"train.activation_checkpointing={setting}",
            "train.compile=yes",
            "train.device=cpu",
        )
        run = Run(tiny("method=byol", *changes), tmp_path / setting, silent(), resume=True)
        changed = [name for name, part in run.learner.named_modules() if "forward" in vars(part)]
        assert changed == ["method.encoder"] * (setting == "true")
        run.close()


def test_unknown_network_is_rejected_before_images_are_read(tmp_path: Path) -> None:
    class FailsOnProgress(Display):
        def progress(self, *_: Any, **__: Any) -> None:
            raise AssertionError("images are read")

    with pytest.raises(ValueError, match="resnet19"):
        pretrain(tiny("network.name=resnet19"), tmp_path / "a", display=FailsOnProgress(quiet=True))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("batch", [7, 4])
def test_indivisible_batch_is_rejected_and_leaves_no_folder(batch: int, tmp_path: Path) -> None:
    """4 images in 4 microbatches are one image each, which has no batch statistics."""
    with pytest.raises(ValueError, match=r"^train\.(batch_size|grad_accum_steps)\b"):
        pretrain(
            tiny("method=byol", f"train.batch_size={batch}", "train.grad_accum_steps=4"),
            tmp_path / "a",
        )
    assert not (tmp_path / "a").exists()


# Schedules


@pytest.mark.slow
def test_late_metrics_are_logged_with_their_own_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, metrics arrive late; here none arrive before the next ones are sent."""
    config = tiny("train.steps=6", "probe.every_epochs=1000")
    pretrain(config, tmp_path / "at once", display=silent())
    collect = AsyncMetrics.poll

    def late(self: AsyncMetrics, *, wait: bool = False) -> Reading | None:
        return collect(self, wait=wait) if wait or len(self._sent) > 1 else None

    monkeypatch.setattr(AsyncMetrics, "poll", late)
    pretrain(config, tmp_path / "late", display=silent())
    rates = [[line.get("lr") for line in journal(tmp_path / out)] for out in ("at once", "late")]
    assert rates[0] == rates[1]
    assert len({*rates[0]} - {None}) == 6


def test_learning_rate_and_ema_decay_follow_their_formulas(tmp_path: Path) -> None:
    """Warm-up takes 2 epochs of 2 steps, then half a cosine; the EMA decay reaches 1 at the end."""
    config = tiny(
        "method=byol",
        "optim.warmup_epochs=2",
        "optim.lr=0.3",
        "target.ema_decay=0.9",
        "train.batch_size=20",
        "train.steps=7",
    )
    run = started(config, tmp_path)
    peak = 0.3 * 20 / 256
    for step in range(7):
        method: Any = run.method
        target = method.target
        assert target is not None
        slow = [p.clone() for p in target.network.parameters()]
        one_step(run)
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 4) / 3))
        lr = peak * step / 4 if step < 4 else peak * cosine
        assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([lr] * 2)
        tau = 1 - 0.1 * 0.5 * (1 + math.cos(math.pi * step / 7))
        fast = [*method.encoder.parameters(), *method.projection.parameters()]
        for before, now, quick in zip(slow, target.network.parameters(), fast, strict=True):
            torch.testing.assert_close(now, tau * before + (1 - tau) * quick)
    run.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["method=c-byol", "bottleneck.beta=0.7"], [0.7] * 10),
        (
            ["method=c-byol", "bottleneck.schedule=linear", "bottleneck.warmup_epochs=1"],
            [0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1],
        ),
        (
            ["method=c-byol", "bottleneck.schedule=cosine", "bottleneck.beta=2"],
            [1 - math.cos(math.pi * step / 10) for step in range(10)],
        ),
        (["method=byol", "bottleneck.beta=0.7"], [0.0] * 10),
    ],
    ids=["constant", "linear", "cosine", "uncompressed"],
)
def test_beta_reaches_the_loss(changes: list[str], expected: list[float], tmp_path: Path) -> None:
    """loss = nll + beta * residual, averaged over images and summed over both directions."""
    run = started(tiny(*changes, "train.steps=10"), tmp_path)
    for beta in expected[:6]:
        step = one_step(run)
        assert run.beta.item() == pytest.approx(beta, abs=1e-7)
        charged = 0 if step.residual is None else beta * step.residual.item()
        assert step.loss.item() == pytest.approx(2 * (step.nll.item() + charged), rel=1e-5)
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize(("target", "way"), [(0.01, 1), (1000.0, -1)])
def test_beta_moves_toward_the_target_residual(target: float, way: int, tmp_path: Path) -> None:
    """Beta rises while the reducible residual exceeds the target, falls while it is below."""
    config = tiny("method=c-simclr", f"bottleneck.target_residual={target}", "train.steps=20")
    run = started(config, tmp_path)
    betas = [run.beta.item()]
    assert betas == [1.0]
    for _ in range(4):
        step = one_step(run)
        nll = step.nll.item() - math.log(2 * 8 - 1)  # K = 2B - 1 candidates
        assert step.residual is not None
        loss = 2 * (nll + betas[-1] * step.residual.item())
        assert step.loss.item() == pytest.approx(loss, rel=1e-4)
        betas.append(run.beta.item())
    assert betas == sorted(betas, reverse=way < 0)
    assert len(set(betas)) == 5
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "rises"),
    [
        (["method=c-simclr"], False),
        (["method=c-byol", "train.grad_accum_steps=2"], False),
        (["method=c-byol", "bottleneck.target_residual=0.01"], True),
    ],
    ids=["contrastive", "accumulated", "steered"],
)
def test_adaptive_run_logs_its_effective_beta(
    changes: list[str], rises: bool, tmp_path: Path
) -> None:
    """Beta is still scheduled or controlled; the effective beta is between 0 and beta."""
    pretrain(
        tiny(*changes, "bottleneck.schedule=adaptive", "train.steps=3"), tmp_path, display=silent()
    )
    lines = [line for line in journal(tmp_path) if "loss" in line]
    for line in lines:
        low, middle, high = (line[f"effective_beta_p{q}"] for q in (10, 50, 90))
        assert 0 < low <= middle <= high <= line["beta"] * (1 + 1e-6)
        assert 0 < line["effective_beta"] < line["beta"]
    betas = [line["beta"] for line in lines]
    assert betas[0] == 1
    assert (betas[0] < betas[1] < betas[2]) if rises else (betas[0] == betas[1] == betas[2])


def test_noise_depends_on_seed_attempt_and_step() -> None:
    def draw(seed: int, attempt: int, step: int) -> tuple[float, ...]:
        seed_step(seed, attempt, step)
        return tuple(torch.randn(4).tolist())

    cases = [(s, a, t) for s in (0, 1, 11) for a in (0, 1) for t in (0, 1, 11)]
    first = {case: draw(*case) for case in cases}
    assert len(set(first.values())) == len(cases)
    random.Random(0).shuffle(cases)
    assert all(draw(*case) == first[case] for case in cases)


# Divergence and collapse


def test_diverged_run_restarts_then_fails_with_a_reason(tmp_path: Path) -> None:
    config = tiny("method=simclr", "optim.lr=1e9", "health.max_restarts=2", "train.steps=30")
    display = Written()
    with pytest.raises(TrainingFailed, match=r"2 restarts: nan.* optim\.lr"):
        pretrain(config, tmp_path, display=display)
    returns = [line for line in display.said if "restarting" in line and "checkpoint" in line]
    assert len(returns) == 2
    state = last(tmp_path)
    assert state["step"] == 0
    assert all(t.isfinite().all() for t in tensors(state["learner"]).values())
    lines = [line for line in journal(tmp_path) if "loss" in line]
    assert lines[-1]["loss"] is None  # JSON has no NaN
    assert lines[-1]["health"].startswith("nan")


@pytest.mark.slow
def test_nonfinite_weights_are_never_saved(tmp_path: Path) -> None:
    """The loss is finite in the step that ruins the weights, and a save is due immediately."""
    changes = ["optim.lr=1e40", "health.max_restarts=1", "train.steps=30", "train.save_every=1e-9"]
    with pytest.raises(TrainingFailed, match="1 restarts: nan"):
        pretrain(tiny("method=simclr", *changes), tmp_path / "a", display=silent())
    assert all(t.isfinite().all() for t in tensors(last(tmp_path / "a")["learner"]).values())
    run = started(tiny("method=simclr", *changes), tmp_path / "b")
    loss = one_step(run).loss
    assert loss.isfinite()
    assert loop.finish(run).step == 1
    run.close()
    assert last(tmp_path / "b")["step"] == 0


def test_nonfinite_weights_after_the_last_step_fail(tmp_path: Path) -> None:
    changes = ["optim.lr=1e40", "health.max_restarts=0", "train.steps=1"]
    with pytest.raises(TrainingFailed, match="weights or moments not finite"):
        pretrain(tiny("method=simclr", *changes), tmp_path, display=silent())
    assert last(tmp_path)["step"] == 0


@pytest.mark.slow
def test_collapse_stops_the_run_with_a_reason(tmp_path: Path) -> None:
    """10 times the spread of uniform directions is unreachable, so every run has collapsed."""
    saving = ("train.save_every=1e-9", "health.max_restarts=1", "train.steps=20")
    config = tiny("method=c-byol", "health.collapse_std=10", *saving)
    with pytest.raises(
        TrainingFailed,
        match=r"1 restarts: collapse.* bottleneck\.beta",
    ):
        pretrain(config, tmp_path, display=silent())
    assert [line["step"] for line in journal(tmp_path) if "loss" in line] == [1, 2, 3]
    assert last(tmp_path)["step"] == 0  # nothing is saved while a collapse is suspected


@pytest.mark.slow
def test_restart_restores_state_and_reshuffles(tmp_path: Path) -> None:
    run = started(tiny("method=c-byol", "bottleneck.target_residual=1", "train.steps=9"), tmp_path)
    for _ in range(2):
        one_step(run)
    run.save()
    state, order = last(tmp_path), next(run.batches()).index
    for _ in range(2):
        one_step(run)
    assert differences(run.learner.state_dict(), state["learner"])
    loop.restart(run, HealthStatus("nan", "nan: for a test"))
    assert (run.step, run.attempt) == (2, 1)
    for name, part in run._parts().items():
        assert differences(part.state_dict(), state[name]) == [], name
    assert not torch.equal(next(run.batches()).index, order)
    one_step(run)
    run.save()
    run.close()
    again = started(run.config, tmp_path)  # the attempt is part of the saved state
    assert (again.step, again.attempt) == (3, 1)
    again.close()


# Custom sources and methods


class Gray:
    """Images of one gray level each."""

    name, classes, labels = "gray", ("dark", "light"), torch.arange(12) % 2

    def __len__(self) -> int:
        return 12

    def image(self, i: int) -> Tensor:
        return torch.full((3, 9, 9), 20 * i, dtype=torch.uint8)

    def origin(self, i: int) -> str:
        return f"gray:{i}"


def test_custom_source_and_method_are_trained(tmp_path: Path) -> None:
    built: list[Method] = []

    def method(config: Config) -> Method:
        built.append(build(replace(config, method="byol")))
        return built[-1]

    run = Run(
        tiny("method=simclr", "train.batch_size=4", "probe.holdout=0.2", "data.source=builtin"),
        tmp_path,
        silent(),
        resume=False,
        source=Gray(),
        method=method,
    )
    run.restore()
    assert run.method is built[0]
    assert run.learner.probe is not None
    assert read_config(tmp_path).data.source == "python:gray"
    batch = next(run.batches())
    levels = batch.images.flatten(1).float().mean(1)
    assert torch.equal(levels, 20.0 * batch.index)
    one_step(run)
    run.close()


# The run folder


@pytest.mark.slow
def test_run_folder_has_the_documented_files(tmp_path: Path) -> None:
    config = tiny("method=c-simclr", "train.tensorboard=true", "train.log_every=2")
    outcome = pretrain(config, tmp_path / "a" / "b", display=silent())
    assert outcome.folder == tmp_path / "a" / "b"
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "tensorboard",
        "checkpoints",
        "encoder.safetensors",
    }
    assert read_config(outcome.folder) == config
    assert [path.name for path in checkpoint.steps(outcome.folder / "checkpoints")] == [
        "step_00000000.safetensors",
        "step_00000002.safetensors",
    ]
    assert list((outcome.folder / "tensorboard").glob("events.out.tfevents.*"))
    text = (outcome.folder / "metrics.jsonl").read_text()
    _, first, second = map(json.loads, text.splitlines())
    for name in (
        "loss",
        "nll",
        "residual",
        "reducible_residual",
        "predictive",
        "positive_cosine",
        "beta",
    ):
        assert isinstance(first[name], float), name
    assert not any("effective" in name for name in first)
    assert {
        "lr",
        "health",
        "images_per_second",
        "data_wait_fraction",
        "embedding_std",
    } <= first.keys()
    assert outcome.accuracy is not None
    assert second == {
        "step": 2,
        "probe_accuracy": outcome.accuracy.probe,
        "knn_accuracy": outcome.accuracy.neighbors,
    }


def test_rerun_of_a_finished_run_changes_nothing(short: Path) -> None:
    before, lines = last(short), journal(short)
    outcome = pretrain(tiny(*SHORT), short, display=silent())
    assert outcome.step == outcome.total
    assert outcome.accuracy == before["accuracy"]
    assert differences(last(short), before) == []
    assert journal(short) == lines


@pytest.mark.slow
def test_unreadable_images_are_listed_and_skipped(tmp_path: Path) -> None:
    images = photos(tmp_path / "images", 12)
    (images / "002.png").write_bytes(b"not an image")
    whole = (images / "005.png").read_bytes()
    (images / "005.png").write_bytes(whole[: len(whole) // 2])
    for resident in ("yes", "no"):
        config = tiny(f"data.source={images}", f"data.cache_on_device={resident}", "train.steps=3")
        out = tmp_path / resident
        outcome = pretrain(config, out, display=(display := Written()))
        assert outcome.step == 3
        assert outcome.accuracy is None  # a flat folder has no labels
        listed = str(out / "unreadable.txt")
        assert any("2 unreadable images" in line and listed in line for line in display.said)
        assert "".join(display.said).count("unreadable images") == 1
        listed = (out / "unreadable.txt").read_text().splitlines()
        assert [line.split(": ")[0] for line in listed] == [
            str(images / "002.png"),
            str(images / "005.png"),
        ]
        assert all(line.split(": ", 1)[1] for line in listed)
    state, streamed = last(tmp_path / "yes"), last(tmp_path / "no")
    assert differences(state, streamed) == []  # cached and streamed images are equal


@pytest.mark.slow
def test_unreadable_images_stay_listed_after_resume(tmp_path: Path) -> None:
    images = photos(tmp_path / "images", 12)
    bad = [images / "002.png", images / "004.png", images / "007.png"]
    whole = [path.read_bytes() for path in bad]
    config, listed = tiny(f"data.source={images}"), tmp_path / "run" / "unreadable.txt"
    for unread in ((0, 1), (0, 2), (0, 2)):
        for i, path in enumerate(bad):
            path.write_bytes(b"broken" if i in unread else whole[i])
        run = started(config, tmp_path / "run")
        run.save()
        run.close()
    lines = listed.read_text().splitlines()
    assert sorted(line.split(": ")[0] for line in lines) == list(map(str, bad))


@pytest.mark.slow
def test_resume_with_different_images_of_equal_count_is_rejected(tmp_path: Path) -> None:
    """The same images may have moved, and a few may have become unreadable."""
    images, out = photos(tmp_path / "images", 20), tmp_path / "run"
    pretrain(tiny(f"data.source={images}", "train.steps=1"), out, display=silent())
    moved = shutil.copytree(images, tmp_path / "moved")
    (moved / "000.png").write_bytes(b"broken")
    assert pretrain(tiny(f"data.source={moved}", "train.steps=1"), out, display=silent()).step == 1
    for i in range(20):
        shutil.copy(images / f"{i:03d}.png", moved / f"{19 - i:03d}.png")
    message = f"{out} .* 20 .*{moved}"
    with pytest.raises(ValueError, match=message):
        pretrain(tiny(f"data.source={moved}", "train.steps=1"), out, display=silent())


def test_resume_with_added_images_is_rejected(tmp_path: Path) -> None:
    images, out = photos(tmp_path / "images", 9), tmp_path / "run"
    config = tiny(f"data.source={images}")
    pretrain(config, out, display=silent())
    photos(images, 10)
    message = f"{out} .* 9 .*{images} .*10.*--out"
    with pytest.raises(ValueError, match=message):
        pretrain(config, out, display=silent())


def test_no_held_out_labels_means_no_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No features are computed then."""
    monkeypatch.setattr(online_eval, "features", None)
    config = tiny("probe.holdout=0", "method=simclr")
    assert pretrain(config, tmp_path, display=silent()).accuracy is None
    assert "probe_loss" in journal(tmp_path)[-1]


def test_held_out_labels_never_reach_the_probe(tmp_path: Path) -> None:
    """A tenth of the labels is hidden from the probe; all its other labels are the true ones."""
    run = started(tiny("data.limit=200"), tmp_path)
    assert run.labels is not None
    assert 5 <= int(run.held_out.sum()) <= 40
    assert (run.visible_labels[run.held_out] == -1).all()
    assert torch.equal(run.visible_labels[~run.held_out], run.labels[~run.held_out])
    run.close()


# Several processes


def joined(state: dict[str, Any], part: str, ends: tuple[str, ...]) -> Tensor:
    """Return all matching weights of method or probe as one vector."""
    names = [n for n in sorted(state) if n.startswith(part) and n.endswith(ends)]
    return torch.cat([state[name].double().flatten() for name in names])


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_match_one(tmp_path: Path) -> None:
    """Train SimCLR with SGD for 3 steps: 8 images in each of two torchrun processes, 16 in one.

    Weights agree to 1e-4, and to 1 % of their change in training. They are not equal, because
    float32 sums over a batch are split in two: over 3 steps of such small batch norms a change of
    the initial weights by 1e-7 grows to 6e-5, or 1.4e-4 of their change. torch 2.11 on ARM differs
    by 3e-4, so the tolerance is wider there. The probe's weights start at 0 and AdamW's first steps
    amplify small gradients, so only the 1 % of the change applies to them. Only rank 0 prints.
    """
    wider = 5 if torch.__version__ < "2.12" and platform.machine() == "aarch64" else 1
    one, two = tmp_path / "one", tmp_path / "two"
    config = tiny("method=simclr", "train.steps=3", "train.batch_size=16", "views.size=32")
    pretrain(config, one, display=silent())
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launch, *command(config, two)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("encoder: ") == 1
    begun = checkpoint.load(one / "checkpoints" / "step_00000000.safetensors")["learner"]
    found, expected = last(two)["learner"], last(one)["learner"]
    assert found.keys() == expected.keys()
    for part in ("method.", "probe."):
        for ends in (("weight", "bias"), ("running_mean", "running_var")):
            first, b, a = (joined(state, part, ends) for state in (begun, found, expected))
            assert part == "probe." or (a - b).norm() < wider * 1e-4 * a.norm()
            assert (a - b).norm() < 1e-2 * (a - first).norm(), (part, ends)
    for mine, theirs in zip(journal(one), journal(two), strict=True):
        assert mine["step"] == theirs["step"]
        if "loss" in mine:
            precise = 1e-5 if mine["step"] == 1 else wider * 1e-3  # later, weights differ
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=precise)


def restores(rank: int, folder: Path, sees: int) -> None:
    """Restore a run; processes other than rank 0 see only the first `sees` checkpoints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    every = checkpoint.steps
    checkpoint.steps = lambda folder: every(folder)[: None if rank == 0 else sees]
    try:
        started(tiny("train.steps=9"), folder / "run").close()
        said = "nothing"
    except ValueError as error:
        said = str(error)
    (folder / f"{rank}.txt").write_text(said)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("sees", "words"), [(2, "nothing"), (1, "step 3, step 0;")])
def test_processes_resume_from_the_same_checkpoint_or_fail(
    sees: int, words: str, tmp_path: Path
) -> None:
    """On a network file system, the file list may be stale on one machine."""
    run = started(tiny("train.steps=9"), tmp_path / "run")
    for _ in range(3):
        one_step(run)
    run.save()
    run.close()
    together(restores, (tmp_path, sees), 2)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert words in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("labeled", [False, True])
def test_run_prints_a_summary_of_its_settings(tmp_path: Path, labeled: bool) -> None:
    for name in ("cat", "dog") if labeled else (".",):
        photos(tmp_path / "photos" / name, 24)
    display, count = Written(), 48 if labeled else 24
    config = tiny(f"data.source={tmp_path / 'photos'}", "train.steps=1")
    pretrain(config, tmp_path / "run", display=display)
    held = int(held_out_labels(count, config.probe.holdout, config.seed).sum())
    classes = f" in 2 classes ({held} labels held out)" if labeled else ""
    assert display.said[1] == (
        f"{config.method} on {count} images{classes}: {config.network.name}, "
        f"{config.views.size}-pixel views, batch {config.train.batch_size}, 1 steps, cpu, float32"
    )


@pytest.mark.slow
def test_throughput_counts_images_with_accumulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 steps per second of 8 images, in two microbatches each."""
    monkeypatch.setattr(
        Throughput, "update", lambda self, *_: setattr(self, "steps_per_second", 3.0)
    )
    pretrain(tiny("method=byol", "train.grad_accum_steps=2"), tmp_path, display=silent())
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"images_per_second": 24.0' in text


class Seen(Display):
    """A display that records its readings."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.readings: dict[str, str] = {}

    def progress(
        self, title: str, done: float, total: float, readings: Any = None, *, unit: str = ""
    ) -> None:
        self.readings = dict(readings or {})


def test_progress_line_shows_each_metric_with_its_name(tmp_path: Path) -> None:
    display = Seen()
    run = started(tiny(), tmp_path, display=display)
    run.accuracy = Accuracy(probe=0.25, neighbors=0.75, count=8)
    run.throughput.data_wait_fraction = 0.125
    means = {"loss": 1.5, "reducible_residual": 2.25, "residual": 180.0}
    log._show(run, Reading(1, means), 1234.0, HealthStatus("ok", ""))
    assert display.readings == {
        "": "1,234 img/s",
        "loss": "1.50",
        "kNN": "75.0%",
        "reducible_residual": "2.25",
        "residual": "180.0",
        "wait": "12%",
    }
    run.close()


def test_online_evaluation_uses_the_probe_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def accuracy(*_: Any, **more: Any) -> Accuracy:
        asked.update(more)
        return Accuracy(probe=0.25, neighbors=0.75, count=8)

    monkeypatch.setattr(log, "online_accuracy", accuracy)
    changes = ("probe.neighbors=3", "probe.bank=17", "views.antialias=true")
    outcome = pretrain(tiny(*changes), tmp_path, display=silent())
    assert outcome.accuracy == (0.25, 0.75, 8)
    assert (asked["neighbors"], asked["bank"], asked["size"], asked["antialias"]) == (
        3,
        17,
        16,
        True,
    )
    (line,) = [line for line in journal(tmp_path) if "probe_accuracy" in line][-1:]
    assert (line["probe_accuracy"], line["knn_accuracy"]) == (0.25, 0.75)


def test_online_evaluation_runs_twenty_times_or_every_n_epochs() -> None:
    """200 steps of 8 of 40 images: 5 steps per epoch."""
    schedule = Schedule(tiny("train.steps=200", "probe.every_epochs=0", "train.log_every=5"), 40)
    assert schedule.evaluate_every == 10
    log_steps = [step for step in range(1, 201) if schedule.is_time_to_log(step)]
    assert log_steps == [*range(5, 201, 5)]
    evaluated = [step for step in log_steps if schedule.is_time_to_evaluate(step)]
    assert evaluated == [*range(10, 201, 10)]
    assert Schedule(tiny("train.steps=200", "probe.every_epochs=3"), 40).evaluate_every == 15
    assert Schedule(tiny("train.steps=8000", "probe.every_epochs=0"), 40).evaluate_every == 400


def test_two_images_suffice_and_black_is_not_unreadable() -> None:
    assert len(images.load_source(tiny("data.limit=2"))) == 2
    with pytest.raises(ValueError, match=r"has 1 image.* 2 "):
        images.load_source(tiny("data.limit=1"))
    black, unreadable, gray = torch.zeros(1, 3), -torch.ones(1, 3), torch.full((1, 3), 128.0)
    assert images.are_others(black, gray)
    assert not images.are_others(black, unreadable)


@pytest.mark.slow
def test_metrics_are_logged_about_ten_times_per_epoch() -> None:
    """Batches of 8; at most once per step and at least once every 50 steps."""
    steps = {40: 1, 800: 10, 1600: 20, 80_000: 50}  # by number of images
    for count, every in steps.items():
        assert Schedule(tiny("train.batch_size=8", "train.log_every=0"), count).log_every == every


@pytest.mark.parametrize("seed", [0, 1])
def test_limited_dataset_is_drawn_by_the_seed(seed: int) -> None:
    source = load_source(tiny("data.limit=6", f"seed={seed}"))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:6].sort().values
    whole = load_source(tiny())
    assert [source.origin(i) for i in range(6)] == [whole.origin(int(i)) for i in order]


@pytest.mark.parametrize(("steps", "horizon"), [(100, 10), (1000, 20), (40_000, 200)])
def test_controller_horizon_is_a_fiftieth_of_the_run(
    steps: int, horizon: int, tmp_path: Path
) -> None:
    config = tiny("method=c-simclr", "bottleneck.target_residual=0.5", f"train.steps={steps}")
    run = started(config, tmp_path)
    assert run.controller is not None
    assert run.controller._horizon == horizon
    run.close()


@pytest.mark.slow
def test_encoder_stores_the_antialias_setting(tmp_path: Path) -> None:
    pretrain(tiny("views.antialias=true"), tmp_path, display=silent())
    assert encoder.load(tmp_path).antialias


@pytest.mark.slow
def test_health_state_survives_resume(tmp_path: Path) -> None:
    """The state has recent losses for spike detection and two of the three low readings."""
    run = started(tiny(), tmp_path)
    run.health.load_state_dict({"losses": [1.0, 2.0, 3.0], "was_wide": True, "low": 2})
    run.save()
    run.close()
    again = started(tiny(), tmp_path)
    assert again.health.state_dict() == {"losses": [1.0, 2.0, 3.0], "was_wide": True, "low": 2}
    again.close()


@pytest.mark.slow
def test_logged_learning_rate_belongs_to_its_step(tmp_path: Path) -> None:
    """Half a cosine over 4 steps from 0.32 * 8 / 256 at batch 8: times 1, 0.854, 0.5, 0.146."""
    pretrain(tiny("train.steps=4", "optim.lr=0.32"), tmp_path, display=silent())
    found = [line["lr"] for line in journal(tmp_path) if "lr" in line]
    shares = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert found == pytest.approx([0.01 * share for share in shares])


def test_warmup_as_long_as_the_run_is_cut_to_a_tenth() -> None:
    """The warm-up is two epochs of five steps; the run has ten steps."""
    found = Schedule(tiny("optim.warmup_epochs=2", "train.steps=10"), 40)
    assert found.warmup == 1
    assert found.lr(9) > 0


def test_unlabeled_images_are_not_counted_as_a_class(tmp_path: Path) -> None:
    whole = load_source(tiny())
    assert whole.labels is not None
    labels = whole.labels.clone()
    labels[::3] = -1
    source = ImageSource(
        name="a",
        count=40,
        read=whole.image,
        place=whole.origin,
        labels=labels,
        classes=whole.classes,
    )
    display = Written()
    pretrain(tiny("train.steps=1"), tmp_path, display=display, source=source)
    assert any(" on 40 images in 5 classes (" in text for text in display.said)


@pytest.mark.slow
def test_accumulated_step_logs_and_controls_by_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 16 images in 4 microbatches: each line has their mean, and beta follows it."""
    portions: list[tuple[float, float]] = []
    steered: list[float] = []
    add_metrics, update = loop.add_metrics, Controller.update

    def seen(run: Run, step: Step, probe_loss: Tensor) -> None:
        assert step.reducible_residual is not None
        portions.append((step.loss.item(), step.reducible_residual.item()))
        add_metrics(run, step, probe_loss)

    def recorded_update(self: Controller, reducible_residual: Tensor) -> None:
        steered.append(reducible_residual.item())
        update(self, reducible_residual)

    monkeypatch.setattr(loop, "add_metrics", seen)
    monkeypatch.setattr(Controller, "update", recorded_update)
    changes = (
        "train.batch_size=16",
        "train.grad_accum_steps=4",
        "train.steps=3",
        "train.log_every=1",
    )
    pretrain(tiny(*STEERED, *changes), tmp_path, display=silent())
    means = np.array(portions).reshape(3, 4, 2).mean(1)
    assert np.ptp(np.array(portions).reshape(3, 4, 2), axis=1).min() > 0  # the microbatches differ
    lines = [line for line in journal(tmp_path) if "loss" in line]
    found = [(line["loss"], line["reducible_residual"]) for line in lines]
    assert found == pytest.approx(means, rel=1e-6)  # float32 sums
    assert steered == pytest.approx(means[:, 1], rel=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
def test_beta_warmup_longer_than_the_run_is_cut_to_a_tenth(schedule: str) -> None:
    """10 epochs of 5 steps exceed the run's 40 steps; uncut, it would end at 0.8 of beta."""
    rising = ("method=c-simclr", f"bottleneck.schedule={schedule}", "bottleneck.warmup_epochs=10")
    short = Schedule(tiny(*rising, "bottleneck.beta=1", "train.steps=40"), 40)
    assert len(short.notes) == 1
    assert "4 steps" in short.notes[0]
    assert [short.beta(step) for step in (0, 2, 4, 39)] == [0.0, 0.5, 1.0, 1.0]
    half = Schedule(tiny(*rising, "bottleneck.beta=1", "train.steps=80"), 40)
    (note,) = half.notes
    assert re.search(r"beta .*62%.* bottleneck\.warmup_epochs=1\.6", note)
    assert half.beta(25) == 0.5
    for steps, said in ((99, 1), (100, 0)):  # more than half of the run is noted
        assert len(Schedule(tiny(*rising, f"train.steps={steps}"), 40).notes) == said


def test_empty_custom_source_is_rejected(tmp_path: Path) -> None:
    none = ImageSource(name="none", count=0, read=bytes, place=str)
    with pytest.raises(ValueError, match="none has 0 image"):
        pretrain(tiny(), tmp_path, display=silent(), source=none)


def test_data_limit_applies_to_a_custom_source(tmp_path: Path) -> None:
    display = Written()
    pretrain(tiny("data.limit=16"), tmp_path, display=display, source=load_source(tiny()))
    assert any(" on 16 images" in text for text in display.said)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("test_vit", 33), ("vgg11", 16)])
def test_unsupported_view_size_is_rejected_and_leaves_no_folder(
    tmp_path: Path, name: str, size: int
) -> None:
    """test_vit has patches of 16 pixels; vgg11 halves 16 pixels five times."""
    config = tiny(f"network.name={name}", f"views.size={size}")
    with pytest.raises(ValueError, match=rf"^{name} .* {size} pixels.*views\.size"):
        pretrain(config, tmp_path / "run", display=silent())
    assert not (tmp_path / "run").exists()


def test_view_size_check_leaves_the_network_unchanged() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    check_view_size(network, "a", 8)
    assert network.training
    assert differences(before, dict(network.state_dict())) == []


@pytest.mark.slow
def test_full_disk_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close = MetricsLogger.close

    def full(self: MetricsLogger) -> None:
        close(self)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "close", full)
        with pytest.raises(OSError, match="No space"):
            pretrain(tiny("train.steps=2"), tmp_path, display=silent())
    assert pretrain(tiny("train.steps=2"), tmp_path, display=silent()).step == 2

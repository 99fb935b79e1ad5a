"""`compressive doctor`: its output fits into a bug report, and its checks can fail."""

import json
import logging
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from command_line import run
from emulated_mps import emulated_mps
from torch import Tensor

from compressive.cli import doctor_command
from compressive.cli.doctor_command import fact_lines, outcome_line
from compressive.doctor import facts, self_tests
from compressive.doctor.facts import scrub
from compressive.doctor.self_tests import SelfTest, Skip, all_tests, plain_ntxent, run_test

HANG = """
import sys, threading
from functools import partial
from compressive.cli import app
from compressive.doctor import self_tests
def hang():  # in a thread that Python would join when it ends
    threading.Thread(target=threading.Event().wait, daemon=False).start()
    threading.Event().wait()
self_tests.all_tests = lambda _: [self_tests.SelfTest("decode PNG", hang)]
self_tests.run_test = partial(self_tests.run_test, limit=0.1)
sys.argv = ["compressive", "doctor"]
app.main()
"""


PRIVATE = {"USER": "someuser", "HOME": "/tmp/home-of-someuser", "API_TOKEN": "secret-token"}


def doctor(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**os.environ, **PRIVATE},
        timeout=300,
    )


@pytest.mark.slow
def test_output_fits_into_a_bug_report_and_names_nobody() -> None:
    done = doctor("-m", "compressive", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 120
    for word in (
        f"torch {torch.__version__}",
        "cpu: ",
        "Pillow: ",
        "GB free",
        "ok      cpu: losses",
    ):
        assert word in done.stdout
    for private in ("someuser", "secret-token", str(Path.home()), str(Path.cwd()), os.uname()[1]):
        assert private not in done.stdout


def test_json_has_the_same_facts_and_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PRIVATE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(self_tests, "check_compiler", lambda _: None)  # takes seconds
    result = run("doctor --json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["name"] == "cpu"
    assert {check["state"] for check in found["checks"]} <= {"ok", "skipped"}
    names = [check["name"] for check in found["checks"]]
    assert names == [test.name for test in all_tests(facts.devices())]
    for private in ("someuser", "secret-token"):
        assert private not in result.stdout
    assert set(found) == {"versions", "devices", "decoders", "disk", "extras", "checks"}


def test_failed_check_sets_the_exit_code_and_hides_the_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise OSError("no space left in /home/someone/private/folder/file")

    monkeypatch.setattr(self_tests, "check_disk", broken)
    monkeypatch.setattr(self_tests, "check_compiler", lambda _: None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "failed  disk: write, fsync, rename: OSError: no space left in file" in result.stdout
    assert "someone" not in result.stdout


@pytest.mark.slow
def test_check_that_hangs_does_not_keep_the_program_from_ending() -> None:
    done = doctor("-c", HANG)
    assert done.returncode == 1
    assert "failed  decode PNG: no result after 0.1 s" in done.stdout
    assert done.stdout.endswith("0 of 1 checks passed, 1 failed\n")


def test_check_that_takes_too_long_leaves_another_program_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SelfTest("compiled step", lambda: time.sleep(1), may_be_slow=True)
    monkeypatch.setattr(self_tests, "all_tests", lambda _: [slow])
    monkeypatch.setattr(self_tests, "run_test", partial(run_test, limit=0.01))
    monkeypatch.setattr(doctor_command, "_unfinished", [])
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    result = run("doctor --json")  # in this process, as a notebook may
    assert result.exit_code == 0
    (check,) = json.loads(result.stdout)["checks"]
    assert check["reason"] == "no result after 0.01 s"
    assert not ended


def test_check_that_raises_hangs_or_is_impossible_is_reported() -> None:
    def crash() -> None:
        raise RuntimeError("/home/me/lib/kernel.cu failed\nsecond line")

    def impossible() -> None:
        raise Skip("no compiler")

    failed = run_test(SelfTest("a", crash))
    assert (failed.state, failed.reason) == ("failed", "RuntimeError: kernel.cu failed")
    hanging = SelfTest("b", lambda: time.sleep(1))
    assert run_test(hanging, limit=0.05).state == "failed"
    assert "0.05 s" in run_test(hanging, limit=0.05).reason
    assert run_test(hanging._replace(may_be_slow=True), limit=0.05).state == "skipped"
    skipped = run_test(SelfTest("c", impossible))
    assert outcome_line(skipped._asdict()).startswith("  skipped c: no compiler (0")
    assert run_test(SelfTest("d", lambda: None)).state == "ok"


def test_messages_lose_folders_users_and_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "jdoe")
    assert scrub("cannot open /home/jdoe/a b/c.txt: denied") == "cannot open a b/c.txt: denied"
    assert scrub(r"C:\Users\jdoe\x.dll is missing") == "x.dll is missing"
    assert scrub("jdoe has no access") == "... has no access"
    assert scrub("on the machine node1", ["node1"]) == "on the machine ..."
    assert len(scrub("x" * 1000)) == 200


def test_reference_loss_is_the_cross_entropy_of_torch() -> None:
    x, y = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = F.normalize(torch.cat([x, y]), dim=1)
    logits = (rows @ rows.T / 0.2).fill_diagonal_(-torch.inf)
    expected = F.cross_entropy(logits, torch.arange(10).roll(5), reduction="sum") / 5
    assert plain_ntxent(x.tolist(), y.tolist(), 0.2) == pytest.approx(expected.item(), rel=1e-12)


def test_wrong_losses_products_pixels_and_files_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")

    def wrong(name: str, function: Any) -> None:
        original = getattr(self_tests, name)
        monkeypatch.setattr(self_tests, name, lambda *a, **k: function(original(*a, **k)))

    self_tests.check_products(cpu)
    self_tests.check_losses(cpu)
    self_tests.check_disk()
    with monkeypatch.context():
        wrong("simclr_loss", lambda found: found._replace(loss=found.loss * 1.001))
        with pytest.raises(ArithmeticError, match="SimCLR"):
            self_tests.check_losses(cpu)
    monkeypatch.undo()
    wrong(
        "csimclr_loss",
        lambda found: found._replace(
            loss=found.loss * 1.001 if found.loss.dtype == torch.float32 else found.loss
        ),
    )
    with pytest.raises(ArithmeticError, match="C-SimCLR"):
        self_tests.check_losses(cpu)
    product = Tensor.__matmul__
    monkeypatch.setattr(
        Tensor,
        "__matmul__",
        lambda a, b: product(a, b) if a.dtype == torch.float64 else product(a, b).abs(),
    )
    with pytest.raises(ArithmeticError, match="float32 product"):
        self_tests.check_products(cpu)
    with pytest.raises(ValueError, match="wrong by"):
        self_tests.check_decoder(b"", lambda _: self_tests._picture().flip(2))
    with pytest.raises(ValueError, match="shape"):
        self_tests.check_decoder(b"", lambda _: self_tests._picture()[:, :5])
    monkeypatch.setattr(self_tests, "write_bytes", lambda path, content: path.write_bytes(b"x"))
    with pytest.raises(OSError, match="another content"):
        self_tests.check_disk()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WebP", "AVIF"])
def test_decoders_are_checked(kind: str) -> None:
    checks = {test.name: test for test in all_tests(facts.devices())}
    outcome = run_test(checks[f"decode {kind}"], limit=60)
    assert outcome.state == "ok", outcome


def test_device_without_float64_is_described_and_checked() -> None:
    with emulated_mps() as device:
        found = facts.collect()
        self_tests.check_losses(device)
    (line,) = [line for line in fact_lines(found) if line.startswith("  mps: ")]
    assert line == "  mps: Apple GPU, 8.6 GB of 8.6 GB free, no float64"
    assert any(
        "MPS" in check.name or "mps" in check.name
        for check in all_tests([facts.DeviceFacts(**device) for device in found["devices"]])
    )


def test_the_note_about_a_toolkit_without_a_gpu_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils import cpp_extension

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpp_extension.logger, "level", logging.NOTSET)
    for is_silent in (False, True):
        if is_silent:
            self_tests.silence_toolkit_note()
        caplog.clear()
        cpp_extension._find_cuda_home()  # torch calls it when it imports this module
        assert ("CUDA_HOME" in caplog.text) is not is_silent

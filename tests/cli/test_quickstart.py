"""The quick start: its rows and table, and the linear probe on pixels."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from typer.testing import CliRunner

from compressive.cli import quickstart, second_process
from compressive.cli.app import app
from compressive.cli.quickstart import linear_probe
from compressive.evaluation.logistic import fit
from compressive.evaluation.results import Results
from compressive.metric_info import ONE_SEED
from compressive.train.outcome import Outcome

pytestmark = pytest.mark.usefixtures("one_thread")
PENALTIES = (1e-3, 1e-1, 10.0, 1e3)


def synthetic(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return three classes with one informative feature among 20 of different scales."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    feats = torch.randn(count, 20, generator=generator)
    feats[:, 0] += 1.5 * labels
    return feats * torch.logspace(-2, 2, 20) + 3, labels


def sklearn_predictions(train: tuple[Tensor, Tensor], feats: Tensor, penalty: float) -> Tensor:
    """Return predictions from features standardized with training statistics."""
    mean, std = train[0].mean(0), train[0].std(0, unbiased=False)
    model = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=10_000)
    model.fit(((train[0] - mean) / std).double().numpy(), train[1].numpy())
    return torch.from_numpy(model.predict(((feats - mean) / std).double().numpy()))


def test_penalty_is_chosen_on_a_held_out_fifth() -> None:
    (feats, labels), test = synthetic(60, seed=0), synthetic(400, seed=1)
    held = torch.randperm(60, generator=torch.Generator().manual_seed(0)) % 5 == 0
    assert held.sum() == 12
    part = feats[~held], labels[~held]

    def score(penalty: float) -> tuple[float, float]:
        right = sklearn_predictions(part, feats[held], penalty) == labels[held]
        return right.double().mean().item(), penalty

    best = max(PENALTIES, key=score)
    expected = (
        (sklearn_predictions((feats, labels), test[0], best) == test[1]).double().mean().item()
    )
    found = linear_probe((feats, labels), test, classes=3, penalties=PENALTIES)
    assert found == pytest.approx(expected)


def test_test_labels_do_not_influence_the_penalty() -> None:
    """Wrong test labels do not change which classifier is chosen.

    Each label is moved to the next class. A penalty tuned on the test part would change.
    """
    train, (feats, labels) = synthetic(60, seed=0), synthetic(400, seed=1)
    fits = fit(*train, classes=3, penalties=PENALTIES, standardize=True)
    rights = [
        [
            (fits.logits(feats, i).argmax(1) == truth).double().mean().item()
            for truth in (labels, (labels + 1) % 3)
        ]
        for i in range(len(PENALTIES))
    ]
    pair = [
        linear_probe(train, (feats, truth), classes=3, penalties=PENALTIES)
        for truth in (labels, (labels + 1) % 3)
    ]
    assert min(max(abs(a - b) for a, b in zip(pair, one, strict=True)) for one in rights) < 1e-6
    plain, moved = zip(*rights, strict=True)
    assert plain.index(max(plain)) != moved.index(max(moved))


FIGURES = {
    ("logistic", "top-1"): 0.71, ("kNN 20", "top-1"): 0.62, ("kNN 200", "top-1"): 0.11,
    ("few labels 1%", "top-1"): 0.12, ("few labels 10%", "top-1"): 0.53,
    ("information", "residual"): 180.0, ("information", "reducible_residual"): 1.25,
    ("information", "predictive"): 2.5, ("logistic", "top-5"): 0.99,
    ("corruptions", "top-1"): 0.44, ("corruption", "top-1"): 0.33,
    ("smoothness hue+", "lipschitz"): 8.0, ("smoothness", "lipschitz"): 2.0,
}  # fmt: skip


@pytest.fixture
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretrain(config: Any, out: Path, **_: Any) -> Outcome:
        return Outcome(out, 5, 5, 5, None)

    def evaluate(*_: Any, **__: Any) -> tuple[Results, Path]:
        results = Results("a")
        results.add("smoothness", "set train", "lipschitz", 7.0, protocol={}, n=1)
        for (task, metric), value in FIGURES.items():
            results.add(task, "set", metric, value, protocol={}, n=1)
        return results, Path()

    monkeypatch.setattr(quickstart, "pretrain", pretrain)
    monkeypatch.setattr(quickstart, "evaluate", evaluate)
    monkeypatch.setattr(quickstart, "_pixel_accuracy", lambda: 0.095)
    monkeypatch.setattr(second_process, "usable_cores", lambda: 1)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)


@pytest.mark.usefixtures("_stand_ins")
def test_rows_hold_the_named_metrics(tmp_path: Path) -> None:
    pixels, *rows = quickstart.run_quickstart(tmp_path)
    assert pixels[:7] == ("raw pixels", 0.095, None, None, None, None, None)
    assert [row[:7] for row in rows] == [
        (name, 0.71, 0.62, 0.53, 0.44, 1.25, 2.0) for name in ("simclr", "c-simclr")
    ]


@pytest.mark.usefixtures("_stand_ins")
def test_table_columns_hold_the_named_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressive.reporting.page.write_report", lambda runs, out, **_: out)
    monkeypatch.setattr("compressive.evaluation.comparison_table.verdicts", lambda runs, **_: None)
    printed = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path)])
    assert printed.exit_code == 0, printed.output
    rows = [
        re.findall(r"[\w%.][\w%. -]*[\w%]", line)
        for line in printed.output.splitlines()
        if "│" in line or "┃" in line
    ]
    measures = ["linear", "kNN", "10 % labels", "corrupted", "nats", "Lipschitz"]
    assert measures in rows
    assert ["raw pixels", "9.5%"] in rows
    assert ["c-simclr", "71.0%", "62.0%", "53.0%", "44.0%", "1.25", "2.00"] in rows
    assert ONE_SEED in " ".join(printed.output.split())


class Process:
    """A process that ends when it is asked to wait for, with this exit code."""

    def __init__(self, code: int) -> None:
        self.code, self.returncode, self.calls = code, None, []

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> None:
        self.calls.append("wait")
        self.returncode = self.code

    def send_signal(self, _: int) -> None:
        self.calls.append("stop")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Provide two cores, and a process that fails; append what is started and evaluated here."""
    started: list[Any] = []

    def start(words: list[str], **_: Any) -> Process:
        started.append((words[1:], Process(1)))
        return started[-1][1]

    monkeypatch.setattr(second_process, "usable_cores", lambda: 2)
    monkeypatch.setattr("subprocess.Popen", start)
    return started


@pytest.mark.usefixtures("_stand_ins")
def test_second_method_runs_in_another_process(processes: list[Any], tmp_path: Path) -> None:
    """Its results are read if it succeeded; otherwise it is resumed here."""
    results = quickstart.evaluate()[0]  # pyright: ignore[reportCallIssue]
    results.add("kNN 20", "set", "top-1", 0.99, protocol={}, n=1)
    for code, neighbors in ((1, 0.62), (0, 0.99)):
        out = tmp_path / str(code)
        with second_process.second_process(out, 3) as process:
            assert processes[-1][1] is process
            results.write(out / "c-simclr" / "evaluation")
            words, process = processes[-1]
            assert words == ["-m", "compressive.cli.quickstart", "c-simclr", str(out), "3"]
            process.code = code
            found = list(quickstart.run_quickstart(out, seed=3, process=process))
        assert [row.neighbors for row in found] == [None, 0.62, neighbors]
        assert process.calls == ["wait"]


@pytest.mark.usefixtures("_stand_ins")
def test_process_is_stopped_with_the_quick_start(
    processes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Outcome(tmp_path, 3, 3, 5, None)
    monkeypatch.setattr(quickstart, "pretrain", lambda *_, **__: stopped)
    printed = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path)])
    assert printed.exit_code == 130
    assert "resume" in printed.output
    assert processes[0][1].calls == ["stop", "wait"]


def test_folders_are_checked_before_the_process_starts(
    processes: list[Any], tmp_path: Path
) -> None:
    other = tmp_path / "c-simclr" / "notes.txt"
    other.parent.mkdir()
    other.touch()
    printed = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path)])
    assert printed.exit_code == 2
    assert str(other.parent) in "".join(printed.output.split("\n"))
    assert not processes


def test_process_ends_at_once_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods at a time on one GPU would compete for it."""
    monkeypatch.setattr(quickstart, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("sys.argv", ["quickstart", "c-simclr", "out", "0"])
    monkeypatch.setattr(quickstart, "pretrain", pytest.fail)
    with pytest.raises(SystemExit) as ended:
        quickstart._run_in_background()
    assert ended.value.code == 1


def test_process_starts_without_torch() -> None:
    code = "import sys, compressive.cli.second_process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

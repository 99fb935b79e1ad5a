"""Evaluation on a GPU: corruptions and logistic losses match the CPU, and every task completes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from colored_images import paint
from tiny import silent, tiny

from compressive.corruptions.corrupt import EXTRAS, NAMES, corrupt
from compressive.evaluation import cuda_graph, logistic
from compressive.evaluation.cuda_graph import GraphedFunction
from compressive.evaluation.suite import evaluate
from compressive.train.loop import pretrain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("name", [n for n in (*NAMES, *EXTRAS) if n != "frost"])
def test_corruption_matches_cpu(name: str) -> None:
    """Allow rare differences: float64 sums in another order may truncate to another byte."""
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), generator=random, dtype=torch.uint8)
    index = torch.arange(64)
    on_cpu = corrupt(images, name, 3, index=index)
    on_gpu = corrupt(images.cuda(), name, 3, index=index.cuda()).cpu()
    assert (on_cpu != on_gpu).double().mean() < 1e-3
    assert (on_cpu.int() - on_gpu.int()).abs().max() <= (255 if name == "spatter" else 1)


def test_logistic_loss_matches_cpu() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (400,), generator=random)
    feats = (torch.randn(400, 32, generator=random) + labels[:, None] / 2).relu()
    on_cpu = logistic.fit(feats.double(), labels, classes=5)
    on_gpu = logistic.fit(feats.cuda(), labels.cuda(), classes=5)
    torch.testing.assert_close(on_gpu.loss.cpu(), on_cpu.loss, rtol=1e-6, atol=0)


def test_linear_evaluation_is_the_same_as_a_cuda_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is not captured in the second evaluation; the kernels are the same."""
    paint(tmp_path / "data" / "train", seed=0, each=40)
    paint(tmp_path / "data" / "test", seed=1, each=12)
    config = tiny(f"data.source={tmp_path / 'data'}", "train.steps=2")
    pretrain(config, tmp_path / "run", display=silent())
    captured: list[object] = []
    real = cuda_graph.capture

    def capture(function: Callable[[], Any]) -> Any:
        found = real(function)
        captured.append(found)
        return found

    def fail(function: Callable[[], Any]) -> Any:
        raise RuntimeError("not captured")

    heads = []
    for name, made in (("graph", capture), ("direct", fail)):
        defaults = GraphedFunction.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "capture", made)
        options: Any = {"device": "cuda", "epochs": 20, "tasks": "linear", "display": silent()}
        results, _ = evaluate(str(tmp_path / "run"), out=tmp_path / name, **options)
        heads.append({(r.task, r.metric): r.value for r in results.records})
    assert len(captured) == 2  # features of crops, and the update of the heads
    assert heads[0] == pytest.approx(heads[1], rel=1e-6)


def test_every_task_completes(tmp_path: Path) -> None:
    paint(tmp_path / "data" / "train", seed=0, each=40)
    paint(tmp_path / "data" / "test", seed=1, each=12)
    config = tiny(f"data.source={tmp_path / 'data'}", "method=c-simclr", "train.steps=8")
    pretrain(config, tmp_path / "run", display=silent())
    results, _ = evaluate(str(tmp_path / "run"), device="cuda", epochs=2, display=silent())
    too_few = ("k = 200", "few labels 1%", "frost")  # 120 images, no frost photographs
    assert len(results.skipped) == 3, results.skipped
    assert all(why in text for why, text in zip(too_few, results.skipped, strict=True))
    found = {(r.task, r.metric): r.value for r in results.records}
    assert found["logistic", "top-1"] > 0.6
    assert {"linear", "corruptions", "information"} <= {task for task, _ in found}

"""Parts of a training step: settings are applied, and views depend on each image alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import printed
from tiny import tiny
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from compressive import optim
from compressive.augment.ops import augment
from compressive.augment.params import View
from compressive.checks import autocast
from compressive.config import Optim, Views
from compressive.data.loaders import Batch
from compressive.device import is_compiled, pick_device, precision
from compressive.methods import build
from compressive.rng import image_keys
from compressive.train.step import (
    Learner,
    _checkpoint_policy,
    build_optimizer,
    view_maker,
    view_pair,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def batch(count: int = 6, side: int = 20) -> Batch:
    """Return images of different sizes, padded to one canvas."""
    height, width = torch.randint(8, side + 1, (2, count))
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    for image, h, w in zip(images, height, width, strict=True):
        image[:, h:], image[:, :, w:] = 0, 0
    return Batch(
        images,
        height,
        width,
        index=torch.randperm(100)[:count],
        epoch=torch.randint(5, (count,)),
        label=torch.full((count,), -1),
    )


def some(whole: Batch, places: slice) -> Batch:
    return Batch(*(part[places] for part in whole))


def test_views_do_not_depend_on_the_batch() -> None:
    """Views depend on an image's index and epoch, the seed and the view number only.

    Tolerance 1e-5: matrix products of other shapes sum in another order.
    """
    config = tiny("seed=11")
    whole = batch()
    both = view_maker(config, torch.float32, compiled=False)(whole)
    for number, (view, found) in enumerate(zip(view_pair(config.views), both, strict=True)):
        assert found.shape == (6, 3, 16, 16)
        assert not found.requires_grad
        for i in range(6):
            h, w = int(whole.height[i]), int(whole.width[i])
            keys = image_keys(
                whole.index[i : i + 1], seed=11, epoch=int(whole.epoch[i]), view=number
            )
            alone = augment(whole.images[i : i + 1, :, :h, :w], keys, view, 16)
            torch.testing.assert_close(found[i : i + 1], alone, rtol=1e-5, atol=1e-5)
    parts = [
        view_maker(config, torch.float32, compiled=False)(some(whole, places))
        for places in (slice(0, 2), slice(2, 6))
    ]
    for found, again in zip(both, map(torch.cat, zip(*parts, strict=True)), strict=True):
        torch.testing.assert_close(found, again, rtol=1e-5, atol=1e-5)


def test_views_change_with_seed_and_epoch() -> None:
    whole = batch()
    make = view_maker(tiny(), torch.float32, compiled=False)
    first, again = make(whole), make(whole)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(*first)
    later = make(whole._replace(epoch=whole.epoch + 1))
    other = view_maker(tiny("seed=1"), torch.float32, compiled=False)(whole)
    for changed in (later, other):
        assert not torch.equal(first[0], changed[0])


COMPILED = """
import torch
from compressive.config import Config, override
from compressive.data.loaders import Batch
from compressive.train.step import view_maker

one = torch.ones(6, dtype=torch.long)
images = torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8)
batch = Batch(images, 18 * one, 20 * one, torch.arange(6), 0 * one, -one)
torch._dynamo.config.error_on_recompile = True
compile = torch.compile
torch.compile = lambda f, **how: compile(f, **how, fullgraph=True, backend="aot_eager")
config = override(Config(), "views.size=16")
graph, eager = (view_maker(config, torch.float32, compiled=c) for c in (True, False))
for epoch in range(2):
    batch = batch._replace(epoch=epoch * one)
    for x, y in zip(graph(batch), eager(batch), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
        assert x.is_contiguous(memory_format=torch.channels_last)
print("the same")
"""


@pytest.mark.slow
def test_compiled_views_match_eager() -> None:
    """One graph serves both views and all epochs; a subprocess runs without shape checks."""
    assert printed(COMPILED).strip() == "the same"


@pytest.mark.slow
def test_recomputation_keeps_gradients_and_saves_memory() -> None:
    """Weights, images and matrix products stay in memory; activations are recomputed."""
    script = Path(__file__).parents[1] / "recomputed.py"
    output = printed(script.read_text(), "cpu", "aot_eager_decomp_partition")
    difference, share = map(float, output.split())
    assert difference < 1e-12  # float64 sums in another order
    assert 0.4 < share < 0.5  # 0.06 without the products, 0.6 if a compiled step keeps everything


def test_recomputation_saves_products_and_noise() -> None:
    """Recomputed noise would differ, at least with torch's own backend."""
    aten = torch.ops.aten
    kept = aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default
    kept += aten._scaled_dot_product_flash_attention.default, aten.bernoulli.p
    kept += aten.native_dropout.default, aten.rand_like.default
    again = aten.native_batch_norm.default, aten.relu_.default, aten.add.Tensor, aten.gelu.default
    assert {_checkpoint_policy(None, each) for each in kept} == {CheckpointPolicy.MUST_SAVE}
    assert {_checkpoint_policy(None, each) for each in again} == {CheckpointPolicy.PREFER_RECOMPUTE}


def test_bfloat16_network_gets_bfloat16_views() -> None:
    """Views match float32 up to the 8 bits of bfloat16, whose spacing at 2 is 0.016."""
    whole = batch()
    narrow = view_maker(tiny(), torch.bfloat16, compiled=False)(whole)
    for found, exact in zip(
        narrow, view_maker(tiny(), torch.float32, compiled=False)(whole), strict=True
    ):
        assert found.dtype == torch.bfloat16
        assert (found.float() - exact).abs().max() < 0.06


def test_view_settings_are_applied() -> None:
    x, y = view_pair(Views())
    assert (x.blur, y.blur, x.solarize, y.solarize) == (1.0, 0.1, 0.0, 0.2)
    x, y = view_pair(Views(blur=False, crop_scale_min=0.3, antialias=True))
    for view in (x, y):
        assert (view.blur, view.crop_scale_min, view.antialias) == (0.0, 0.3, True)
    x, y = view_pair(Views(policy="simclr", strength=0.5))
    assert x == y
    assert x == View(
        log_aspect=False, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, blur=0.5
    )


def test_device_setting_is_validated_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == CPU
    with pytest.raises(ValueError, match=r"^train\.device .*auto, cpu, cuda,.*'gpu'$"):
        pick_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU
    with pytest.raises(ValueError, match=r"train\.device .*no GPU.*cpu"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"train\.device.* cuda:2.* 2 GPUs"):
        pick_device("cuda:2")


def test_precision_and_compilation_follow_the_device() -> None:
    assert precision("auto", CPU) == precision("float32", CUDA) == torch.float32
    assert precision("auto", CUDA) == precision("bf16", CPU) == torch.bfloat16
    assert [is_compiled(s, CPU) for s in ("auto", "yes", "no")] == [False, True, False]
    assert [is_compiled(s, CUDA) for s in ("auto", "yes", "no")] == [True, True, False]
    linear, x = nn.Linear(2, 2), torch.randn(1, 2)
    with autocast(CPU, torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    with autocast(CPU, torch.float32):
        assert linear(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "kind"),
    [("lars", optim.LARS), ("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)],
)
def test_optimizer_has_the_papers_parameter_groups(name: str, kind: type) -> None:
    """Weights have weight decay and LARS adaptation; biases and batch norms have neither.

    The target network is in no group.
    """
    method: Any = build(tiny("method=byol"))
    settings = Optim(name=name, momentum=0.8, weight_decay=0.3, trust_coefficient=0.02)  # pyright: ignore
    found = build_optimizer(settings, method)
    assert type(found) is kind
    decayed, spared = found.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim > 1 for p in decayed["params"])
    assert all(p.ndim <= 1 for p in spared["params"])
    assert method.target is not None
    learning = {id(p) for p in method.parameters()} - {id(p) for p in method.target.parameters()}
    assert {id(p) for group in found.param_groups for p in group["params"]} == learning
    if name != "adamw":
        assert decayed["momentum"] == 0.8
    if name == "lars":
        assert (decayed["trust_coefficient"], decayed["adapt"], spared["adapt"]) == (
            0.02,
            True,
            False,
        )


def views(count: int = 4) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, count, 3, 16, 16)
    return x, y


def test_probe_does_not_change_the_methods_gradients() -> None:
    """The method's gradients are bitwise equal with and without a probe."""
    label, grads = torch.tensor([0, 2, -1, 1]), []
    x, y = views()
    for classes in (3, 0):
        torch.manual_seed(0)
        learner = Learner(build(tiny("method=simclr")), classes)
        torch.manual_seed(1)
        step, probe_loss = learner((x, y), torch.zeros(()), label)
        (step.loss + probe_loss).backward()
        grads.append([p.grad for p in learner.method.parameters()])
        if learner.probe is None:
            assert probe_loss == 0
        else:
            both = torch.cat(step.feats)
            again = learner.probe.loss(both, torch.cat([label, label]))
            assert probe_loss.item() == pytest.approx(again.item())
            weight = learner.probe.linear.weight
            assert weight.grad is not None
            assert weight.grad.any()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # pyright: ignore


def test_probe_learns_from_both_views() -> None:
    """Weights are drawn at random: at 0, where the probe starts, any features cost log 3."""
    learner = Learner(build(tiny("method=simclr")), 3)
    assert learner.probe is not None
    nn.init.normal_(learner.probe.linear.weight)
    label = torch.tensor([0, 2, -1, 1])
    step, loss = learner(views(), torch.zeros(()), label)
    feats = torch.cat(step.feats).double()
    standard = (feats - feats.mean(0)) / (feats.var(0, unbiased=False) + 1e-5).sqrt()
    logits = standard @ learner.probe.linear.weight.double().T
    expected = F.cross_entropy(logits, torch.cat([label, label]), ignore_index=-1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=0)


def test_adamw_has_torchs_default_betas() -> None:
    found = build_optimizer(Optim(name="adamw"), nn.Linear(2, 2))
    theirs = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    for group in found.param_groups:
        assert (group["betas"], group["eps"]) == (theirs.defaults["betas"], theirs.defaults["eps"])

"""Networks match the official ResNets, timm and naive loops."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from conftest import golden_arrays, golden_json
from official_variables import variables_in_order
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from compressive.config import Config, Network, override
from compressive.networks import RESNETS, Ema, SamePool, backbone, build, feature_dim, linear, mlp

# Reduced from the official list of variables to the counts per configuration.
COUNTS = golden_json("resnet_variables")
RULE = golden_json("resnet_rule")
ARRAYS = golden_arrays("resnet_rule")


def official(case: dict[str, Any], **settings: Any) -> Any:
    """Return the paper's ResNet of a golden case."""
    return backbone(
        f"resnet{case['depth']}",
        width=case["width"],
        stem="cifar" if case["cifar_stem"] else "imagenet",
        variant="official",
        biased_variance=True,
        **settings,
    )


def ruled(i: int, name: str, shape: list[int]) -> Tensor:
    """Return variable i of the golden networks, by its rule, in torch's layout."""
    noise = np.random.RandomState(1000 + i).randn(*shape)
    if "kernel" in name:
        return torch.from_numpy(noise * math.sqrt(1.6 / math.prod(shape[:-1]))).permute(3, 2, 0, 1)
    if "gamma" in name:
        return torch.from_numpy(1 + 0.1 * noise)
    if "moving_variance" in name:
        return torch.from_numpy(1 + 0.2 * np.abs(noise))
    return torch.from_numpy(0.1 * noise)


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference relative to the largest entry."""
    assert ours.shape == theirs.shape
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())


@pytest.mark.slow
@pytest.mark.parametrize("case", RULE, ids=lambda case: case["tag"])
def test_resnet_matches_the_official_code(case: dict[str, Any]) -> None:
    """Compare ours in float64 to TensorFlow's float32; the rest is the noise of the latter.

    With running statistics, features agree to 1e-6. With the statistics of so few values (4 images
    of 2x2 in the last group) each layer amplifies the noise of the one before. Our own float32
    differs from our float64 by 6e-6 in ResNet-18 and by 9e-5 in ResNet-50. TensorFlow's, whose
    synchronized norm subtracts two moments, differs by 1.2e-5 and 4.3e-4. Moving statistics take a
    tenth of it. Unbiased variances would be off by 1e-5 or more, in the last norm by 1e-3 or more.
    """
    in_training, moved = (2e-5, 3e-6) if case["depth"] == 18 else (6e-4, 1e-4)
    tag = case["tag"]
    with torch.device("meta"):  # the golden rule fills in all values
        network = official(case).double()
    network.to_empty(device="cpu")
    names = [name for name, _ in case["variables"]]
    held = dict(zip(names, variables_in_order(network), strict=True))
    x = ARRAYS[f"{tag}/x"].permute(0, 3, 1, 2).double()
    with torch.no_grad():
        for i, (name, shape) in enumerate(case["variables"]):
            held[name].copy_(ruled(i, name, shape).float())
        assert gap(network.eval()(x), ARRAYS[f"{tag}/feat_eval"]) < 1e-6
        assert gap(network.train()(x), ARRAYS[f"{tag}/feat_train"]) < in_training
    prefix = f"{tag}/after_train/"
    after = {key.removeprefix(prefix): ARRAYS[key] for key in ARRAYS if key.startswith(prefix)}
    assert len(after) == 6, "mean and variance of the first two norms and the last"
    for i, (name, expected) in enumerate(after.items()):
        assert gap(held[name], expected) < (4e-6 if i < 4 else moved), name


@pytest.mark.parametrize("case", COUNTS, ids=lambda c: "r{depth}-w{width}-{cifar_stem}".format(**c))
def test_parameter_counts_match_the_official_code(case: dict[str, Any]) -> None:
    with torch.device("meta"):
        network = official(case)
    trained = list(network.parameters())
    moving = [t for name, t in network.named_buffers() if "running" in name]
    assert len(trained) == case["trainable_variables"]
    assert len(trained) + len(moving) == case["all_variables"]
    assert sum(t.numel() for t in trained) == case["trainable_params"]
    assert sum(t.numel() for t in trained + moving) == case["all_params"]
    assert feature_dim(network) == case["feature_dim"]


@pytest.mark.parametrize("name", RESNETS)
def test_default_resnet_is_timms(name: str) -> None:
    with torch.device("meta"):
        ours, theirs = backbone(name), timm.create_model(name, num_classes=0)
    assert str(ours) == str(theirs)
    shapes = [{k: v.shape for k, v in net.state_dict().items()} for net in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_timm_loads_a_plain_resnet_and_computes_its_features(tmp_path: Path) -> None:
    ours = backbone("resnet50", zero_init_last=False)
    x = torch.randn(2, 3, 64, 64)
    ours.train()(x)  # nontrivial running statistics
    torch.save(ours.state_dict(), tmp_path / "encoder.pth")

    theirs = timm.create_model("resnet50", num_classes=0, checkpoint_path=tmp_path / "encoder.pth")

    expected = ours.eval()(x)
    torch.testing.assert_close(theirs.eval()(x), expected, rtol=0, atol=0)
    with torch.device("meta"):  # drawing weights that are then replaced takes three seconds
        wider = backbone("resnet50", variant="official")
    wider.to_empty(device="cpu").load_state_dict(ours.state_dict(), strict=True)
    assert gap(wider.eval()(x), expected) > 0.01, "must differ, as the docstring warns"


@pytest.mark.slow
def test_official_variant_adds_a_first_shortcut_only_to_shallow_resnets() -> None:
    with torch.device("meta"):
        plain = {name: set(backbone(name).state_dict()) for name in RESNETS}
        more = {name: set(backbone(name, variant="official").state_dict()) for name in RESNETS}
    added = {f"layer1.0.downsample.0.{name}" for name in ("weight",)}
    added |= {f"layer1.0.downsample.1.{name}" for name in nn.BatchNorm2d(1).state_dict()}
    for name in RESNETS:
        assert more[name] - plain[name] == (added if name in ("resnet18", "resnet34") else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("vit_tiny_patch16_224", 32, {"img_size": 32}),
        ("convnext_atto", 64, {}),
        ("mobilenetv3_small_050", 64, {}),  # timm's num_features differs here
    ],
)
def test_other_timm_networks_are_built_by_name(
    name: str, size: int, options: dict[str, Any]
) -> None:
    network = backbone(name, **options).eval()
    with torch.no_grad():
        features = network(torch.randn(2, 3, size, size))
    assert features.shape == (2, feature_dim(network))
    assert gap(features[:1], features[1:]) > 1e-3


def naive_pool(x: Tensor) -> Tensor:
    """Follow TensorFlow: pad so that ceil(n / 2) windows fit, with the odd pixel at the end."""
    b, c, *sides = x.shape
    before = [max((math.ceil(n / 2) - 1) * 2 + 3 - n, 0) // 2 for n in sides]
    out = torch.empty(b, c, *(math.ceil(n / 2) for n in sides), dtype=x.dtype)
    for i in range(out.shape[2]):
        for j in range(out.shape[3]):
            top, left = 2 * i - before[0], 2 * j - before[1]
            window = x[:, :, max(top, 0) : top + 3, max(left, 0) : left + 3]
            out[:, :, i, j] = window.amax((2, 3))
    return out


@pytest.mark.parametrize("h", [1, 2, 3, 6, 7, 32])
@pytest.mark.parametrize("w", [1, 2, 5, 8])
def test_same_pool_matches_tensorflow(h: int, w: int) -> None:
    x = torch.randn(2, 3, h, w) - 10  # negative, so zero padding would change the maximum
    pooled = SamePool()(x)
    assert torch.equal(pooled, naive_pool(x))
    torchs = nn.MaxPool2d(3, 2, padding=1)(x)
    shifted = any(n % 2 == 0 and n > 2 for n in (h, w))  # with 2 pixels, one window covers all
    assert torch.equal(pooled, torchs) != shifted


def assert_drawn(weight: Tensor) -> None:
    """Check deviation and limit of a truncated normal.

    A million entries give the deviation to 0.3 %. The limit is 2 / 0.8796 deviations.
    """
    weight = weight.detach()
    std = float(weight.std())
    assert weight.numel() > 1e6
    assert 0.99 < std * math.sqrt(weight[0].numel()) < 1.01
    assert abs(float(weight.mean())) < 0.005 * std
    assert 2.2 < float(weight.abs().max()) / std < 2.28


@pytest.mark.slow
def test_kernels_have_the_papers_initialization() -> None:
    network: Any = backbone("resnet50", variant="official")
    assert_drawn(network.layer4[0].conv2.weight)  # 3x3, where fan-in is 9 times the channels
    assert_drawn(network.layer4[0].downsample[0].weight)
    stem = network.conv1.weight.detach()
    assert float(stem.std()) * math.sqrt(3 * 7 * 7) == pytest.approx(1, abs=0.03)
    head = mlp(512)
    for module in (head[0], head[3], linear(1024, 1024)):
        assert isinstance(module, nn.Linear)
        assert_drawn(module.weight)
    timms: Any = backbone("resnet50").layer4
    with pytest.raises(AssertionError):
        assert_drawn(timms[0].conv2.weight)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("resnet50", 16)])
@pytest.mark.parametrize("zero", [True, False])
def test_zero_init_sets_the_last_gamma_to_zero(
    name: str, blocks: int, zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for draw in ("trunc_normal_", "kaiming_normal_"):  # kernels take seconds; no one reads them
        monkeypatch.setattr(nn.init, draw, lambda tensor, *_, **__: tensor)
    network = backbone(name, variant="official", zero_init_last=zero)
    last = "bn2.weight" if name == "resnet18" else "bn3.weight"
    gammas = {k: v for k, v in network.named_parameters() if v.ndim == 1 and k.endswith("weight")}
    ends = {k for k in gammas if k.startswith("layer") and k.endswith(last)}
    assert len(ends) == blocks
    assert {k for k, v in gammas.items() if not v.any()} == (ends if zero else set())
    assert all((v == 1).all() for k, v in gammas.items() if not zero or k not in ends)


def test_biased_variance_updates_with_the_batch_variance() -> None:
    """Otherwise it matches torch's norm, even when two views precede a gradient."""
    plain, biased = (mlp(5, 7, 3, biased_variance=on).double() for on in (False, True))
    biased.load_state_dict(plain.state_dict())
    views = torch.randn(2, 6, 5, dtype=torch.float64)
    norms: list[Any] = [plain[1], biased[1]]
    mean, var = torch.zeros(7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    for head in (plain, biased):
        sum(head(view).square().sum() for view in views).backward()  # pyright: ignore
    for view in views:
        hidden = plain[0](view).detach()
        mean = 0.9 * mean + 0.1 * hidden.mean(0)
        var = 0.9 * var + 0.1 * (hidden - hidden.mean(0)).square().mean(0)
    torch.testing.assert_close(norms[1].running_mean, mean)
    torch.testing.assert_close(norms[1].running_var, var)
    assert norms[1].num_batches_tracked == norms[0].num_batches_tracked == 2
    assert gap(norms[0].running_var, var) > 0.01
    for p, q in zip(plain.parameters(), biased.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    norms[0].load_state_dict(norms[1].state_dict())
    assert torch.equal(plain.eval()(views[0]), biased.eval()(views[0]))
    assert torch.equal(norms[1].running_var, norms[0].running_var), (
        "evaluation mode must not update"
    )


def test_heads_have_the_official_layers() -> None:
    head = mlp(512)
    assert [type(m) for m in head] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert [tuple(p.shape) for p in head.parameters()] == [
        (4096, 512),
        (4096,),
        (4096,),
        (256, 4096),
    ]
    assert head(torch.randn(2, 512)).shape == (2, 256)
    long = mlp(8, 16, 4, layers=3, last_norm=True)
    block = [nn.Linear, nn.BatchNorm1d, nn.ReLU]
    assert [type(m) for m in long] == [*block, *block, nn.Linear, nn.BatchNorm1d]
    assert [m.weight.shape[0] for m in long if isinstance(m, nn.Linear)] == [16, 16, 4]
    layers = [linear(256, 256), *head, *long]
    assert all(m.bias is None for m in layers if isinstance(m, nn.Linear))
    assert layers[0].weight.shape == (256, 256)


def pair() -> tuple[nn.Sequential, Ema]:
    """Return an online encoder with its projection, and an independent target."""
    online, target = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), mlp(16, 8, 4)).double()
        for _ in range(2)
    )
    return online, Ema(target)


def statistics(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_target_update_matches_a_naive_loop() -> None:
    online, target = pair()
    naive = [p.clone() for p in target.network.parameters()]
    assert not torch.equal(naive[0], next(online.parameters())), (
        "the target has its own initialization"
    )
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    for rate in (0.99, 0.9, 0.0, 1.0):
        optimizer.zero_grad()
        online(torch.randn(5, 3, 4, 4, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        before = statistics(target)
        target.update(online, rate)
        torch.testing.assert_close(statistics(target), before, rtol=0, atol=0)
        for ours, p, q in zip(naive, online.parameters(), target.network.parameters(), strict=True):
            ours.copy_(rate * ours + (1 - rate) * p.detach())
            torch.testing.assert_close(q, ours, rtol=1e-14, atol=1e-15)
    assert statistics(online)["1.num_batches_tracked"] == 4
    assert statistics(target)["network.1.num_batches_tracked"] == 0


def test_target_keeps_its_own_statistics_and_no_gradient() -> None:
    online, target = pair()
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    before = statistics(target)
    out = target(x)
    assert not out.requires_grad
    assert not any(p.requires_grad for p in target.parameters())
    assert all(p.requires_grad for p in online.parameters())
    assert not torch.equal(
        statistics(target)["network.1.running_mean"], before["network.1.running_mean"]
    )
    other = Ema(copy.deepcopy(online))
    assert not torch.equal(other(x), out)
    assert all(p.requires_grad for p in online.parameters()), "only the copy is frozen"
    other.load_state_dict(target.state_dict())
    torch.testing.assert_close(other(x), out, rtol=0, atol=0)


def test_target_update_is_one_call_without_synchronization() -> None:
    online, target = pair()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        target.update(online, 0.99)
    calls = {event.key: event.count for event in seen.key_averages()}
    assert calls["aten::_foreach_lerp_"] == 1
    assert "aten::_local_scalar_dense" not in calls


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("resnet5", {}, "'resnet5'.*resnet50"),
        ("qqqq", {}, r"'qqqq'.*timm\.list_models"),
        ("resnet50.a1_in1k", {}, r"'resnet50'.*'resnet50\.a1_in1k'"),
        ("convnext_atto", {"width": 2}, "'convnext_atto' .*width.* resnet18, "),
        ("resnet50d", {"stem": "cifar", "variant": "official"}, "'resnet50d' .*stem, variant;"),
        ("test_vit", {"zero_init_last": False}, "'test_vit' .*zero_init_last;"),
        ("test_vit", {"biased_variance": True}, "'test_vit' .*biased_variance;"),
        ("resnet18", {"width": 0}, r"^width .* 0$"),
        ("resnet18", {"width": 1.5}, r"^width .* 1\.5$"),
        ("resnet18", {"stem": "small"}, r"^stem .* 'small'"),
        ("resnet18", {"variant": "tf"}, r"^variant .* 'tf'"),
    ],
)
def test_invalid_settings_are_rejected(name: str, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        backbone(name, **settings)


def test_error_lists_the_settings_to_change() -> None:
    settings = Network(name="test_resnet", width=2, stem="cifar", zero_init_last=False)
    with pytest.raises(ValueError, match="test_resnet") as error:
        build(settings, 32)
    hint = str(error.value).rpartition(": ")[2]
    assert hint == (
        "--set network.width=1 --set network.stem=imagenet --set network.zero_init_last=true"
    )
    changes = hint.replace("--set ", "").split()
    build(override(Config(network=settings), *changes).network, 32)


def test_invalid_heads_and_targets_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^layers .* 0$"):
        mlp(4, layers=0)
    online, target = pair()
    with pytest.raises(ValueError, match=r"^decay .* 1\.5$"):
        target.update(online, 1.5)
    with pytest.raises(ValueError, match=r"2 tensors of 20 .* 8 of"):
        target.update(nn.Linear(4, 4), 0.5)

"""LARS and schedules match golden files and a reference loop; state can be moved and resumed."""

import copy
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from compressive.config import total_steps
from compressive.optim import (
    LARS,
    cosine_beta,
    ema_decay,
    linear_beta,
    parameter_groups,
    scaled_lr,
    warmup_cosine,
    warmup_steps,
)

GOLDEN = Path(__file__).parent / "golden"
TRAJECTORIES = json.loads((GOLDEN / "lars.json").read_text())
SCHEDULES = json.loads((GOLDEN / "schedules.json").read_text())["configs"]
HYPER = {"momentum": 0.9, "weight_decay": 0.02, "trust_coefficient": 0.001}


def naive_step(params: list[Tensor], momenta: list[Tensor], spared: set[int], lr: float) -> None:
    """Apply LARS as in the paper's code: tensor by tensor, with norms on the host."""
    for i, (p, v) in enumerate(zip(params, momenta, strict=True)):
        if p.grad is None:
            continue
        g, ratio = p.grad, 1.0
        if i not in spared:
            g = g + HYPER["weight_decay"] * p.detach()
            w_norm, g_norm = p.detach().norm().item(), g.norm().item()
            ratio = (
                HYPER["trust_coefficient"] * w_norm / g_norm if w_norm > 0 and g_norm > 0 else 1.0
            )
        v.mul_(HYPER["momentum"]).add_(g * (lr * ratio))
        p.data.sub_(v)


def various_parameters(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return parameters of different shapes and layouts. The last two have no decay."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    tensors = [
        randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last),
        randn(16, 8, 1, 1).contiguous(memory_format=torch.channels_last),
        randn(40, 33),  # more than one chunk, with a remainder
        randn(40, 64)[:, ::2],  # not dense: its strides reach into its neighbor
        torch.zeros(4, 3, dtype=dtype),
        randn(5, 7).T,
        randn(4, 4),  # its gradient is always zero
        randn(9),
        randn(3, 5),
    ]
    return [t.requires_grad_() for t in tensors]


def give_gradients(params: list[Tensor], step: int) -> None:
    """Set gradients of a step: some missing, one zero, one with other strides than its weight."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        if i == 6:
            g.zero_()
        p.grad = None if step in (3, 4, 9) and i % 3 == step % 3 else g


def lars(params: list[Tensor], lr: float = 0.1) -> LARS:
    return LARS([{"params": params[:-2]}, {"params": params[-2:], "adapt": False}], lr, **HYPER)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def run(optimizer: LARS, params: list[Tensor], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        set_lr(optimizer, 2.0 * math.cos(0.1 * step))
        optimizer.step()


def momentum_of(optimizer: LARS, p: Tensor) -> Tensor:
    return optimizer.state[p]["momentum_buffer"]


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Compare up to `tolerance` of the tensor's largest entry."""
    scale = float(theirs.abs().max())
    torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("case", TRAJECTORIES, ids=lambda case: case["prefix"].strip("/"))
def test_five_steps_match_the_official_code(case: dict[str, Any]) -> None:
    """Float32 may differ by summation order and fma: 8 units in the last place, 5e-7."""
    tolerance = 1e-13 if "float64" in case["prefix"] else 5e-7
    arrays = np.load(GOLDEN / "lars.npz")

    def tensor(kind: str, name: str) -> Tensor:
        return torch.from_numpy(arrays[f"{case['prefix']}{kind}/{name}"])

    params = {name: tensor("init", name).requires_grad_() for name in case["names"]}
    spared = [p for name, p in params.items() if case["excluded"][name]]
    adapted = [p for name, p in params.items() if not case["excluded"][name]]
    optimizer = LARS(
        [{"params": adapted}, {"params": spared, "adapt": False}],
        lr=0.0,
        momentum=case["momentum"],
        weight_decay=case["weight_decay"],
        trust_coefficient=case["eeta"],
    )
    for step, lr in enumerate(case["lr"]):
        for name, p in params.items():
            p.grad = tensor(f"grad{step}", name)
        set_lr(optimizer, lr)
        optimizer.step()
        for name, p in params.items():
            assert_close(p, tensor(f"param{step}", name), tolerance)
            assert_close(momentum_of(optimizer, p), tensor(f"mom{step}", name), tolerance)


def test_fused_step_matches_a_loop_over_tensors() -> None:
    """20 steps with a changing rate, all layouts and missing gradients differ only by rounding."""
    ours, theirs = various_parameters(), various_parameters()
    momenta = [torch.zeros_like(p) for p in theirs]
    optimizer = lars(ours)
    for step in range(20):
        run(optimizer, ours, range(step, step + 1))
        give_gradients(theirs, step)
        naive_step(theirs, momenta, {7, 8}, 2.0 * math.cos(0.1 * step))
        for p, q, v in zip(ours, theirs, momenta, strict=True):
            assert_close(p, q.detach(), 1e-13)
            assert_close(momentum_of(optimizer, p), v, 1e-13)


def test_momentum_has_the_strides_of_its_weight() -> None:
    """With different strides, torch would update one tensor at a time."""
    params = various_parameters()
    optimizer = lars(params)
    run(optimizer, params, range(1))
    dense = [p for i, p in enumerate(params) if i != 3]
    assert all(momentum_of(optimizer, p).stride() == p.stride() for p in dense)


def test_zero_gradient_without_decay_changes_nothing() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    optimizer = LARS([w], lr=1.0)
    w.grad = torch.zeros(2, 2)
    optimizer.step()
    assert torch.equal(w, torch.ones(2, 2))


def test_group_may_mix_dtypes() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    ours, theirs = (
        [p for dtype in dtypes for p in various_parameters(dtype)[:4]] for _ in range(2)
    )
    momenta = [torch.zeros_like(p) for p in theirs]
    optimizer = LARS(ours, 0.5, **HYPER)
    for step in range(3):
        for params in (ours, theirs):
            give_gradients(params, step)
        optimizer.step()
        naive_step(theirs, momenta, set(), 0.5)
    for p, q in zip(ours, theirs, strict=True):
        assert_close(p, q.detach(), 4 * torch.finfo(p.dtype).eps)


def test_parameter_without_gradient_is_unchanged() -> None:
    """The parameter and its momentum keep their values while others change."""
    params = various_parameters()
    optimizer = lars(params)
    run(optimizer, params, range(2))
    resting, moving = params[2], params[0]
    before, momentum = resting.detach().clone(), momentum_of(optimizer, resting).clone()
    moved = moving.detach().clone()
    give_gradients(params, 2)
    resting.grad = None
    optimizer.step()
    assert torch.equal(resting, before)
    assert torch.equal(momentum_of(optimizer, resting), momentum)
    assert not torch.equal(moving, moved)


@pytest.mark.parametrize("pause", [2, 4, 10])  # 4 and 10: just after missing gradients
def test_saved_state_resumes_bitwise(pause: int) -> None:
    straight, params = various_parameters(), various_parameters()
    run(lars(straight), straight, range(12))

    first = lars(params)
    run(first, params, range(pause))
    file = io.BytesIO()
    torch.save({"params": params, "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = [p.detach().requires_grad_() for p in saved["params"]]
    second = lars(resumed, lr=7.0)
    run(second, resumed, range(1))  # state to be replaced, not added to
    for p, q in zip(resumed, params, strict=True):
        p.data.copy_(q)
    second.load_state_dict(saved["optimizer"])
    run(second, resumed, range(pause, 12))

    assert all(torch.equal(p, q) for p, q in zip(resumed, straight, strict=True))


def test_deep_copy_is_independent() -> None:
    """The copy continues as the original would, and shares no memory with it."""
    params = various_parameters()
    optimizer = lars(params)
    run(optimizer, params, range(5))
    twins, twin = copy.deepcopy((params, optimizer))
    run(twin, twins, range(5, 10))
    assert not torch.equal(twins[0], params[0])
    run(optimizer, params, range(5, 10))
    assert all(torch.equal(p, q) for p, q in zip(twins, params, strict=True))


@pytest.mark.parametrize("adapt", [True, False])
def test_learning_rate_is_inside_the_momentum(adapt: bool) -> None:
    """At a rate of zero, a moving weight continues at 0.9 of its speed."""
    w = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    optimizer = LARS([{"params": [w], "adapt": adapt}], lr=1.0)
    w.grad = torch.full_like(w, 0.5)
    optimizer.step()
    first = 1 - w.detach()
    set_lr(optimizer, 0.0)
    optimizer.step()
    torch.testing.assert_close(1 - w.detach(), 1.9 * first, rtol=1e-12, atol=0)
    assert first[0, 0] == pytest.approx(0.001 if adapt else 0.5, rel=1e-12)


def test_closure_and_added_groups_work() -> None:
    w, late = torch.ones(2, 2, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = LARS([w], lr=0.1, weight_decay=0.3)
    optimizer.add_param_group({"params": [late], "adapt": False, "lr": 1.0})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w.sum() + late.sum()) ** 2
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 49.0
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert torch.equal(late, torch.full((3,), 1.0 - 14.0))


def aten_calls(parameters: int) -> int:
    """Return the torch operations that a step calls, without their internals."""
    params = [torch.randn(3, 5).requires_grad_() for _ in range(parameters)]
    optimizer = lars(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        optimizer.step()
    outer = [event for event in trace.events() or [] if event.name.startswith("Optimizer.step")]
    assert len(outer) == 1
    return len([child for child in outer[0].cpu_children if child.name.startswith("aten::")])


def test_number_of_calls_does_not_depend_on_parameters() -> None:
    assert aten_calls(100) == aten_calls(10) < 40


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_step_has_few_kernels_and_no_synchronization() -> None:
    """60 convolutions with autograd gradients: far fewer kernels than tensors, and no sync."""
    convs = [nn.Conv2d(16, 16, 1 + 2 * (i % 2), padding=i % 2) for i in range(60)]
    model = nn.Sequential(*convs).cuda().to(memory_format=torch.channels_last)
    optimizer = LARS(parameter_groups(model, weight_decay=1e-4), lr=0.1)
    images = torch.randn(4, 16, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    model(images).sum().backward()
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as trace:  # without it torch 2.11 warns
        optimizer.step()
        torch.cuda.synchronize()
    on_device = [event.name for event in trace.events() or [] if "CUDA" in str(event.device_type)]
    assert 0 < len(on_device) < 40


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.probe = nn.Linear(4, 2)
        self.frozen = nn.Linear(4, 2).requires_grad_(False)


def test_biases_norms_and_excluded_heads_have_no_decay() -> None:
    model = Small()
    adapted, spared = parameter_groups(model, weight_decay=0.1, exclude=("probe",))
    names = {p: name for name, p in model.named_parameters()}
    assert [names[p] for p in adapted["params"]] == ["conv.weight", "head.weight"]
    few = "conv.bias norm.weight norm.bias head.bias probe.weight probe.bias"
    assert [names[p] for p in spared["params"]] == few.split()
    assert (adapted["weight_decay"], adapted["adapt"]) == (0.1, True)
    assert (spared["weight_decay"], spared["adapt"]) == (0.0, False)


@pytest.mark.parametrize("build", [LARS, torch.optim.SGD, torch.optim.AdamW])
def test_every_optimizer_accepts_the_groups(build: type[torch.optim.Optimizer]) -> None:
    """With zero gradients only decay changes a weight, and excluded ones have none."""
    model = Small()
    optimizer = build(parameter_groups(model, weight_decay=0.1), lr=0.5)  # pyright: ignore[reportCallIssue]
    before = copy.deepcopy(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(model.norm.weight, before.norm.weight)
    assert torch.equal(model.head.bias, before.head.bias)
    assert not torch.equal(model.conv.weight, before.conv.weight)


@pytest.mark.parametrize("config", SCHEDULES, ids=lambda config: config["name"])
def test_schedules_match_the_official_code(config: dict[str, Any]) -> None:
    """Closed forms agree to float64's last places.

    The official float32 agrees to one unit of full scale.
    """
    examples, batch, steps = config["num_examples"], config["train_batch_size"], config["steps"]
    total, warmup = config["total_steps"], config["warmup_steps"]
    peak, beta = scaled_lr(config["learning_rate"], batch), config["ceb_beta"]
    assert warmup_steps(examples, config["warmup_epochs"], batch) == warmup
    if not config["train_steps"]:  # else the length was given, not computed
        assert total_steps(examples, config["train_epochs"], batch) == total

    lr = [warmup_cosine(k, peak=peak, warmup=warmup, total=total) for k in steps]
    ema = [ema_decay(k, base=config["ema_alpha"], total=total) for k in steps]
    linear = [linear_beta(k, beta=beta, warmup=warmup) for k in steps]
    cosine = [cosine_beta(k, beta=beta, total=total) for k in steps]

    np.testing.assert_allclose(lr, config["lr_closed_form64"], rtol=0, atol=1e-15 * peak)
    np.testing.assert_allclose(ema, config["ema_closed_form64"], rtol=0, atol=1e-15)
    ulp = 2.0**-23
    np.testing.assert_allclose(lr, config["lr"], rtol=0, atol=ulp * peak)
    np.testing.assert_allclose(ema, config["ema_alpha_schedule"], rtol=0, atol=ulp)
    np.testing.assert_allclose(linear, config["beta_linear_warmup"], rtol=0, atol=ulp * beta)
    np.testing.assert_allclose(cosine, config["beta_cosine"], rtol=0, atol=ulp * beta)


def test_schedules_at_first_and_last_step() -> None:
    assert warmup_cosine(0, peak=2.0, warmup=5, total=10) == 0.0
    assert warmup_cosine(5, peak=2.0, warmup=5, total=10) == 2.0
    assert warmup_cosine(0, peak=2.0, warmup=0, total=10) == 2.0
    assert warmup_cosine(99, peak=2.0, warmup=5, total=10) == 0.0
    assert [ema_decay(k, base=0.75, total=10) for k in (0, 5, 10, 99)] == [0.75, 0.875, 1.0, 1.0]
    assert [linear_beta(k, beta=2.0, warmup=4) for k in (0, 1, 4, 99)] == [0.0, 0.5, 2.0, 2.0]
    assert [cosine_beta(k, beta=2.0, total=10) for k in (0, 5, 10, 99)] == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"^lr .* -0\.1$"),
        ({"lr": math.nan}, r"^lr .* nan$"),
        ({"lr": 0.1, "momentum": 1.0}, r"^momentum .* 1\.0$"),
        ({"lr": 0.1, "weight_decay": -1.0}, r"^weight_decay .* -1\.0$"),
        (
            {"lr": 0.1, "trust_coefficient": 0.0},
            r"^trust_coefficient .* 0\.0$",
        ),
    ],
)
def test_lars_rejects_invalid_values(options: dict[str, float], message: str) -> None:
    w = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        LARS([w], **options)
    with pytest.raises(ValueError, match=message):
        LARS([{"params": [w], **options}], lr=0.1)


def test_lars_rejects_unsupported_options() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match=r"weight_decay .*adapt=False.* 0\.1"):
        LARS([{"params": [w], "adapt": False, "weight_decay": 0.1}], lr=0.1)
    optimizer = LARS([w], lr=0.1)
    w.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=r"torch\.sparse_coo"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"exclude .*'head'"):
        parameter_groups(Small(), weight_decay=0.0, exclude="head")


@pytest.mark.parametrize(
    ("schedule", "arguments", "message"),
    [
        (
            warmup_cosine,
            {"step": -1, "peak": 1.0, "warmup": 2, "total": 9},
            r"^step .* -1$",
        ),
        (warmup_cosine, {"step": 0, "peak": 1.0, "warmup": 9, "total": 9}, r"total = 9.* 9$"),
        (ema_decay, {"step": -1, "base": 0.9, "total": 9}, r"^step .* -1$"),
        (linear_beta, {"step": -1, "beta": 1.0, "warmup": 9}, r"^step .* -1$"),
        (cosine_beta, {"step": 0, "beta": 1.0, "total": 0}, r"^total .* 0$"),
        (total_steps, {"examples": 9, "epochs": 1, "batch": 0}, r"^batch .* 0$"),
        (warmup_steps, {"examples": 9, "epochs": 1.0, "batch": 0}, r"^batch .* 0$"),
    ],
)
def test_schedules_reject_invalid_steps(
    schedule: Callable[..., float], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**arguments)


def test_layer_groups_have_the_rates_of_timm() -> None:
    import timm
    from timm.optim import param_groups_layer_decay

    from compressive.optim import layer_groups

    for name in ("test_vit", "test_convnext", "test_resnet"):
        whole = timm.create_model(name, num_classes=3)
        expected = {
            id(p): group["lr_scale"]
            for group in param_groups_layer_decay(whole, layer_decay=0.7)
            for p in group["params"]
        }
        method = nn.Module()
        method.encoder, method.head = whole, nn.Linear(2, 2)
        whole.reset_classifier(0)  # pyright: ignore[reportCallIssue]
        groups = layer_groups(method, weight_decay=0.1, layer_decay=0.7)
        found = {id(p): g["lr_scale"] for g in groups for p in g["params"] if g["is_encoder"]}
        kept = {id(p) for p in whole.parameters()}
        assert found == {key: scale for key, scale in expected.items() if key in kept}
        heads = [g for g in groups if not g["is_encoder"]]
        assert {g["lr_scale"] for g in heads} == {1.0}
        assert all(g["weight_decay"] == (0.1 if g["adapt"] else 0) for g in groups)
    method.encoder = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"optim\.layer_decay"):
        layer_groups(method, weight_decay=0.0, layer_decay=0.7)

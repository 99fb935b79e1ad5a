"""The official step of the four methods, and what the eight of them are to each other."""

import copy
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import golden_arrays, golden_json, unit_vectors
from test_networks import variables_in_order
from torch import Tensor, nn

from compressive.config import METHODS, Bottleneck, Config, Decoder, Network, Target, Views
from compressive.methods import Bootstrap, Contrastive, Step, build
from compressive.objectives import cbyol_loss, csimclr_loss
from compressive.optim import LARS, parameter_groups
from compressive.vmf import VonMisesFisher

# Reduced from the official ones: images, which all four steps share, are there once, names of
# variables once per step; what no test reads (layer outputs, most flags) is left out.
STEPS = golden_json("train_step")
ARRAYS = golden_arrays("train_step")


class Official:
    """z from given noise by TFP's map: a reflection that takes the first axis to mu."""

    def __init__(self, name: str) -> None:
        self.noise = iter([(ARRAYS[f"{name}/noise_w{i}"], ARRAYS[f"{name}/noise_v{i}"]) for i in (0, 1)])

    def __call__(self, e: VonMisesFisher) -> Tensor:
        w, v = next(self.noise)
        mu = e.mean_direction
        s = torch.cat([w[:, None], (1 - w**2).sqrt()[:, None] * v], dim=-1)
        u = F.normalize(F.one_hot(torch.tensor(0), mu.shape[-1]) - mu, dim=-1)
        return s - 2 * (s * u).sum(-1, keepdim=True) * u


def official_method(case: dict[str, Any]) -> Contrastive | Bootstrap:
    flags, name = case["flags"], case["name"]
    method = build(
        Config(
            method={"csimclr": "c-simclr", "cbyol": "c-byol"}.get(name, name),
            network=Network(
                name="resnet18",
                small_stem=True,
                first_shortcut=True,
                biased_variance=True,
                hidden=flags["proj_head_hidden_dim"],
                out=flags["proj_out_dim"],
            ),
            bottleneck=Bottleneck(kappa_e=flags["kappa_e"], kappa_b=flags["kappa_b"]),
            decoder=Decoder(kappa_d=2 * flags["byol_loss_weight"]),
        )
    )
    if name.startswith("c"):
        method.sample = Official(name)
    return method.double()


def head_variables(head: Any, *more: nn.Linear) -> list[Any]:
    """The official order: all trainable ones, then the moving statistics."""
    first, norm, _, last = head
    trained = [first.weight, norm.weight, norm.bias, last.weight, *(one.weight for one in more)]
    return [*trained, norm.running_mean, norm.running_var]


def official_order(method: Any, supervised: nn.Linear) -> list[Tensor]:
    """The tensors of `variables_in_rule_order`."""
    encoder, projection = variables_in_order(method.encoder), head_variables(method.projection)
    last = [supervised.weight, supervised.bias]
    if isinstance(method, Contrastive):
        return [*encoder, *projection, *last]
    assert method.target is not None
    slow: Any = method.target.network
    more = [] if method.decoder is None else [method.decoder]
    told = [] if method.decoder is None else head_variables(method.backward_encoder)
    return [
        *variables_in_order(slow[0]),
        *encoder,
        *projection,
        *head_variables(method.predictor, *more),
        *head_variables(slow[1]),
        *told,
        *last,
    ]


def ruled(i: int, name: str, shape: list[int]) -> np.ndarray:
    """Variable i by the golden rule, in TensorFlow's layout."""
    noise = np.random.RandomState(1000 + i).randn(*shape)
    if "kernel" in name:
        return noise * math.sqrt(1.6 / math.prod(shape[:-1]))
    if "gamma" in name:
        return 1 + 0.1 * noise
    return 1 + 0.2 * np.abs(noise) if "moving_variance" in name else 0.1 * noise


def to_official(tensor: Tensor) -> Tensor:
    """From torch's layout to TensorFlow's; `to_torch` is the way back."""
    return tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T if tensor.ndim == 2 else tensor


def to_torch(tensor: Tensor) -> Tensor:
    return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.T if tensor.ndim == 2 else tensor


def assert_is(ours: Tensor, theirs: dict[str, Any], tolerance: float, name: str) -> None:
    """Norm, first and last entries, to a part of the norm or of the largest entry seen."""
    flat = to_official(ours.detach()).flatten()
    ends = torch.tensor([*theirs["first"], *theirs["last"]], dtype=torch.float64)
    seen = torch.cat([flat[: len(theirs["first"])], flat[len(flat) - len(theirs["last"]) :]])
    assert abs(float(flat.norm()) - theirs["norm"]) <= tolerance * theirs["norm"], name
    assert float((seen - ends).abs().max()) <= tolerance * max(theirs["norm"] / math.sqrt(len(flat)), float(ends.abs().max())), name


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case["name"])
def test_a_step_is_the_official_one(case: dict[str, Any]) -> None:
    flags = case["flags"]
    method = official_method(case)
    supervised = nn.Linear(flags["proj_out_dim"], 10).double()
    held = official_order(method, supervised)
    names = [name for name, _ in case["variables_in_rule_order"]]
    with torch.no_grad():
        for i, (tensor, (name, shape)) in enumerate(zip(held, case["variables_in_rule_order"], strict=True)):
            value = torch.from_numpy(ruled(i, name, shape)).float()
            tensor.copy_(to_torch(value))
    projections: list[Tensor] = []
    method.projection.register_forward_hook(lambda _module, _given, out: projections.append(out.detach()))

    x, y = (ARRAYS[key].permute(0, 3, 1, 2).double() for key in ("x1", "x2"))
    step = method(x, y, flags["ceb_beta"])

    print(float(step.loss.detach()) / case["contrastive_or_byol_loss"] - 1)
    labels = ARRAYS["labels"].repeat(len(projections[0]) // len(x))
    supervised_loss = F.cross_entropy(supervised(projections[0]), labels)
    decay = flags["weight_decay"] / 2 * supervised.weight.square().sum()
    print(float(supervised_loss.detach()) - case["supervised_loss"], float(decay.detach())- case["head_weight_decay"])
    everything = nn.ModuleDict({"method": method, "head_supervised": supervised})
    groups = parameter_groups(everything, weight_decay=flags["weight_decay"], exclude=("head_supervised",))
    optimizer = LARS(groups, lr=case["lr"], momentum=flags["momentum"])
    (step.loss + supervised_loss + decay).backward()
    by_name = dict(zip(names, held, strict=True))
    worst = 0
    for theirs in case["grads"]:
        g = by_name[theirs["name"]].grad
        for t in (1e-12,1e-11,1e-10,1e-9,1e-8,1e-7,1e-6,1e-5,1e-4,1e-3,1):
            try: assert_is(g, theirs, t, theirs["name"]); break
            except AssertionError: pass
        worst=max(worst,t)
    print("grads", worst)
    optimizer.step()
    if case["ema_alpha"] is not None:
        method.update_target(case["ema_alpha"])
    worst = {}
    for name, theirs in zip(names, case["after"], strict=True):
        g = by_name[name]
        for t in (1e-12,1e-11,1e-10,1e-9,1e-8,1e-7,1e-6,1e-5,1e-4,1e-3,1):
            try: assert_is(g, theirs, t, name); break
            except AssertionError: pass
        worst.setdefault(t,[]).append(name)
    print("after", {k:(len(v),v[:5]) for k,v in worst.items()})
    print(step.nll, step.residual, step.movable, step.predictive, case["metrics"])
    assert 0

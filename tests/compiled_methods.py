"""Methods that must compile into one graph, run by test_methods.py without shape checks."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from compressive.config import Config, Network, override
from compressive.methods import build

TINY = Config(network=Network(name="test_resnet", hidden_dim=32, projection_dim=16))


def _encoder() -> nn.Module:
    convolution, pool = nn.Conv2d(3, 96, 3, bias=False), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(convolution, nn.BatchNorm2d(96), nn.ReLU(), pool, nn.Flatten())


def tiny(name: str, *changes: str) -> Any:
    """Return a method around one convolution, which is fast to compile."""
    torch.manual_seed(0)
    method: Any = build(override(TINY, f"method={name}", *changes))
    method.encoder = _encoder()
    if getattr(method, "target", None) is not None:
        method.target.network[0] = _encoder().requires_grad_(False)
    return method


def results(step: Any, method: nn.Module, beta: Tensor) -> list[Tensor]:
    """Return all outputs and gradients of a step in one tensor, with fixed noise."""
    x, y = torch.randn(2, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    method.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16):
        found = step((x, y), beta)
    assert found.feats[0].dtype == torch.bfloat16
    assert found.loss.dtype == found.r.dtype == torch.float32
    found.loss.backward()
    grads = [p.grad.flatten() for p in method.parameters() if p.grad is not None]
    returned = (found.loss, *found.feats, *found[2:], torch.cat(grads))
    return [each.detach().float() for each in returned if each is not None]


def main(names: list[str]) -> None:
    """Compare each compiled method to the eager one under autocast, as in training."""
    torch._dynamo.config.error_on_recompile = True  # pyright: ignore
    torch.set_num_threads(1)
    for name in names:
        torch._dynamo.reset()
        method = tiny(*name.split())
        compiled = torch.compile(method, fullgraph=True, dynamic=False, backend="aot_eager")
        for beta in (torch.tensor(1.0), torch.tensor(0.25)):  # one graph is used for both
            both = [results(step, method, beta) for step in (compiled, method)]
            for graph, eager in zip(*both, strict=True):
                # Sums of bfloat16 gradients are rounded at different points: up to 1 %.
                assert float((graph - eager).norm() / eager.norm()) < 0.03, name
        print(name, "compiles into one graph")


if __name__ == "__main__":
    main(sys.argv[1:])

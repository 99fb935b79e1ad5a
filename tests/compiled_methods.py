"""Methods that must compile into one graph, run by test_methods.py without shape checks."""

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from compressive.config import Config, Network, override
from compressive.methods import build

TINY = Config(network=Network(name="test_resnet", hidden=32, out=16))


def tiny(name: str, *changes: str) -> Any:
    """A method around one convolution: quick, and the same for methods of the same parts."""
    torch.manual_seed(0)
    method: Any = build(override(TINY, f"method={name}", *changes))
    online = [method, "encoder"]
    places = [online] if method.target is None else [online, [method.target.network, "0"]]
    for place in places:
        convolution, pool = nn.Conv2d(3, 96, 3, bias=False), nn.AdaptiveAvgPool2d(1)
        parts = [convolution, nn.BatchNorm2d(96), nn.ReLU(), pool, nn.Flatten()]
        learns = place is online
        setattr(*place, nn.Sequential(*parts).requires_grad_(learns))
    return method


def results(step: Any, method: nn.Module, beta: Tensor, narrow: bool) -> list[Tensor]:
    """Everything a step returns, and all gradients in one tensor; always from the same noise."""
    dtype = next(method.parameters()).dtype
    x, y = torch.randn(2, 8, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    method.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16) if narrow else nullcontext():
        found = step(x, y, beta)
    assert found.loss.dtype == found.r.dtype == dtype
    assert found.feats_x.dtype == torch.bfloat16 if narrow else dtype
    found.loss.backward()
    grads = [p.grad.flatten() for p in method.parameters() if p.grad is not None]
    return [each.detach().to(dtype) for each in (*found, torch.cat(grads)) if each is not None]


def main(backend: str, names: list[str]) -> None:
    """Compare each compiled method with the eager one: in float64, then as it trains."""
    # Inductor draws its own random numbers unless told otherwise.
    torch._inductor.config.fallback_random = True  # pyright: ignore
    torch._dynamo.config.error_on_recompile = True  # pyright: ignore
    torch.set_num_threads(1)
    for name in names:
        # A sum of bfloat16 gradients is rounded at other places once it is fused: 1 %.
        for narrow, tolerance in ((False, 1e-9), (True, 0.05)):
            torch._dynamo.reset()
            method = tiny(name)
            method = method if narrow else method.double()
            compiled = torch.compile(method, fullgraph=True, dynamic=False, backend=backend)
            for beta in (torch.tensor(1.0), torch.tensor(0.25)):  # one graph serves both
                both = [results(step, method, beta, narrow) for step in (compiled, method)]
                for graph, eager in zip(*both, strict=True):
                    gap = float((graph - eager).norm() / eager.norm())
                    assert gap <= tolerance, (name, narrow, gap)
        print(name, "compiles into one graph")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

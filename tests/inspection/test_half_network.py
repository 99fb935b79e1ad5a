"""The fused float16 copy computes the features of the network that it was made from."""

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from compressive.config import Network
from compressive.evaluation.features import forward, network_fingerprint
from compressive.inspection.half_network import HalfNetwork, WinogradConv, half_network
from compressive.networks import build


def images(count: int = 3, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def with_random_statistics(network: nn.Module) -> nn.Module:
    """Give batch norms other values than 0 and 1, so that folding them must be right."""
    random = torch.Generator().manual_seed(1)
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(generator=random)
            part.running_var.uniform_(0.5, 2, generator=random)
            part.weight.data.uniform_(0.5, 2, generator=random)
            part.bias.data.normal_(generator=random)
    return network.eval().requires_grad_(False)


@pytest.mark.parametrize("sides", [(8, 8), (5, 7), (1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_winograd_equals_the_convolution(sides: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 5, 3, padding=1, bias=bias).double()
    made = WinogradConv(conv).double()
    some = torch.randn(2, 6, *sides, dtype=torch.float64)
    assert torch.allclose(made(some), conv(some), atol=1e-6)


def test_features_of_a_residual_network_are_equal_up_to_rounding() -> None:
    network = with_random_statistics(build(Network(name="resnet18", stem="cifar"), 32))
    before = network_fingerprint(network)
    made = half_network(network, images())
    assert made is not None
    kinds = [type(part) for part in made.modules()]
    assert nn.BatchNorm2d not in kinds
    assert kinds.count(WinogradConv) == 6  # of layer3 and layer4
    assert next(made.parameters()).dtype == torch.float16
    found = forward(HalfNetwork(network), images(5), torch.float16)
    expected = network(images(5))
    assert (F.cosine_similarity(found, expected) > 0.9999).all()
    assert found.dtype == torch.float32
    assert network_fingerprint(network) == before


class Shared(nn.Module):
    """Uses one convolution twice, once with and once without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, some: Tensor) -> Tensor:
        return self.conv(self.norm(self.conv(some))).flatten(1)


class Branching(nn.Module):
    """Cannot be traced: a branch depends on values."""

    def forward(self, some: Tensor) -> Tensor:
        return (some if some.sum() > 0 else -some).flatten(1)


class Misleading(nn.Module):
    """Traces to other features than it computes."""

    def forward(self, some: Tensor) -> Tensor:
        return some.flatten(1).roll(int(isinstance(some, fx.Proxy)), 1)


def test_a_convolution_that_is_used_twice_is_not_fused() -> None:
    network = with_random_statistics(Shared())
    made = half_network(network, images())
    assert made is not None
    assert nn.BatchNorm2d in [type(part) for part in made.modules()]


@pytest.mark.parametrize("kind", [Branching, Misleading])
def test_a_network_that_cannot_be_copied_computes_itself(kind: type[nn.Module]) -> None:
    network = kind().eval()
    assert half_network(network, images()) is None
    assert torch.equal(HalfNetwork(network)(images()), network(images()))  # not in float16

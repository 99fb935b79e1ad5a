"""Compare cuDNN's fused convolutions with what torch runs in the forward pass of a ResNet-50.

    python benchmarks/fused_convolutions.py    # needs CUDA and the package nvidia-cudnn-frontend

A batch norm and ReLU before a convolution can be applied while its input is read, and the sums that
the next batch norm needs can be taken while its output is written. cuDNN has kernels that do this.
For each shape of a ResNet-50 (512 views of 224 pixels), this times the fused kernel against a
compiled batch norm with ReLU, the convolution, and compiled sums. Prints one JSON line with the
milliseconds per layer and the totals over all layers of the network.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from timing import environment, race

VIEWS = 512


class Shape(NamedTuple):
    """A convolution of the network; `layers` have it. `normalizes`: its input is not yet normal."""

    channels: int
    out: int
    side: int
    kernel: int
    stride: int
    normalizes: bool
    layers: int


# The layers of ResNet-50 by their shapes. The first convolution of a block reads the sum of the
# residual branch, which must be written anyway: there the norm before it is not fused.
SHAPES = [
    *(
        shape
        for width, side, blocks in ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))
        for shape in (
            Shape(4 * width, width, side, 1, 1, False, blocks - 1),
            Shape(width, width, side, 3, 1, True, blocks if width == 64 else blocks - 1),
            Shape(width, 4 * width, side, 1, 1, True, blocks),
        )
    ),
    *(Shape(w, w, 2 * side, 3, 2, True, 1) for w, side in ((128, 28), (256, 14), (512, 7))),
]


def tensors(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random input, weight, and scale and bias of the norm before the convolution."""
    options: Any = {"device": "cuda", "dtype": dtype}
    x = torch.randn(VIEWS, shape.channels, shape.side, shape.side, **options)
    weight = torch.randn(shape.out, shape.channels, shape.kernel, shape.kernel, **options)
    scale, bias = (torch.rand(1, shape.channels, 1, 1, **options) + 0.5 for _ in range(2))
    last = torch.channels_last
    return x.to(memory_format=last), 0.05 * weight.to(memory_format=last), scale, bias


@torch.compile(dynamic=False)
def normalize(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Apply a norm with known statistics, and ReLU."""
    return torch.relu(x.float() * scale.float() + bias.float()).to(x.dtype)


@torch.compile(dynamic=False)
def sums(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return what batch norm needs: the sums of values and of squares per channel."""
    return y.float().sum((0, 2, 3)), y.float().square().sum((0, 2, 3))


def separate(shape: Shape, dtype: torch.dtype) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Return what torch does today, in up to three kernels."""
    x, weight, scale, bias = tensors(shape, dtype)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        z = normalize(x, scale, bias) if shape.normalizes else x
        y = F.conv2d(z, weight, stride=shape.stride, padding=shape.kernel // 2)
        return y, *sums(y)

    return run


def fused(shape: Shape, dtype: torch.dtype, handle: Any) -> Callable[[], tuple[Tensor, ...]]:
    """Return the same in one kernel of cuDNN; raises an exception if it has none."""
    import cudnn  # pyright: ignore[reportMissingImports]

    x, weight, scale, bias = tensors(shape, dtype)
    kind = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}[dtype]
    graph = cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=kind,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )

    def declared(name: str, value: Tensor) -> Any:
        sizes: Any = {"dim": list(value.size()), "stride": list(value.stride())}
        return graph.tensor(name=name, **sizes, data_type=kind)

    given = {"x": x, "weight": weight, "scale": scale, "bias": bias}
    nodes = {name: declared(name, value) for name, value in given.items()}
    image = nodes["x"]
    if shape.normalizes:
        image = graph.scale(name="norm", input=image, scale=nodes["scale"])
        image = graph.bias(name="shift", input=image, bias=nodes["bias"])
        image = graph.relu(name="relu", input=image)
    else:
        del given["scale"], given["bias"]
    pad = 2 * [shape.kernel // 2]
    y_node = graph.conv_fprop(
        image=image,
        weight=nodes["weight"],
        padding=pad,
        stride=2 * [shape.stride],
        dilation=[1, 1],
    )
    y_node.set_output(True)
    sum_node, square_node = graph.genstats(name="sums", input=y_node)
    for node in (sum_node, square_node):
        node.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    side = shape.side // shape.stride
    y = torch.empty(VIEWS, shape.out, side, side, device="cuda", dtype=dtype)
    y = y.to(memory_format=torch.channels_last)
    total, squares = (torch.zeros(1, shape.out, 1, 1, device="cuda") for _ in range(2))
    workspace = torch.empty(max(graph.get_workspace_size(), 1), device="cuda", dtype=torch.uint8)
    values = {nodes[name]: value for name, value in given.items()}
    values |= {y_node: y, sum_node: total, square_node: squares}

    def run() -> tuple[Tensor, ...]:
        graph.execute(values, workspace, handle=handle)
        return y, total.flatten(), squares.flatten()

    return run


def compare(shape: Shape, dtype: torch.dtype, handle: Any, rounds: int) -> dict[str, Any]:
    """Time one shape; report why if cuDNN cannot fuse it."""
    torch.manual_seed(0)
    today = separate(shape, dtype)
    try:
        torch.manual_seed(0)
        ours = fused(shape, dtype, handle)
        got, expected = ours(), today()
        torch.cuda.synchronize()
    except Exception as error:  # cudnn has its own kinds of errors
        ms = race({"separate": today}, "cuda", rounds)
        return {**ms, "error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    worst = max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(got, expected, strict=True)
    )
    return {**race({"separate": today, "fused": ours}, "cuda", rounds), "difference": worst}


def main() -> None:
    """Compare all shapes in both formats and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    import cudnn  # pyright: ignore[reportMissingImports]

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    torch._dynamo.config.recompile_limit = 64
    found: dict[str, Any] = {"cudnn": cudnn.backend_version()}
    for dtype in (torch.bfloat16, torch.float16):
        rows = []
        for shape in SHAPES:
            rows.append({**shape._asdict(), **compare(shape, dtype, handle, arguments.rounds)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        name = str(dtype).removeprefix("torch.")
        found[name] = {
            "rows": rows,
            "separate ms, all layers": sum(row["separate"] * row["layers"] for row in rows),
            "ms with fused kernels where they are faster": sum(
                min(row["separate"], row.get("fused", row["separate"])) * row["layers"]
                for row in rows
            ),
        }
    print(json.dumps({**environment("cuda"), **found}))


if __name__ == "__main__":
    main()

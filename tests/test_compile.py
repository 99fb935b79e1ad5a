"""torch.compile(fullgraph=True) gives one graph and the eager numbers.

Tests run in a subprocess: jaxtyping's runtime checks, active in this process, cannot be traced.
"""

from pathlib import Path

import pytest
import torch
from processes import printed

from compressive.distributions.tracing import traced_as_constant

SCRIPT = Path(__file__).parent / "compiled.py"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param({"fixed": "aot_eager", "objectives": "aot_eager"}, marks=pytest.mark.slow),
        pytest.param({"objectives": "inductor"}, marks=pytest.mark.stress),
        pytest.param({"learned": "aot_eager", "small": "aot_eager"}, marks=pytest.mark.stress),
    ],
    ids=" ".join,
)
def test_objectives_and_sampling_compile_into_one_graph(names: dict[str, str]) -> None:
    words = [f"{name}={backend}" for name, backend in names.items()]
    output = printed(SCRIPT.read_text(), *words, name=str(SCRIPT))
    assert output.splitlines() == [f"{name} compiles into one graph" for name in names]


def test_compiler_marker_matches_torchs() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    traced_as_constant(ours)
    torch.compiler.assume_constant_result(theirs)
    assert ours.__dict__ == theirs.__dict__

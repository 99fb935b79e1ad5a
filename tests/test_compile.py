"""torch.compile(fullgraph=True): one graph, the eager numbers.

In a process of its own: jaxtyping's run-time checks, on in this one, do not trace.
"""

import subprocess
import sys
from pathlib import Path

import torch

from compressive.vmf import _known_while_compiling

SCRIPT = Path(__file__).parent / "compiled.py"


def test_everything_compiles_into_one_graph() -> None:
    names = {"learned": "aot_eager", "small": "aot_eager"}
    names |= {"fixed": "inductor", "objectives": "inductor"}
    words = [f"{name}={backend}" for name, backend in names.items()]
    run = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *words],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == [f"{name} compiles into one graph" for name in names]


def test_our_mark_for_the_compiler_is_torchs() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    _known_while_compiling(ours)
    torch.compiler.assume_constant_result(theirs)
    assert ours.__dict__ == theirs.__dict__

"""The programs in examples/ run, their losses fall, and peers' losses equal ours at beta = 0.

lightly, Lightning and stable-pretraining are too large for the dev group: docs/training-loops.md
names the versions with which these tests were run.
"""

import importlib
import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compressive.objectives import simclr_loss

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PACKAGES = {
    "plain_loop": "torch",
    "lightly_simclr": "lightly",
    "lightning_lars": "lightning",
    "stable_pretraining_loss": "stable_pretraining",
}


def example(name: str) -> ModuleType:
    """Import an example; the warnings of its packages are not ours."""
    package = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_and_shown() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(PACKAGES)
    page = (ROOT / "docs" / "training-loops.md").read_text()
    for name in PACKAGES:
        assert f"examples/{name}.py" in page


def test_plain_loop() -> None:
    losses = example("plain_loop").main(6, compiled=False)
    assert losses[-1] < losses[0]


@pytest.mark.stress  # compiles for 20 to 45 s
def test_plain_loop_compiled() -> None:
    import torch._inductor.config as inductor

    module = example("plain_loop")
    # Without this, compiled code draws other random numbers for z.
    with inductor.patch(fallback_random=True):
        compiled = module.main(4)
    eager = module.main(4, compiled=False)
    assert compiled == pytest.approx(eager, rel=1e-3)  # float32 in another order, over four steps
    assert compiled[-1] < compiled[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "plain_loop"])
def test_losses_of_examples_with_other_packages_fall(name: str) -> None:
    losses = example(name).main(8)
    assert len(losses) == 8
    assert min(losses[-3:]) < losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", ["lightly", "stable_pretraining"])
def test_losses_of_peers_are_half_of_ours(package: str) -> None:
    """They average the two directions, and we sum them."""
    pytest.importorskip(package)
    x, y = torch.randn(2, 12, 16)
    places = {"lightly": ("loss", "NTXentLoss"), "stable_pretraining": ("losses", "NTXEntLoss")}
    module, name = places[package]
    theirs = getattr(importlib.import_module(f"{package}.{module}"), name)(temperature=0.2)(x, y)
    ours = simclr_loss(x, y, temperature=0.2).loss / 2
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)

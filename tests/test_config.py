"""Settings: JSON, changes by name, one-line errors, and use of every setting by the code."""

import ast
import json
import random
import typing
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressive import config as config_module
from compressive.config import (
    METHODS,
    Bottleneck,
    Config,
    Optim,
    flat,
    from_dict,
    is_compressed,
    method_info,
    override,
)

PACKAGE = Path(config_module.__file__).parent
SECTIONS = {f.name: f.type for f in fields(Config) if is_dataclass(f.type)}
HINTS = {name: hint for name, hint in typing.get_type_hints(Config).items() if name not in SECTIONS}
for _home, _kind in SECTIONS.items():
    HINTS |= {f"{_home}.{k}": hint for k, hint in typing.get_type_hints(_kind).items()}
LITERALS = [name for name, hint in HINTS.items() if typing.get_origin(hint) is Literal]


def refusal(call: Any, *args: Any, **options: Any) -> str:
    """Return the message of a ValueError, which must be one line."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        call(*args, **options)
    return str(caught.value)


def has(message: str, *parts: str) -> bool:
    return all(part in message for part in parts)


# Values that differ from the defaults, at least one for each type, and their parsed form.
CHANGES = {
    "seed=7": 7,
    "method=c-byol": "c-byol",
    "data.source=/a b/c=d": "/a b/c=d",
    "data.limit=1_000": 1000,
    "views.antialias=True": True,
    "network.zero_init_last=FALSE": False,
    "bottleneck.beta=1e-2": 0.01,
    "bottleneck.kappa_e=16384": 16384.0,
    "bottleneck.target_residual=2.5": 2.5,
    "optim.lr = 0.3 ": 0.3,
    "optim.name=adamw": "adamw",
    "train.batch_size=4096": 4096,
}


@pytest.mark.parametrize(("change", "value"), CHANGES.items())
def test_override_sets_exactly_one_setting(change: str, value: Any) -> None:
    before = flat(Config())
    after = flat(override(Config(), change))
    name = change.partition("=")[0].strip()
    assert after[name] == value
    assert type(after[name]) is type(value)
    assert {k: v for k, v in after.items() if k != name} == {
        k: v for k, v in before.items() if k != name
    }


def test_optional_setting_can_be_reset_to_none() -> None:
    changed = override(Config(), "bottleneck.target_residual=3")
    assert override(changed, "bottleneck.target_residual=none") == Config()
    assert override(changed, "bottleneck.target_residual=null") == Config()


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sets(st.sampled_from(sorted(CHANGES))))
def test_config_round_trips_through_json(chosen: set[str]) -> None:
    config = override(Config(), *chosen)
    text = json.dumps(asdict(config))
    assert from_dict(json.loads(text)) == config
    assert json.dumps(asdict(from_dict(json.loads(text)))) == text
    assert json.loads(text) == asdict(config)


def test_missing_settings_are_defaults_and_integers_become_floats() -> None:
    config = from_dict({"optim": {"lr": 1}})
    assert config == replace(Config(), optim=Optim(lr=1.0))
    assert type(config.optim.lr) is float
    assert from_dict({}) == Config()


@pytest.mark.parametrize(
    "changes",
    [
        ("bottleneck.stochastic=false", "bottleneck.residual_estimator=analytic"),
        ("views.policy=simclr", "views.strength=0.5"),
        ("train.grad_accum_steps=8", "method=byol", "train.batch_size=4096"),
        (
            "bottleneck.schedule=cosine",
            "bottleneck.schedule=constant",
            "bottleneck.target_residual=2",
        ),
        ("network.variant=official", "network.stem=cifar", "network.variant=timm"),
        ("bottleneck.schedule=adaptive", "bottleneck.target_residual=2"),
    ],
)
def test_order_of_changes_does_not_matter(changes: tuple[str, ...]) -> None:
    """If one setting is changed twice, the last change counts."""
    names = [change.partition("=")[0] for change in changes]
    orders = [list(changes)]
    if len(set(names)) == len(names):
        orders += [list(reversed(changes)), random.Random(0).sample(changes, len(changes))]
    results = {json.dumps(asdict(override(Config(), *order))) for order in orders}
    assert len(results) == 1


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("optim.lr", "NAME=VALUE 'optim.lr'"),
        ("optim.lrr=1", "'optim.lrr' optim.lr? momentum trust_coefficient"),
        ("otpim.lr=1", "'otpim.lr' optim.lr?"),
        ("beta=0.1", "'beta' bottleneck.beta?"),
        ("lr=0.1", "'lr' optim.lr probe.lr?"),
        ("optim.lr.x=1", "'optim.lr.x' optim.lr"),
        ("optim=1", "optim name, lr, momentum,"),
        ("optim.lr=fast", "optim.lr number 'fast'"),
        ("train.batch_size=1.5", "train.batch_size whole number '1.5'"),
        ("views.antialias=1", "views.antialias true false '1'"),
        ("views.policy=moco", "views.policy byol simclr 'moco'"),
        ("optim.lr=0", "optim.lr above 0 0.0"),
        ("optim.lr=inf", "optim.lr finite inf"),
        ("optim.lr=nan", "optim.lr above 0 nan"),
        ("bottleneck.beta=-1", "bottleneck.beta 0 more -1.0"),
        ("optim.warmup_epochs=inf", "optim.warmup_epochs finite inf"),
        ("views.size=7", "views.size 8 more 7"),
        ("views.crop_scale_min=1.5", "views.crop_scale_min above 0 most 1, 1.5"),
        ("target.ema_decay=1.1", "target.ema_decay 0 most 1, 1.1"),
        ("seed=-1", "seed 0 4294967295 -1"),
        ("seed=4294967296", "seed 0 4294967295 4294967296"),
        ("views.strength=0.5", "views.strength views.policy=simclr 0.5"),
        (
            "bottleneck.target_residual=2 bottleneck.schedule=cosine",
            "bottleneck.target_residual bottleneck.schedule constant adaptive 'cosine'",
        ),
        ("bottleneck.schedule=late", "bottleneck.schedule constant adaptive 'late'"),
        ("bottleneck.adaptive_weight=all", "bottleneck.adaptive_weight likelihood rank 'all'"),
        ("bottleneck.target_residual=2 method=byol", "bottleneck.target_residual 2 byol c-byol"),
        ("bottleneck.target_residual=2 method=dcl", "bottleneck.target_residual 2 dcl"),
        (
            "train.grad_accum_steps=3 method=byol",
            "train.grad_accum_steps 3 train.batch_size 512",
        ),
        ("train.grad_accum_steps=2", "train.grad_accum_steps 1 c-simclr 2"),
    ],
)
def test_invalid_change_error_has_name_value_and_allowed_values(change: str, parts: str) -> None:
    assert has(refusal(override, Config(), *change.split()), *parts.split())


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"data": 3}, "data 3"),
        ({"target": {"tau": 1}}, "'target.tau' ema_decay independent"),
        ({"optim": {"lr": "0.3"}}, "optim.lr float '0.3'"),
        ({"optim": {"lr": True}}, "optim.lr float True"),
        ({"train": {"batch_size": 512.0}}, "train.batch_size int 512.0"),
        ({"train": {"tensorboard": 1}}, "train.tensorboard bool 1"),
        ({"data": {"source": None}}, "data.source str None"),
        ({"bottleneck": {"target_residual": "2"}}, "bottleneck.target_residual float null '2'"),
        ({"views": {"policy": ["byol"]}}, "views.policy byol simclr ['byol']"),
    ],
)
def test_file_with_an_invalid_setting_is_rejected(settings: Any, parts: str) -> None:
    assert has(refusal(from_dict, settings), *parts.split())


@pytest.mark.parametrize("name", LITERALS)
def test_choice_accepts_only_its_values(name: str) -> None:
    """Check the command line and files."""
    values = typing.get_args(HINTS[name])
    section, _, leaf = name.rpartition(".")
    for value in values:
        assert flat(override(Config(), f"{name}={value}"))[name] == value
    for message in (
        refusal(override, Config(), f"{name}=nonsense"),
        refusal(from_dict, {section: {leaf: "nonsense"}}),
    ):
        assert has(message, name, *values, "'nonsense'")


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("method", "swav", [*METHODS, "'swav'"]),
        ("optim.name", "adam", ["lars", "sgd", "adamw", "'adam'"]),
        ("optim.lr", -1.0, ["above 0", "-1.0"]),
        ("data", 3, ["Data", "3"]),
        ("network.name", 50, ["str", "50"]),
        ("seed", 1.5, ["int", "1.5"]),
    ],
)
def test_config_built_in_python_is_checked_for_types_and_bounds(
    name: str, value: Any, parts: list[str]
) -> None:
    """beartype checks the constructor in tests, so the value is set after it."""
    config = Config()
    section, _, leaf = name.rpartition(".")
    object.__setattr__(getattr(config, section) if section else config, leaf, value)
    assert has(refusal(config.__post_init__), name, *parts)


def test_section_built_in_python_is_checked() -> None:
    assert has(refusal(Optim, lr=-1.0), "optim.lr", "-1.0")


def test_numpy_numbers_are_accepted_as_floats() -> None:
    """They come from np.linspace, for example."""
    config = Config(bottleneck=Bottleneck(beta=np.float64(0.25)))
    assert from_dict(json.loads(json.dumps(asdict(config)))) == config


def test_config_is_immutable() -> None:
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.optim.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_flat_lists_every_setting_once() -> None:
    names = flat(Config())
    assert list(names) == [
        name
        for f in fields(Config)
        for name in (
            [f"{f.name}.{inner.name}" for inner in fields(SECTIONS[f.name])]
            if f.name in SECTIONS
            else [f.name]
        )
    ]
    assert set(names) == set(HINTS)


def test_method_determines_compression_and_contrast() -> None:
    configs = {method: override(Config(), f"method={method}") for method in METHODS}
    kinds = {m: (method_info(c).compares_images, is_compressed(c)) for m, c in configs.items()}
    assert kinds == {
        "simclr": (True, False),
        "c-simclr": (True, True),
        "byol": (False, False),
        "c-byol": (False, True),
        "moco-v3": (True, False),
        "c-moco-v3": (True, True),
        "simsiam": (False, False),
        "c-simsiam": (False, True),
        "dcl": (True, False),
        "vicreg": (True, False),
    }


@pytest.mark.slow
def test_every_number_has_bounds() -> None:
    """-1, infinity and NaN are rejected for every number."""
    for name, hint in HINTS.items():
        if hint in (int, float, float | None):
            assert refusal(override, Config(), f"{name}=-1").startswith(name)
        if hint in (float, float | None):
            assert refusal(override, Config(), f"{name}=inf").startswith(name)
            assert refusal(override, Config(), f"{name}=nan").startswith(name)


# Find the settings that source code reads.

KINDS = {name.title(): name for name in SECTIONS}


def settings_read(source: str) -> set[str]:
    """Return the settings that code reads, such as `config.optim.lr` or `.lr` of a section.

    A name is a section if it is a parameter annotated with `Optim`, or was assigned `....optim` or
    such a name; `asdict(section)` reads all of it.
    """
    tree = ast.parse(source)
    names: dict[str, set[str]] = {}  # one name may be different sections in two functions
    for _ in range(2):  # the second pass follows names assigned from names
        for name, home in list(_called(tree, names)):
            names.setdefault(name, set()).add(home)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= {f"{home}.{node.attr}" for home in _homes(node.value, names)}
            found |= {node.attr} if _last(node.value) == "config" else set()
        elif isinstance(node, ast.Call) and _last(node.func) in ("asdict", "vars"):
            homes = set().union(*(_homes(arg, names) for arg in node.args))
            found |= {name for name in HINTS if name.partition(".")[0] in homes}
    return found & set(HINTS)


def _last(node: ast.AST) -> str:
    """Return `c` of a.b.c and of c."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _homes(node: ast.AST, names: dict[str, set[str]]) -> set[str]:
    """Return the sections that an expression may be."""
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
        return {node.attr}
    return names.get(_last(node), set())


def _called(tree: ast.AST, names: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield variables and attributes that hold a section."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation:
            kind = ast.unparse(node.annotation).split(".")[-1]
            if kind in KINDS:
                yield node.arg, KINDS[kind]
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for left, right in pairs:
                for home in _homes(right, names):
                    yield _last(left), home


def test_settings_read_finds_only_reads() -> None:
    assert settings_read("x = config.optim.lr") == {"optim.lr"}
    assert settings_read("x = self.config.seed") == {"seed"}
    assert settings_read("o, v = config.optim, config.views\nf(o.trust_coefficient, v.size)") == {
        "optim.trust_coefficient",
        "views.size",
    }
    assert settings_read("def f(probe: config.Probe): return probe.bank") == {"probe.bank"}
    kept = "def f(self, s: Health):\n self._s = s\ndef g(self): return self._s.spike_sigma"
    assert settings_read(kept) == {"health.spike_sigma"}
    assert settings_read("f(**asdict(config.target))") == {"target.ema_decay", "target.independent"}
    assert not settings_read("FREE = {'optim.lr'}\nseed = 1\nx = model.lr\ny = config.optim")


@pytest.mark.slow
def test_every_setting_is_read_by_some_module() -> None:
    others = [p for p in PACKAGE.rglob("*.py") if p.stem != "config" and "recipes" not in p.parts]
    read = set().union(*(settings_read(path.read_text()) for path in others))
    # `recipe` is only recorded in config.json.
    unread = set(HINTS) - read - {"recipe"}
    assert not unread, f"no module reads {', '.join(sorted(unread))}"


def test_misspelled_value_suggests_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"method .*'simcrl'.* simclr\?$"):
        override(Config(), "method=simcrl")

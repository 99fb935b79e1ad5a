"""Settings: in and out of JSON, changed by name, refused in one line, each read by someone."""

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

from compressive import config as room
from compressive.config import (
    METHODS,
    Bottleneck,
    Config,
    Optim,
    flat,
    from_dict,
    is_compressed,
    is_contrastive,
    override,
)

PACKAGE = Path(room.__file__).parent
SECTIONS = {f.name: f.type for f in fields(Config) if is_dataclass(f.type)}
HINTS = {name: hint for name, hint in typing.get_type_hints(Config).items() if name not in SECTIONS}
for _home, _kind in SECTIONS.items():
    HINTS |= {f"{_home}.{k}": hint for k, hint in typing.get_type_hints(_kind).items()}
LITERALS = [name for name, hint in HINTS.items() if typing.get_origin(hint) is Literal]


def refusal(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(
        ValueError, match=r"must|no setting|section|belongs|has no z|steers"
    ) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Other values than the defaults, at least one for each type of setting, with what they must be.
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
def test_a_setting_is_changed_by_name_and_nothing_else_is(change: str, value: Any) -> None:
    before = flat(Config())
    after = flat(override(Config(), change))
    name = change.partition("=")[0].strip()
    assert after[name] == value
    assert type(after[name]) is type(value)
    assert {k: v for k, v in after.items() if k != name} == {
        k: v for k, v in before.items() if k != name
    }


def test_a_setting_that_may_be_none_can_be_set_back() -> None:
    changed = override(Config(), "bottleneck.target_residual=3")
    assert override(changed, "bottleneck.target_residual=none") == Config()
    assert override(changed, "bottleneck.target_residual=null") == Config()


@settings(max_examples=30)
@given(st.sets(st.sampled_from(sorted(CHANGES))))
def test_json_gives_back_the_same_config(chosen: set[str]) -> None:
    config = override(Config(), *chosen)
    text = json.dumps(asdict(config))
    assert from_dict(json.loads(text)) == config
    assert json.dumps(asdict(from_dict(json.loads(text)))) == text
    assert json.loads(text) == asdict(config)


def test_what_a_file_leaves_out_is_the_default_and_whole_numbers_may_stand_for_floats() -> None:
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
    ],
)
def test_settings_that_belong_together_may_come_in_any_order(changes: tuple[str, ...]) -> None:
    """Only the last of two values for one name counts, so those keep their order."""
    names = [change.partition("=")[0] for change in changes]
    orders = [list(changes)]
    if len(set(names)) == len(names):
        orders += [list(reversed(changes)), random.Random(0).sample(changes, len(changes))]
    results = {json.dumps(asdict(override(Config(), *order))) for order in orders}
    assert len(results) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optim.lr"], "a change must be NAME=VALUE, such as optim.lr=0.3, got 'optim.lr'"),
        (
            ["optim.lrr=1"],
            "no setting 'lrr' in Optim; did you mean lr? there are name, lr, momentum, "
            "weight_decay, trust_coefficient, warmup_epochs",
        ),
        (
            ["otpim.lr=1"],
            "no setting 'otpim'; did you mean optim? `compressive settings` lists all",
        ),
        (["beta=0.1"], "no setting 'beta'; did you mean bottleneck.beta?"),
        (["lr=0.1"], "no setting 'lr'; did you mean optim.lr or probe.lr?"),
        (["optim.lr.x=1"], "optim.lr is no section"),
        (
            ["optim=1"],
            "optim is a section; it has name, lr, momentum, weight_decay, trust_coefficient, "
            "warmup_epochs",
        ),
        (["optim.lr=fast"], "optim.lr must be a number, got 'fast'"),
        (["train.batch_size=1.5"], "train.batch_size must be a whole number, got '1.5'"),
        (["views.antialias=1"], "views.antialias must be true or false, got '1'"),
        (["views.policy=moco"], "views.policy must be one of byol, simclr, got 'moco'"),
        (["optim.lr=0"], "optim.lr must be above 0, got 0.0"),
        (["optim.lr=inf"], "optim.lr must be finite, got inf"),
        (["optim.lr=nan"], "optim.lr must be above 0, got nan"),
        (["bottleneck.beta=-1"], "bottleneck.beta must be 0 or more, got -1.0"),
        (["optim.warmup_epochs=inf"], "optim.warmup_epochs must be finite, got inf"),
        (["views.size=7"], "views.size must be 8 or more, got 7"),
        (
            ["views.crop_scale_min=1.5"],
            "views.crop_scale_min must be above 0 and at most 1, got 1.5",
        ),
        (["target.ema_decay=1.1"], "target.ema_decay must be 0 or more and at most 1, got 1.1"),
        (["seed=-1"], "seed must be 0 or more and at most 4294967295, got -1"),
        (["seed=4294967296"], "seed must be 0 or more and at most 4294967295, got 4294967296"),
        (
            ["views.strength=0.5"],
            "views.strength belongs to views.policy=simclr; the paper's is fixed",
        ),
        (
            ["bottleneck.target_residual=2", "bottleneck.schedule=cosine"],
            "bottleneck.target_residual steers beta: schedule must be constant",
        ),
        (
            ["train.grad_accum_steps=3", "method=byol"],
            "train.grad_accum_steps must divide train.batch_size, 512, got 3",
        ),
        (
            ["train.grad_accum_steps=2"],
            "train.grad_accum_steps must be 1 for c-simclr, whose images are each other's "
            "negatives; "
            "lower train.batch_size, or use more processes",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_refused_change_says_what_is_allowed(changes: list[str], message: str) -> None:
    assert refusal(override, Config(), *changes) == message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": 3}, "data must be an object of settings, got 3"),
        (
            {"target": {"tau": 1}},
            "no setting 'tau' in Target; there are ema_decay, independent",
        ),
        ({"optim": {"lr": "0.3"}}, "optim.lr must be of type float, got '0.3'"),
        ({"optim": {"lr": True}}, "optim.lr must be of type float, got True"),
        ({"train": {"batch_size": 512.0}}, "train.batch_size must be of type int, got 512.0"),
        ({"train": {"tensorboard": 1}}, "train.tensorboard must be of type bool, got 1"),
        ({"data": {"source": None}}, "data.source must be of type str, got None"),
        (
            {"bottleneck": {"target_residual": "2"}},
            "bottleneck.target_residual must be of type float or null, got '2'",
        ),
        ({"views": {"policy": ["byol"]}}, "views.policy must be one of byol, simclr, got ['byol']"),
    ],
)
def test_a_file_with_a_wrong_setting_is_refused(wrong: Any, message: str) -> None:
    assert refusal(from_dict, wrong) == message


@pytest.mark.parametrize("name", LITERALS)
def test_a_choice_takes_each_of_its_words_and_no_other(name: str) -> None:
    """On the command line, from a file, and made by hand."""
    words = typing.get_args(HINTS[name])
    section, _, leaf = name.rpartition(".")
    for word in words:
        helper = ["bottleneck.stochastic=true"]
        assert flat(override(Config(), f"{name}={word}", *helper))[name] == word
    said = f"{name} must be one of {', '.join(words)}, got 'nonsense'"
    assert refusal(override, Config(), f"{name}=nonsense") == said
    value = {leaf: "nonsense"}
    assert refusal(from_dict, {section: value} if section else value) == said


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("method", "swav", f"method must be one of {', '.join(METHODS)}, got 'swav'"),
        ("optim.name", "adam", "optim.name must be one of lars, sgd, adamw, got 'adam'"),
        ("data", 3, "data must be of type Data, got 3"),
        ("network.name", 50, "network.name must be of type str, got 50"),
        ("seed", 1.5, "seed must be of type int, got 1.5"),
    ],
)
def test_a_config_made_by_hand_is_held_to_the_same_types(
    name: str, value: Any, message: str
) -> None:
    """In tests beartype would speak first, so the value is slipped in behind the constructor."""
    config = Config()
    section, _, leaf = name.rpartition(".")
    object.__setattr__(getattr(config, section) if section else config, leaf, value)
    assert refusal(config.__post_init__) == message


def test_numpy_numbers_may_stand_for_floats() -> None:
    """As in a sweep over np.linspace."""
    config = Config(bottleneck=Bottleneck(beta=np.float64(0.25)))
    assert from_dict(json.loads(json.dumps(asdict(config)))) == config


def test_a_config_cannot_be_changed_in_place() -> None:
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.optim.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]


def test_flat_names_every_setting_once() -> None:
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


def test_methods_fall_into_four_kinds() -> None:
    configs = {method: override(Config(), f"method={method}") for method in METHODS}
    kinds = {m: (is_contrastive(c), is_compressed(c)) for m, c in configs.items()}
    assert kinds == {
        "simclr": (True, False),
        "c-simclr": (True, True),
        "byol": (False, False),
        "c-byol": (False, True),
        "moco-v3": (True, False),
        "c-moco-v3": (True, True),
        "simsiam": (False, False),
        "c-simsiam": (False, True),
    }


def test_every_number_has_bounds() -> None:
    """Minus one, infinity and NaN are refused everywhere."""
    for name, hint in HINTS.items():
        if hint in (int, float, float | None):
            assert refusal(override, Config(), f"{name}=-1").startswith(name)
        if hint in (float, float | None):
            assert refusal(override, Config(), f"{name}=inf").startswith(name)
            assert refusal(override, Config(), f"{name}=nan").startswith(name)


# Which settings a source text reads.

KINDS = {name.title(): name for name in SECTIONS}


def settings_read(source: str) -> set[str]:
    """Dotted settings that a text reads: `config.optim.lr`, or `.lr` of what is called a section.

    A name is a section's if it is a parameter annotated with `Optim`, or was assigned `....optim`
    or such a name; `asdict(section)` reads all of it.
    """
    tree = ast.parse(source)
    names: dict[str, set[str]] = {}  # two functions may call two sections by one name
    for _ in range(2):  # a second look follows a name that was given on
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
    """`c` of a.b.c and of c."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _homes(node: ast.AST, names: dict[str, set[str]]) -> set[str]:
    """The sections that an expression may stand for."""
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
        return {node.attr}
    return names.get(_last(node), set())


def _called(tree: ast.AST, names: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Names of variables and attributes that stand for a section."""
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


def test_the_reader_below_sees_reads_and_only_reads() -> None:
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


def test_every_setting_is_read_by_someone() -> None:
    """A setting that nothing reads is a promise that nothing keeps."""
    others = [p for p in PACKAGE.rglob("*.py") if p.stem not in ("config", "recipes", "paper")]
    read = set().union(*(settings_read(path.read_text()) for path in others))
    # `recipe` is only for people; it lies in config.json.
    unread = set(HINTS) - read - {"recipe"}
    assert not unread, f"nothing reads {', '.join(sorted(unread))}"

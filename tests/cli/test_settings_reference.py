"""The settings reference agrees with the config, its errors, and docs/settings.md."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.cli.settings_reference import Setting, find, markdown, sections
from compressive.config import Config, flat, override

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
SETTINGS = {setting.name: setting for section in sections() for setting in section.settings}


def test_settings_document_is_up_to_date() -> None:
    run = CliRunner().invoke(app, ["settings", "--markdown"])
    assert run.exit_code == 0
    assert DOCUMENT.read_text() == run.stdout, "compressive settings --markdown > docs/settings.md"


def test_every_setting_is_listed_once_in_order() -> None:
    assert list(SETTINGS) == list(flat(Config()))
    listed = re.findall(r"^\| `([\w.]+)` \|", markdown(sections()), flags=re.MULTILINE)
    assert listed == list(flat(Config()))


def test_every_setting_has_a_help_text() -> None:
    assert not [name for name, setting in SETTINGS.items() if not setting.meaning]


def test_printed_defaults_can_be_set() -> None:
    changes = [f"{setting.name}={setting.default}" for setting in SETTINGS.values()]
    assert override(Config(), *changes) == Config()
    assert SETTINGS["optim.weight_decay"].default == "1.5e-06"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_values_outside_the_documented_range_are_rejected(setting: Setting) -> None:
    """The lowest documented value is accepted, and the one below is rejected."""
    name, allowed = setting.name, setting.allowed
    if bound := re.search(
        r"number, (above )?([\d.]+)(?: or more)?(?: and at most ([\d.]+))?", allowed
    ):
        is_open, low, high = bound.groups()
        outside = [low if is_open else str(float(low) - 1).removesuffix(".0")]
        outside += [str(float(high) + 1).removesuffix(".0")] if high else []
        if not is_open:
            assert flat(override(Config(), f"{name}={low}"))[name] == float(low)
    elif "text" in allowed:
        return
    else:
        outside = ["neither"]
        options = ["true", "false"] if allowed == "true or false" else allowed.split(", ")
        taken = [str(flat(override(Config(), f"{name}={o}"))[name]).lower() for o in options]
        assert taken == options
    for value in outside:
        with pytest.raises(ValueError, match=rf"^{re.escape(name)} "):
            override(Config(), f"{name}={value}")


def test_vertical_bar_is_escaped_in_table_cells() -> None:
    lines = [line for line in markdown(sections()).splitlines() if line.startswith("| `")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in lines)
    assert any("e(z\\|x)" in line for line in lines)


def test_single_section_or_setting_can_be_shown() -> None:
    (section,) = find("bottleneck")
    assert [s.name for s in section.settings] == [n for n in SETTINGS if n.startswith("bottleneck")]
    (section,) = find("bottleneck.beta")
    assert [s.name for s in section.settings] == ["bottleneck.beta"]
    shown = CliRunner().invoke(app, ["settings", "bottleneck.beta"]).stdout
    assert "0 or more" in shown
    assert "kappa_e" not in shown


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("beta", "bottleneck.beta?"),
        ("lr", "optim.lr or probe.lr?"),
        ("bottlenek.beat", "bottleneck.beta?"),
        ("trian", "train?"),
        ("zzz", "`compressive settings` lists all"),
    ],
)
def test_unknown_name_is_one_line_and_exit_code_2(name: str, hint: str) -> None:
    run = CliRunner().invoke(app, ["settings", name])
    assert run.exit_code == 2
    (line,) = run.stderr.splitlines()
    assert repr(name) in line
    assert hint in line


def test_top_level_settings_are_listed_as_run() -> None:
    (section,) = find("run")
    assert [setting.name for setting in section.settings] == ["recipe", "method", "seed"]

"""Every setting is told as it is: against the config itself, its errors, and the document."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.cli.settings_reference import Setting, find, markdown, sections
from compressive.config import Config, flat, override

DOCUMENT = Path(__file__).parents[2] / "docs" / "settings.md"
SETTINGS = {setting.name: setting for section in sections() for setting in section.settings}


def test_the_document_is_what_the_program_prints() -> None:
    run = CliRunner().invoke(app, ["settings", "--markdown"])
    assert run.exit_code == 0
    assert DOCUMENT.read_text() == run.stdout, "compressive settings --markdown > docs/settings.md"


def test_every_setting_is_there_once_and_in_order() -> None:
    assert list(SETTINGS) == list(flat(Config()))
    listed = re.findall(r"^\| `([\w.]+)` \|", markdown(sections()), flags=re.MULTILINE)
    assert listed == list(flat(Config()))


def test_every_setting_says_what_it_means() -> None:
    silent = [name for name, setting in SETTINGS.items() if not setting.meaning]
    assert not silent, "put a comment behind them in config.py"


def test_a_default_may_be_given_as_it_is_written() -> None:
    changes = [f"{setting.name}={setting.default}" for setting in SETTINGS.values()]
    assert override(Config(), *changes) == Config()
    assert SETTINGS["optim.weight_decay"].default == "1.5e-06"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_program_refuses_what_the_words_do_not_allow(setting: Setting) -> None:
    """The least value in the words is taken, and what lies below is not."""
    name, allowed = setting.name, setting.allowed
    if bound := re.search(
        r"number, (above )?([\d.]+)(?: or more)?(?:, at most ([\d.]+))?", allowed
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
        taken = [str(flat(override(_fitting(name), f"{name}={o}"))[name]).lower() for o in options]
        assert taken == options
    for value in outside:
        with pytest.raises(ValueError, match=rf"^{re.escape(name)} must be "):
            override(Config(), f"{name}={value}")


def _fitting(name: str) -> Config:
    """Settings of which the options of a setting may be tried one by one."""
    return (
        override(Config(), "bottleneck.residual_estimator=analytic")
        if name == "bottleneck.stochastic"
        else Config()
    )


def test_a_comment_with_a_bar_stays_in_its_cell() -> None:
    lines = [line for line in markdown(sections()).splitlines() if line.startswith("| `")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in lines)
    assert any("e(z\\|x)" in line for line in lines)


def test_a_section_or_a_setting_alone() -> None:
    (section,) = find("bottleneck")
    assert [s.name for s in section.settings] == [n for n in SETTINGS if n.startswith("bottleneck")]
    (section,) = find("bottleneck.beta")
    assert [s.name for s in section.settings] == ["bottleneck.beta"]
    shown = CliRunner().invoke(app, ["settings", "bottleneck.beta"]).stdout
    assert "price of a nat" in " ".join(shown.split())
    assert "kappa_e" not in shown


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("beta", "did you mean bottleneck.beta?"),
        ("lr", "did you mean optim.lr or probe.lr?"),
        ("bottlenek.beat", "did you mean bottleneck.beta?"),
        ("trian", "did you mean train?"),
        ("zzz", "`compressive settings` lists all"),
    ],
)
def test_an_unknown_name_is_one_line_and_code_2(name: str, hint: str) -> None:
    run = CliRunner().invoke(app, ["settings", name])
    assert run.exit_code == 2
    assert run.stderr == f"error: no setting or section {name!r}; {hint}\n"


def test_the_answer_waits_for_no_torch() -> None:
    code = (
        "import sys; from compressive.settings import markdown, sections; markdown(sections()); "
        "print([m for m in ('torch', 'timm', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


def test_the_settings_of_the_whole_run_go_by_the_name_they_are_shown_under() -> None:
    (section,) = find("run")
    assert [setting.name for setting in section.settings] == ["recipe", "method", "seed"]

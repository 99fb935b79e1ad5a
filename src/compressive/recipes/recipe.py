"""A recipe: a config with the origin of each value."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from compressive.config import Config, flat, from_dict, unused_settings

# dotted setting -> its value and the origin of the value
SettingSources = dict[str, tuple[Any, str]]


class Variant(NamedTuple):
    """Changes for `--set`: another interpretation of the paper, or one row of its ablations."""

    changes: tuple[str, ...]
    what: str
    top1: float | None = None  # on ImageNet in percent, if the paper reports it


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A config with the origin of its values and the expected result."""

    name: str
    config: Config
    about: str
    expected: str
    hardware: str
    needs: Literal["cpu", "gpu", "cluster"]  # the least hardware that trains it in a day or so
    result: str = ""  # the expected result in a few words
    origins: dict[str, str]  # every dotted setting -> where its value comes from
    variants: tuple[Variant, ...] = ()


def make_recipe(name: str, method: str, *layers: SettingSources, **words: Any) -> Recipe:
    """Combine layers over the defaults; later layers win. `words` are the other fields."""
    values: SettingSources = {"recipe": (name, "recipe name"), "method": (method, "recipe name")}
    for layer in layers:
        values |= layer
    settings: dict[str, Any] = {}
    for setting, (value, _) in values.items():
        section, _, leaf = setting.rpartition(".")
        (settings.setdefault(section, {}) if section else settings)[leaf] = value
    config = from_dict(settings)
    origins = dict.fromkeys(flat(config), "default")
    origins |= {setting: source for setting, (_, source) in values.items()}
    origins |= {setting: f"not read: {why}" for setting, why in unused_settings(config).items()}
    return Recipe(name=name, config=config, origins=origins, **words)

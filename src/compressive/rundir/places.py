"""Several sources of images in one setting: a JSON list of their names."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

BUILTIN = "builtin"


def join_places(places: Iterable[str]) -> str:
    """Return the value of data.source for these sources: the name of one, a list of several."""
    names = [name for place in places for name in split_places(place)]
    return names[0] if len(names) == 1 else json.dumps(names, ensure_ascii=False)


def split_places(place: str) -> list[str]:
    """Return the sources that a value of data.source names."""
    if place.startswith('["'):
        try:
            names = json.loads(place)
        except ValueError:
            return [place]  # a folder may have such a name
        if all(isinstance(name, str) for name in names):
            return names
    return [place]


def describe_places(place: str) -> str:
    """Return the sources in words, for messages."""
    return " and ".join(split_places(place))


def short_name(place: str) -> str:
    """Return the last parts of the sources' names, for the name of a folder."""
    names = [Path(each.rpartition(":")[2]).name or "images" for each in split_places(place)]
    more = f"+{len(names) - 3}" if len(names) > 3 else ""
    return "+".join(names[:3]) + more


def absolute_places(place: str) -> str:
    """Return the sources with absolute paths; leave names that are not paths unchanged."""
    return join_places(map(_absolute, split_places(place)))


def _absolute(name: str) -> str:
    path = Path(os.path.expanduser(name))
    return os.path.abspath(path) if name != BUILTIN and path.exists() else name

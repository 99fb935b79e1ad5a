"""Addresses on object storage, checked without a connection."""

import os
import re
from pathlib import Path

SCHEMES = ("s3", "gs", "hf")
# What the user can set if a server refuses the credentials.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, AWS_ENDPOINT_URL)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "HF_TOKEN",
}
_EXAMPLES = {
    "s3": "s3://BUCKET/FOLDER",
    "gs": "gs://BUCKET/FOLDER",
    "hf": "hf://datasets/USER/NAME",
}
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN")


def is_remote(place: str | Path) -> bool:
    """Return whether a location is an address on object storage, such as s3://BUCKET/FOLDER."""
    return os.fspath(place).partition("://")[0].lower() in SCHEMES


def split_address(place: str) -> tuple[str, str]:
    """Return scheme and path (BUCKET/KEY) of an address; raise ValueError if it is malformed."""
    scheme, _, path = place.partition("://")
    scheme = scheme.lower()
    example = _EXAMPLES[scheme]
    # Do not repeat an address that may hold a secret: errors end up in logs.
    if re.search("[:@]", path.partition("/")[0]) or "?" in path:
        given = f"set {CREDENTIALS[scheme]} in the environment"
        raise ValueError(
            f"an address on {scheme}:// must not hold credentials or options; use {example}, "
            f"and {given}"
        )
    path = re.sub("/+", "/", path).strip("/")
    least = 3 if scheme == "hf" else 1
    if len([part for part in path.split("/") if part]) < least or ".." in path.split("/"):
        raise ValueError(f"{place} is not a complete address; use {example}")
    return scheme, path


def hide_secrets(text: str) -> str:
    """Return the first line of a message without the values of credentials."""
    text = next(iter(text.strip().splitlines()), "")[:300]
    for name in _SECRETS:
        if len(value := os.environ.get(name, "")) > 3:
            text = text.replace(value, f"${name}")
    return text

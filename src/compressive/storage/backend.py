"""File systems on object storage with time limits, retries and errors of one line."""

import errno
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar

from compressive.storage.address import CREDENTIALS, hide_secrets, split_address
from compressive.storage.file_systems import ArrowBackend, Backend, FsspecBackend, GcsBackend

T = TypeVar("T")
Retry = Literal["never", "quick", "patient"]
# Seconds between attempts: few before a run, so that a wrong address fails soon; more within it.
WAITS = {"never": (), "quick": (0.2, 0.5, 1.0), "patient": (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}
_CONNECT, _REQUEST = 3, 20  # seconds until an attempt fails
_ENVIRONMENT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION")
_ENVIRONMENT += ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")
_ENVIRONMENT += ("AWS_NO_SIGN_REQUEST", "GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST")
_ENVIRONMENT += ("HF_TOKEN", "HF_ENDPOINT")
_DENIED = (
    "ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|CLIENT_TOKEN_ID|EXPIRED_TOKEN|"
    "InvalidAccessKeyId|AccessDenied|ExpiredToken|InvalidToken|MISSING_AUTHENTICATION|"
    r"UNAUTHENTICATED|PERMISSION_DENIED|HTTP status 40[13]|\b40[13] (Client|Forbidden|Unauth)|"
    "GatedRepo|Invalid credentials|credentials file"
)
_NO_BUCKET = "NO_SUCH_BUCKET|NoSuchBucket|bucket does not exist|RepositoryNotFound|RevisionNotFound"
_MISSING = "No such file or directory|NO_SUCH_KEY|RESOURCE_NOT_FOUND|HTTP status 404|EntryNotFound"
_UNREACHABLE = "NETWORK_CONNECTION|CURL|Connection|UNAVAILABLE|timed? ?out|resolve host"


class StorageError(OSError):
    """Raised in one line if object storage refuses a request or cannot be reached.

    `problem` is the line without `hint`, which says what to do next.
    """

    def __init__(self, number: int | None, problem: str, hint: str = "") -> None:
        super().__init__(number, f"{problem}; {hint}" if hint else problem)
        self.problem: str = problem


class StorageMissing(StorageError):
    """Raised if an object or a folder does not exist in an existing bucket."""


def backend_for(place: str) -> Backend:
    """Return the file system of an address; credentials come from the environment."""
    scheme, path = split_address(place)
    values = tuple(os.environ.get(name, "") for name in _ENVIRONMENT)
    with _translated(place):
        return _backend(scheme, path.partition("/")[0], values)


@functools.lru_cache(maxsize=8)
def _backend(scheme: str, bucket: str, _environment: tuple[str, ...]) -> Backend:
    if scheme == "hf":
        return FsspecBackend(_hub())
    from pyarrow import fs

    if scheme == "gs":
        options: dict[str, Any] = {"retry_time_limit": timedelta(seconds=_CONNECT)}
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            scheme, _, host = emulator.rpartition("://")
            options |= {"anonymous": True, "endpoint_override": host, "scheme": scheme or "http"}
        return GcsBackend(fs.GcsFileSystem(**options))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint is None and not region:
        region = fs.resolve_s3_region(bucket)
    unsigned = os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes")
    return ArrowBackend(
        fs.S3FileSystem(
            anonymous=unsigned,
            endpoint_override=endpoint,
            region=region or "us-east-1",
            connect_timeout=_CONNECT,
            request_timeout=_REQUEST,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # `attempt` retries
            background_writes=False,
        )
    )


def _hub() -> Any:
    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise ValueError("hf:// needs huggingface_hub: pip install huggingface_hub") from None
    endpoint = os.environ.get("HF_ENDPOINT") or None  # the library reads it only when imported
    return HfFileSystem(endpoint=endpoint, use_listings_cache=False, skip_instance_cache=True)


def be_patient() -> None:
    """Retry all requests of this process as within a run: its addresses are known to be right."""
    WAITS["quick"] = WAITS["patient"]


def attempt(
    action: Callable[[], T], place: str, retry: Retry = "patient", *, doing: str = "read"
) -> T:
    """Return the result of an action; retry with back-off unless the error is permanent."""
    waits = WAITS[retry]
    for wait in (*waits, None):
        try:
            return action()
        except (StorageError, MemoryError):
            raise
        except Exception as error:  # each library has its own types
            permanent = _permanent(error, place)
            if permanent is not None:
                raise permanent from None
            if wait is None:
                raise _given_up(error, place, doing, len(waits) + 1) from None
        time.sleep(wait * random.uniform(0.75, 1.25))  # so that processes do not retry at once
    raise AssertionError


def read_range(
    backend: Backend, path: str, offset: int, size: int, place: str, retry: Retry = "patient"
) -> bytes:
    """Return a range of an object; an answer that is too short counts as a failed attempt."""

    def once() -> bytes:
        found = backend.read(path, offset, size)
        if len(found) < size:
            raise OSError(f"Connection closed after {len(found):,} of {size:,} bytes")
        return found

    return attempt(once, place, retry)


@contextmanager
def _translated(place: str) -> Iterator[None]:
    """Report an error of the libraries in one line."""
    try:
        yield
    except (ValueError, StorageError):
        raise
    except Exception as error:
        raise _permanent(error, place) or _given_up(error, place, "open", 1) from None


def _permanent(error: Exception, place: str) -> StorageError | None:
    """Return the error to report if a retry cannot help."""
    scheme, path = split_address(place)
    text = f"{type(error).__name__}: {error}"
    if re.search(_DENIED, text):
        hint = f"check {CREDENTIALS[scheme]} and the permissions of this account"
        return StorageError(
            errno.EACCES, f"{place}: the server refuses the credentials or the access", hint
        )
    if re.search(_NO_BUCKET, text):
        kind = "repository" if scheme == "hf" else "bucket"
        name = "/".join(path.split("/")[:3]) if scheme == "hf" else path.partition("/")[0]
        hint = "check its name, its region or endpoint, and your credentials"
        return StorageError(errno.ENOENT, f"{place}: there is no {kind} {name}", hint)
    if isinstance(error, FileNotFoundError) or re.search(_MISSING, text):
        return StorageMissing(errno.ENOENT, f"{place} does not exist", "check the address")
    return None


def _given_up(error: Exception, place: str, doing: str, tries: int) -> StorageError:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    where = f" at {endpoint}" if endpoint and place.startswith("s3:") else ""
    reason = hide_secrets(str(error) or type(error).__name__)
    what = "cannot be reached" if re.search(_UNREACHABLE, reason, re.I) else f"fails to {doing}"
    times = f"after {tries} attempts" if tries > 1 else ""
    hint = "check the network and the endpoint, and run the same command again"
    server = f"{place}: the server{where} {what} {times}".rstrip()
    return StorageError(errno.EIO, f"{server} ({reason})", hint)

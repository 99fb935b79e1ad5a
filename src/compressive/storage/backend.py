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
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from compressive.storage.address import CREDENTIALS, hide_secrets, split_address

T = TypeVar("T")
Retry = Literal["never", "quick", "patient"]
# Seconds between attempts: few before a run, so that a wrong address fails soon; more within it.
WAITS = {"never": (), "quick": (0.2, 0.5, 1.0), "patient": (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)}
_CONNECT, _REQUEST = 3, 20  # seconds until an attempt fails
_PART = 2**24  # bytes per part of an upload
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
_MISSING = "NO_SUCH_KEY|RESOURCE_NOT_FOUND|HTTP status 404|EntryNotFound"
_UNREACHABLE = "NETWORK_CONNECTION|CURL|Connection|UNAVAILABLE|timed? ?out|resolve host"


class StorageError(OSError):
    """Raised in one line if object storage refuses a request or cannot be reached."""


class StorageMissing(StorageError):
    """Raised if an object or a folder does not exist in an existing bucket."""


class Stored(NamedTuple):
    """An object: its path with the bucket, bytes, a version that changes with it, and its time."""

    path: str
    size: int
    version: str
    time: int  # nanoseconds


@runtime_checkable
class Backend(Protocol):
    """Operations on one bucket or repository; each is one attempt and may raise OSError."""

    def entries(self, folder: str) -> tuple[list[Stored], list[str]]:
        """Return the objects directly in a folder and the paths of its subfolders."""
        ...

    def stat(self, path: str) -> Stored | None:
        """Return an object with its version, or None if there is none."""
        ...

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return a range of an object."""
        ...

    def upload(self, local: Path, path: str) -> None:
        """Replace an object by a local file; readers see the old or the new content."""
        ...

    def delete(self, path: str) -> None:
        """Delete an object."""
        ...


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
        anonymous = bool(os.environ.get("STORAGE_EMULATOR_HOST"))
        limit = timedelta(seconds=_CONNECT)
        return ArrowBackend(fs.GcsFileSystem(anonymous=anonymous, retry_time_limit=limit))
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
    return HfFileSystem(use_listings_cache=False, skip_instance_cache=True)


class ArrowBackend:
    """S3 or Google Cloud Storage through pyarrow."""

    def __init__(self, system: Any) -> None:
        self.system: Any = system
        self._open: dict[str, Any] = {}  # handles hold no connection, and opening one is a request

    def entries(self, folder: str) -> tuple[list[Stored], list[str]]:
        """Return the objects directly in a folder and the paths of its subfolders."""
        from pyarrow.fs import FileSelector, FileType

        found = self.system.get_file_info(FileSelector(folder))
        files = [_stored(each) for each in found if each.type == FileType.File]
        return files, [each.path for each in found if each.type == FileType.Directory]

    def stat(self, path: str) -> Stored | None:
        """Return an object with its version, or None if there is none."""
        from pyarrow.fs import FileType

        info = self.system.get_file_info(path)
        if info.type != FileType.File:
            return None
        self._open[path] = handle = self.system.open_input_file(path)
        about = {_as_str(key).lower(): _as_str(value) for key, value in handle.metadata().items()}
        found = _stored(info)
        version = about.get("etag", "").strip('"') or found.version
        return found._replace(version=version, size=handle.size())

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return a range of an object."""
        handle = self._open.get(path)
        if handle is None:
            self._open[path] = handle = self.system.open_input_file(path)
        return handle.read_at(size, offset)

    def upload(self, local: Path, path: str) -> None:
        """Replace an object by a local file; readers see the old or the new content."""
        self._open.pop(path, None)
        stream = self.system.open_output_stream(path)
        try:
            with local.open("rb") as file:
                while part := file.read(_PART):
                    stream.write(part)
        except BaseException:
            stream.abort() if hasattr(stream, "abort") else None
            raise
        stream.close()

    def delete(self, path: str) -> None:
        """Delete an object."""
        self._open.pop(path, None)
        self.system.delete_file(path)


class FsspecBackend:
    """Any fsspec file system; Hugging Face's hub is one."""

    def __init__(self, system: Any) -> None:
        self.system: Any = system

    def entries(self, folder: str) -> tuple[list[Stored], list[str]]:
        """Return the objects directly in a folder and the paths of its subfolders."""
        found = self.system.ls(folder, detail=True)
        files = [_from_info(each) for each in found if each["type"] == "file"]
        folders = [each["name"] for each in found if each["type"] == "directory"]
        return [each for each in files if each.path.strip("/") != folder], folders

    def stat(self, path: str) -> Stored | None:
        """Return an object with its version, or None if there is none."""
        try:
            info = self.system.info(path)
        except FileNotFoundError:
            return None
        return _from_info(info) if info["type"] == "file" else None

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Return a range of an object."""
        return self.system.cat_file(path, start=offset, end=offset + size)

    def upload(self, local: Path, path: str) -> None:
        """Replace an object by a local file; readers see the old or the new content."""
        self.system.put_file(str(local), path)

    def delete(self, path: str) -> None:
        """Delete an object."""
        self.system.rm_file(path)


def _as_str(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _stored(info: Any) -> Stored:
    time = info.mtime_ns or 0
    return Stored(info.path, info.size or 0, f"{info.size}-{time}", time)


def _from_info(info: dict[str, Any]) -> Stored:
    lfs = info.get("lfs")
    version = (lfs.get("sha256") if isinstance(lfs, dict) else None) or info.get("blob_id")
    path, size = str(info["name"]).lstrip("/"), int(info.get("size") or 0)
    return Stored(path, size, str(version or f"{size}-{info.get('created', '')}"), 0)


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
            errno.EACCES, f"{place}: the server refuses the credentials or the access; {hint}"
        )
    if re.search(_NO_BUCKET, text):
        kind = "repository" if scheme == "hf" else "bucket"
        name = "/".join(path.split("/")[:3]) if scheme == "hf" else path.partition("/")[0]
        hint = "check its name, its region or endpoint, and your credentials"
        return StorageError(errno.ENOENT, f"{place}: there is no {kind} {name}; {hint}")
    if isinstance(error, FileNotFoundError) or re.search(_MISSING, text):
        return StorageMissing(errno.ENOENT, f"{place} does not exist; check the address")
    return None


def _given_up(error: Exception, place: str, doing: str, tries: int) -> StorageError:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    where = f" at {endpoint}" if endpoint and place.startswith("s3:") else ""
    reason = hide_secrets(str(error) or type(error).__name__)
    what = "cannot be reached" if re.search(_UNREACHABLE, reason, re.I) else f"fails to {doing}"
    times = f"after {tries} attempts" if tries > 1 else ""
    hint = "check the network and the endpoint, and run the same command again"
    server = f"{place}: the server{where} {what} {times}".rstrip()
    return StorageError(errno.EIO, f"{server} ({reason}); {hint}")

"""File systems on object storage behind one interface; each operation is one attempt."""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

_PART = 2**24  # bytes per part of an upload


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
            _keep_forever(stream)
            raise
        stream.close()

    def delete(self, path: str) -> None:
        """Delete an object."""
        self._open.pop(path, None)
        self.system.delete_file(path)


class GcsBackend(ArrowBackend):
    """Google Cloud Storage, whose folders pyarrow lists only if they are objects themselves."""

    def entries(self, folder: str) -> tuple[list[Stored], list[str]]:
        """Return the objects directly in a folder and the paths of its subfolders."""
        from pyarrow.fs import FileSelector, FileType

        start, files, folders = f"{folder.rstrip('/')}/", list[Stored](), dict[str, None]()
        for each in self.system.get_file_info(FileSelector(folder, recursive=True)):
            inside, slash, _ = each.path.removeprefix(start).rstrip("/").partition("/")
            if slash or each.type == FileType.Directory:
                folders[start + inside] = None
            else:
                files.append(_stored(each))
        return files, list(folders)


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


def _keep_forever(stream: Any) -> None:
    """Never delete the stream of a failed upload.

    pyarrow cannot abort an upload: a stream that is deleted completes the object with the parts
    that were sent. It holds at most one part in memory.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))


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

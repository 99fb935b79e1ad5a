"""Random access to the files in a zip archive, with limits on what they may unpack to."""

import stat
import struct
import zipfile
import zlib
from pathlib import Path

from compressive.data.decode import Unreadable
from compressive.data.member_limits import check_member_names, check_member_sizes
from compressive.platforms.files import read_at

_COMPRESSION = {zipfile.ZIP_STORED: "0 (stored)", zipfile.ZIP_DEFLATED: "8 (deflated)"}
_HEADER = 30  # bytes of a local header before the name


class ZipMembers:
    """The regular files of a zip archive; the index is read once, files are read in any order."""

    # zipfile reads the index again for each ZipFile, or serializes threads that share one.

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        try:
            with zipfile.ZipFile(path) as archive:
                found = [info for info in archive.infolist() if _is_regular(info)]
        except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError) as error:
            raise ValueError(f"{path} cannot be read as a zip archive: {error}") from None
        self.members: list[zipfile.ZipInfo] = found
        # Archives written on Windows may separate folders by backslashes.
        self.names: list[str] = [info.filename.replace("\\", "/") for info in found]
        check_member_names(path, self.names)
        sizes = [(info.file_size, info.compress_size) for info in found]
        check_member_sizes(path, self.names, sizes)
        self._check_readable()

    def read(self, i: int) -> bytes:
        """Return the content of member i; raise `Unreadable` if it is damaged."""
        info = self.members[i]
        # Open per read, as for tar files, so that reading recovers from a lost network disk.
        with open(self.path, "rb", buffering=0) as file:
            head = read_at(file.fileno(), _HEADER, info.header_offset)
            if len(head) < _HEADER or head[:4] != b"PK\3\4":
                raise Unreadable("the zip archive has no file at this place; it is damaged")
            name_size, extra_size = struct.unpack_from("<HH", head, 26)
            start = info.header_offset + _HEADER + name_size + extra_size
            packed = read_at(file.fileno(), info.compress_size, start)
        data = packed
        if info.compress_type == zipfile.ZIP_DEFLATED:
            try:  # the limit stops a file that declares less than it unpacks to
                data = zlib.decompressobj(-15).decompress(packed, info.file_size + 1)
            except zlib.error as error:
                raise Unreadable(f"damaged in the zip archive: {error}") from None
        if len(data) != info.file_size:
            sizes = f"declares {info.file_size:,} bytes and has {len(data):,} or more"
            raise Unreadable(f"damaged in the zip archive: it {sizes}")
        if zlib.crc32(data) != info.CRC:
            raise Unreadable("damaged in the zip archive: its checksum does not match")
        return data

    def _check_readable(self) -> None:
        """Raise ValueError for encrypted and overlapping files, and for other compression."""
        hint = "unpack it and give the folder"
        locked = [info.filename for info in self.members if info.flag_bits & 1]
        if locked:
            count = f"{len(locked):,} encrypted file{'s' * (len(locked) > 1)}"
            raise ValueError(
                f"{self.path} has {count}, such as {locked[0]}; {hint}, with its password"
            )
        for info in self.members:
            if info.compress_type not in _COMPRESSION:
                raise ValueError(
                    f"{self.path}: {info.filename} has compression {info.compress_type}, allowed "
                    f"are {' and '.join(_COMPRESSION.values())}; {hint}"
                )
        last = 0
        for info in sorted(self.members, key=lambda info: info.header_offset):
            if info.header_offset < last:
                raise ValueError(
                    f"{self.path}: {info.filename} shares bytes with another file, as in a "
                    "decompression bomb; the archive is not opened"
                )
            last = info.header_offset + _HEADER + info.compress_size


def _is_regular(info: zipfile.ZipInfo) -> bool:
    """Return whether a member is neither a folder nor a link."""
    return not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)

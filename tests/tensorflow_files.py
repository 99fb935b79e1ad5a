"""Write TensorFlow checkpoints, good and bad, without TensorFlow."""

from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from compressive.tensorflow_checkpoint import names
from compressive.tensorflow_checkpoint.crc32c import crc32c, masked
from compressive.tensorflow_checkpoint.object_graph import GRAPH

ENDING = "/.ATTRIBUTES/VARIABLE_VALUE"
_MAGIC = bytes.fromhex("57fb808b247547db")
_DTYPES = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}


class Claimed(NamedTuple):
    """An entry of the index without data."""

    shape: tuple[int, ...]
    size: int = 0
    dtype: int = 1
    shard: int = 0


def varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value % 2**64)


def message(field: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return varint(field << 3 | 2) + varint(len(content)) + content


def graph_of(keys: Iterable[str]) -> bytes:
    """Return an object graph whose paths are the names of the variables."""
    children: list[dict[str, int]] = [{}]
    variables: dict[int, str] = {}
    for key in keys:
        node = 0
        for name in key.removesuffix(ENDING).split("/"):
            if name not in children[node]:
                children[node][name] = len(children)
                children.append({})
            node = children[node][name]
        variables[node] = key
    nodes = []
    for node, below in enumerate(children):
        content = b"".join(message(1, number(1, i) + message(2, name)) for name, i in below.items())
        if node in variables:
            content += message(2, message(1, "VARIABLE_VALUE") + message(3, variables[node]))
        nodes.append(message(1, content))
    return b"".join(nodes)


def table(entries: Mapping[bytes, bytes], *, compression: int = 0, restart: int = 16) -> bytes:
    """Return a LevelDB table with two data blocks."""
    content, index = b"", {}
    ordered = sorted(entries)
    middle = len(ordered) // 2
    for keys in (ordered[:middle], ordered[middle:]):
        if keys:
            inside = block({key: entries[key] for key in keys}, compression, restart)
            index[keys[-1]] = varint(len(content)) + varint(len(inside) - 5)
            content += inside
    places = b""
    for inside in (block({}), block(index)):
        places += varint(len(content)) + varint(len(inside) - 5)
        content += inside
    return content + places.ljust(40, b"\0") + _MAGIC


def block(entries: Mapping[bytes, bytes], compression: int = 0, restart: int = 16) -> bytes:
    content, restarts, before = b"", [0], b""
    for i, (key, value) in enumerate(entries.items()):
        shared = 0
        if i % restart:
            both = zip(before, key, strict=False)
            shared = len([*takewhile(lambda pair: pair[0] == pair[1], both)])
        elif i:
            restarts.append(len(content))
        sizes = varint(shared) + varint(len(key) - shared) + varint(len(value))
        content += sizes + key[shared:] + value
        before = key
    content += b"".join(i.to_bytes(4, "little") for i in (*restarts, len(restarts)))
    content += bytes([compression])
    return content + masked(crc32c(content)).to_bytes(4, "little")


def write_bundle(
    prefix: Path,
    tensors: Mapping[str, np.ndarray | bytes | Claimed],
    *,
    graph: bytes | None = None,
    shards: int = 1,
) -> Path:
    """Write .index and .data files; tensors are spread over the shards; return the prefix."""
    tensors = dict(tensors)
    if graph != b"":
        tensors[GRAPH] = graph_of(tensors) if graph is None else graph
    prefix.parent.mkdir(parents=True, exist_ok=True)
    data = [bytearray() for _ in range(shards)]
    entries = {b"": number(1, shards) + message(3, number(1, 1))}
    for i, (name, value) in enumerate(tensors.items()):
        shard, sides, dtype, size, crc = i % shards, (), 7, 0, 0
        offset = len(data[shard])
        if isinstance(value, Claimed):
            sides, dtype, size, shard = value.shape, value.dtype, value.size, value.shard
        elif isinstance(value, bytes):
            length = len(value).to_bytes(4, "little")
            inside = masked(crc32c(length)).to_bytes(4, "little") + value
            crc = crc32c(length + inside)
            data[shard] += varint(len(value)) + inside
        else:
            sides, dtype = value.shape, _DTYPES[str(value.dtype)]
            content = np.ascontiguousarray(value).tobytes()
            crc = crc32c(content)
            data[shard] += content
        size = size or len(data[shard % shards]) - offset
        shape = b"".join(message(2, number(1, side)) for side in sides)
        entry = number(1, dtype) + message(2, shape) + number(3, shard) + number(4, offset)
        entry += number(5, size) + varint(6 << 3 | 5) + masked(crc).to_bytes(4, "little")
        entries[name.encode()] = entry
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(entries))
    for i, content in enumerate(data):
        prefix.with_name(f"{prefix.name}.data-{i:05d}-of-{shards:05d}").write_bytes(content)
    return prefix


def official_tensors(network: nn.Module, blocks: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return the weights of a ResNet with basic blocks as variables of the official code."""
    weights = network.state_dict()
    found: dict[str, Any] = {}
    for name, path in names.backbone_paths(blocks, bottleneck=False).items():
        value = weights[name].numpy()
        value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value
        found[f"model/_resnet/{path}{ENDING}"] = np.ascontiguousarray(value)
    return found | {f"{name}{ENDING}": value for name, value in more.items()}

"""Find variables by the attributes of Python objects that lead to them.

Names in a checkpoint depend on what else was saved: a SavedModel of the official code calls the
first kernel `trainable_variables_list/0`. The object graph always has the attributes.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from compressive.tensorflow_checkpoint.protobuf import as_bytes, as_int, as_string, fields

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"  # name of the graph in a checkpoint


class _Node(NamedTuple):
    children: dict[str, int]
    key: str  # name of its value in the checkpoint; "": it is no variable


class ObjectGraph:
    """The objects of a checkpoint, by their numbers; 0 is the root."""

    def __init__(self, message: bytes) -> None:
        self._nodes = [_read_node(as_bytes(v)) for number, v in fields(message) if number == 1]
        count = len(self._nodes)
        if not count or any(not 0 <= i < count for n in self._nodes for i in n.children.values()):
            raise ValueError("the object graph refers to objects that it does not have")

    def parent_of(self, name: str) -> int | None:
        """Return the object nearest to the root that has an attribute of this name."""
        return next((i for i, _ in self._walk(0) if name in self._nodes[i].children), None)

    def attributes(self, node: int) -> tuple[str, ...]:
        """Return the names of an object's attributes."""
        return tuple(self._nodes[node].children)

    def find(self, node: int, path: str) -> int | None:
        """Return the object at a path of attributes, such as `linear_layers/0/dense`."""
        found: int | None = node
        for name in path.split("/"):
            if found is not None:
                found = self._nodes[found].children.get(name)
        return found

    def key(self, node: int, path: str) -> str:
        """Return the name in the checkpoint of the variable at a path, or "" if there is none."""
        found = self.find(node, path)
        return "" if found is None else self._nodes[found].key

    def keys(self, node: int) -> dict[str, str]:
        """Return all variables below an object: name in the checkpoint -> a shortest path."""
        return {key: path for i, path in self._walk(node) if (key := self._nodes[i].key)}

    def _walk(self, start: int) -> Iterator[tuple[int, str]]:
        """Yield each object that can be reached, with its path, by increasing distance."""
        queue, seen = deque([(start, "")]), {start}
        while queue:
            node, path = queue.popleft()
            yield node, path
            for name, child in self._nodes[node].children.items():
                if child not in seen:
                    seen.add(child)
                    queue.append((child, f"{path}/{name}" if path else name))


def _read_node(message: bytes) -> _Node:
    children: dict[str, int] = {}
    key = ""
    for number, value in fields(message):
        if number == 1:  # a child: node_id, local_name
            child = dict(fields(as_bytes(value)))
            children[as_string(child.get(2, b""))] = as_int(child.get(1, 0))
        elif number == 2:  # a saved value: name, full_name, checkpoint_key
            attribute = dict(fields(as_bytes(value)))
            if as_string(attribute.get(1, b"")) == "VARIABLE_VALUE":
                key = as_string(attribute.get(3, b""))
    return _Node(children, key)

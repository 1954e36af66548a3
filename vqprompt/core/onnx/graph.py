"""Writes ONNX graphs and opens them with ONNX Runtime, without the `onnx` package.

An ONNX file is a protobuf message. The few kinds of message that a graph needs are written by the functions at the end
(field numbers: onnx.proto3). Large weights need not be in the file: ONNX Runtime takes them from memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Attribute = int | float | str | Sequence[int]
OPSET, IR_VERSION = 23, 11
TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7}
COLUMNS = 80
ONLY_HERE = ("MatMulIntegerToFloat",)  # ONNX does not have it
DOMAIN = b"com.microsoft"
LARGE = 1024  # bytes from which a weight is passed in memory


class Graph:
    """A graph that grows node by node. Values are known by their names."""

    def __init__(self) -> None:
        self.weights: dict[str, Array] = {}
        self._nodes: list[bytes] = []
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []

    @property
    def has_integers(self) -> bool:
        """Whether weights are int8."""
        return any(array.dtype == np.int8 for array in self.weights.values())

    def input(self, name: str, kind: str, *shape: int | str) -> str:
        """shape: numbers, and names of dimensions that may vary."""
        self._inputs.append(_value(name, kind, shape))
        return name

    def output(self, value: str, name: str, *shape: int | str) -> None:
        self._nodes.append(_node("Identity", [value], [name], {}))
        self._outputs.append(_value(name, "float32", shape))

    def weight(self, name: str, array: Array) -> str:
        self.weights[name] = np.ascontiguousarray(array)
        return name

    def constant(self, values: Any, kind: str = "float32") -> str:
        array = np.asarray(values, kind)
        for name, known in self.weights.items():
            if name.startswith("constant") and known.dtype == array.dtype and np.array_equal(known, array):
                return name
        return self.weight(f"constant{len(self.weights)}", array)

    def integers(self, *values: int) -> str:
        return self.constant(values, "int64")

    def op(self, kind: str, *inputs: str, **attributes: Attribute) -> str:
        return self.split(kind, *inputs, parts=1, **attributes)[0]

    def split(self, kind: str, *inputs: str, parts: int, **attributes: Attribute) -> list[str]:
        """An operator with several outputs."""
        names = [f"{kind}{len(self._nodes)}.{i}" for i in range(parts)]
        self._nodes.append(_node(kind, inputs, names, attributes))
        return names

    def file(self, metadata: Mapping[str, str] | None = None, *, large_weights: bool = True) -> bytes:
        """The graph as a file. large_weights: False only declares them, so that the file has kilobytes."""
        tensors = [_tensor(n, a, large_weights or a.nbytes < LARGE) for n, a in self.weights.items()]
        fields = ((1, self._nodes), (2, [b"vqprompt"]), (5, tensors), (11, self._inputs), (12, self._outputs))
        graph = b"".join(_bytes(number, content) for number, contents in fields for content in contents)
        entries = [_entry(key, value) for key, value in (metadata or {}).items()]
        parts = [_int(1, IR_VERSION), _bytes(2, b"vqprompt"), _bytes(7, graph), _bytes(8, _int(2, OPSET))]
        parts.append(_bytes(8, _bytes(1, DOMAIN) + _int(2, 1)) if DOMAIN in graph else b"")
        return b"".join([*parts, *(_bytes(14, entry) for entry in entries)])


class Session:
    """A graph that can be run, by many threads at once.

    threads: that one run takes. The columns of a product are divided among threads, and a thread with few columns adds
    in another order. So results do not depend on it, to the last bit, as long as each thread has `COLUMNS` of them.
    """

    def __init__(self, graph: Graph, threads: int = 1) -> None:
        import onnxruntime as ort

        if hasattr(ort, "disable_telemetry_events"):  # on Windows it would send them
            ort.disable_telemetry_events()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        # our graphs are written as they should run: to rewrite them takes time and gains none
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # to copy weights into another order makes a run 5 to 8 % faster, and takes time and their memory again: good if
        # they are small
        options.add_session_config_entry("session.disable_prepacking", str(int(not graph.has_integers)))
        # idle threads sleep: they would take time from other images that are computed at the same moment
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        large = {name: array for name, array in graph.weights.items() if array.nbytes >= LARGE}
        self._values = [ort.OrtValue.ortvalue_from_numpy(array) for array in large.values()]  # the session borrows them
        options.add_external_initializers(list(large), self._values)
        data = graph.file(large_weights=False)
        self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def run(self, **inputs: Array) -> list[Array]:
        outputs: list[Array] = self._session.run(None, inputs)
        return outputs


# ---------------------------------------------------------------------------------------------- protobuf


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1  # negative numbers in two's complement
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def _int(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _entry(key: str, value: str) -> bytes:
    return _bytes(1, key.encode()) + _bytes(2, value.encode())


def _node(kind: str, inputs: Iterable[str], outputs: Iterable[str], attributes: Mapping[str, Attribute]) -> bytes:
    parts = [_bytes(1, name.encode()) for name in inputs] + [_bytes(2, name.encode()) for name in outputs]
    parts += [_bytes(4, kind.encode()), *(_bytes(5, _attribute(*pair)) for pair in attributes.items())]
    return b"".join([*parts, _bytes(7, DOMAIN) if kind in ONLY_HERE else b""])


def _attribute(name: str, value: Attribute) -> bytes:
    start = _bytes(1, name.encode())
    if isinstance(value, int):
        return start + _int(3, value) + _int(20, 2)
    if isinstance(value, float):
        return start + _varint(2 << 3 | 5) + struct.pack("<f", value) + _int(20, 1)
    if isinstance(value, str):
        return start + _bytes(4, value.encode()) + _int(20, 3)
    return start + b"".join(_int(8, number) for number in value) + _int(20, 7)


def _value(name: str, kind: str, shape: Iterable[int | str]) -> bytes:
    dims = [_int(1, d) if isinstance(d, int) else _bytes(2, d.encode()) for d in shape]
    tensor = _int(1, TYPES[kind]) + _bytes(2, b"".join(_bytes(1, d) for d in dims))
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, tensor))


def _tensor(name: str, array: Array, inside: bool) -> bytes:
    head = b"".join(_int(1, d) for d in array.shape) + _int(2, TYPES[array.dtype.name]) + _bytes(8, name.encode())
    if inside:
        return head + _bytes(9, array.tobytes())
    place = {"location": "in memory", "offset": "0", "length": str(array.nbytes)}
    return head + b"".join(_bytes(13, _entry(*pair)) for pair in place.items()) + _int(14, 1)

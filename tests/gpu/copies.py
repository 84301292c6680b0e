"""Finds the copies between host and GPU that a traced graph implies; needs no GPU.

TensorFlow places an operation on the GPU if it has a kernel for its types. Each kernel declares
which of its arguments are in the host's memory (`registrations.json`). If the producer of a tensor
keeps it in one memory and the consumer needs it in the other, TensorFlow copies it at every step,
and such a copy waits for all earlier work of the GPU. A control edge between an operation on the
GPU and one on the CPU does the same, because it sends an empty tensor.

The audit follows TensorFlow's rules. Functions and branches are inlined. Operations that depend
only on constants are folded. An operation on a variable runs on the device of the variable. 32-bit
integers that enter or leave a function are on the host. A function that XLA compiles is one
operation whose arguments and results are on the device; an H100 showed that its results that are
32-bit integers are then fetched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import resource_variable_ops

TABLE = pathlib.Path(__file__).with_name("registrations.json")
CPU = "CPU"
GPU = "GPU"
HOST = "host"
DEVICE = "device"
# The size of the largest constant that the graph optimizer creates.
_FOLDED_BYTES = 100 << 10
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf"}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
# These operations only create views or names, or assign.
_NO_KERNEL = {
    "AssignVariableOp",
    "Const",
    "ExpandDims",
    "Identity",
    "IdentityN",
    "NoOp",
    "Placeholder",
    "PreventGradient",
    "ReadVariableOp",
    "Reshape",
    "Slice",
    "SplitV",
    "Split",
    "Squeeze",
    "StopGradient",
    "VarHandleOp",
}
# Arguments in the host's memory, as registered in horovod/tensorflow/mpi_ops.cc (version 0.28.1,
# built with NCCL).
_HOROVOD: dict[str, list[str]] = {
    "HorovodAllreduce": [],
    "HorovodGroupedAllreduce": [],
    "HorovodAllgather": [],
    "HorovodBroadcast": [],
    "HorovodReducescatter": [],
    "HorovodAlltoall": ["splits", "received_splits"],
}


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor: its producer, its device, and the memory that holds it."""

    name: str
    dtype: tf.DType
    bytes: int
    place: str
    memory: str
    # Whether it exists when a step begins, because nothing on the GPU precedes it.
    early: bool = False
    constant: bool = False
    # The results of both branches, if it is the result of a condition.
    either: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True)
class Done:
    """The end of an operation, for which others wait."""

    name: str
    place: str
    early: bool


@dataclasses.dataclass(frozen=True, order=True)
class Copy:
    """A transfer in every step: a `fetch` from the GPU or a `feed` to it.

    The transfer of a control edge is empty. The operations of a `branch` start when the GPU has
    received its condition, which waits for all earlier operations. An `early feed` starts with the
    step, so it waits only for earlier steps.
    """

    kind: str
    producer: str
    consumer: str
    dtype: str
    bytes: int

    def __str__(self) -> str:
        """Describes the copy in one line."""
        what = "control edge" if self.dtype == "control" else f"{self.dtype}, {self.bytes} bytes"
        return f"{self.kind:10} {self.producer} -> {self.consumer} ({what})"


@contextlib.contextmanager
def pinned() -> Iterator[set[int]]:
    """Yields the ids of the handles of all variables that are created on an explicit CPU."""
    ids: set[int] = set()
    # The id of a handle is unique only while the handle exists.
    handles = []
    make = resource_variable_ops._variable_handle_from_shape_and_dtype

    def noted(*arguments: Any, **settings: Any) -> Any:
        handle = make(*arguments, **settings)
        if CPU in context.context().device_name:
            handles.append(handle)
            ids.add(id(handle))
        return handle

    # Keras puts an optimizer's variable on the device of its weight, by name. That would be the CPU
    # here.
    extended = tf.distribute.get_strategy().extended
    extended.colocate_vars_with = lambda variable: contextlib.nullcontext()
    resource_variable_ops._variable_handle_from_shape_and_dtype = noted
    try:
        yield ids
    finally:
        resource_variable_ops._variable_handle_from_shape_and_dtype = make
        del extended.colocate_vars_with


def types_of(op: tf.Operation) -> dict[str, str]:
    """Returns the types of an operation, by attribute."""
    definition = op_def_registry.get(op.type)
    named = [attr.name for attr in definition.attr if attr.type == "type"]
    return {name: op.get_attr(name).name for name in named}


def key_of(types: Mapping[str, str]) -> str:
    """Returns the key of types in the table."""
    return ",".join(f"{name}={types[name]}" for name in sorted(types))


class Audit:
    """Follows the tensors of a traced step.

    Attributes:
      copies: Copies between host and GPU.
      missing: Operations without a kernel for GPUs that are not placed on the CPU explicitly.
      seen: Types of every operation that was looked up, by (operation, key).
      launched: Operations that start a kernel or a compiled program. Of two branches, those of the
        longer one.
    """

    def __init__(
        self,
        on_cpu: Iterable[int],
        table: Mapping[str, Mapping[str, list[str] | None]] | None = None,
    ):
        """Takes the handles of `pinned` and the table of registrations.

        Without a table, no argument is on the host.
        """
        self.copies: set[Copy] = set()
        self.missing: set[tuple[str, str]] = set()
        self.seen: dict[tuple[str, str], dict[str, str]] = {}
        self.launched: list[str] = []
        self._on_cpu = set(on_cpu)
        self._table = table
        self._path: list[str] = []

    def step(self, function: Any, host: Sequence[str] = ()) -> Audit:
        """Follows a concrete function, whose arguments are on the GPU unless named in `host`."""
        captured = {id(inner): outer for outer, inner in function.graph.captures}
        arguments = [self._argument(t, captured.get(id(t)), host) for t in function.graph.inputs]
        results, _ = self._graph(function.graph, arguments, [], range(len(function.graph.outputs)))
        for value in results:
            if value.dtype == tf.int32:
                self._move(value, "result", CPU, HOST)
        return self

    def _argument(
        self, placeholder: tf.Tensor, outer: tf.Tensor | None, host: Sequence[str]
    ) -> Value:
        if placeholder.dtype == tf.resource:
            assert outer is not None, f"{placeholder.name} is an argument"
            kinds = [tf.as_dtype(s.dtype) for s in outer._handle_data.shape_and_type]
            # TensorFlow puts variables of 32-bit integers on the host.
            on_host = id(outer) in self._on_cpu or tf.int32 in kinds
            return _value(placeholder, CPU if on_host else GPU, HOST, early=True)
        if outer is not None:
            return _value(placeholder, CPU, HOST, early=True, constant=True)
        if any(placeholder.op.name.startswith(name) for name in host):
            return _value(placeholder, CPU, HOST, early=True)
        value = _value(placeholder, GPU, DEVICE)
        if value.dtype != tf.int32:
            return value
        self._move(value, f"argument {placeholder.op.name}", CPU, HOST)
        return dataclasses.replace(value, place=CPU, memory=HOST)

    def _graph(
        self,
        graph: tf.Graph,
        arguments: Sequence[Value],
        above: Sequence[Done],
        needed: Iterable[int],
    ) -> tuple[dict[int, Value], list[Done]]:
        """Follows a graph as far as needed.

        Returns the needed results, and the operations for which others wait.
        """
        values = {t.name: v for t, v in zip(graph.inputs, arguments, strict=True)}
        after: dict[str, list[Done]] = {t.op.name: [] for t in graph.inputs}
        results = [graph.outputs[i] for i in needed]
        live = _live([t.op for t in results] + list(graph.control_outputs))
        names = {op.name for op in live}
        result_names = {t.name for t in results}
        for op in live:
            if op.name in after:
                continue
            inputs = [values[t.name] for t in op.inputs]
            before = [done for other in op.control_inputs for done in after[other.name]]
            before += [] if inputs or op.type == "Const" else above
            used = [
                i
                for i, t in enumerate(op.outputs)
                if t.name in result_names or any(user.name in names for user in t.consumers())
            ]
            outputs, after[op.name] = self._operation(op, inputs, before, used)
            values.update(
                {op.outputs[i].name: value for i, value in zip(used, outputs, strict=True)}
            )
        last = [done for op in graph.control_outputs for done in after[op.name]]
        return [values[t.name] for t in results], last

    def _operation(
        self, op: tf.Operation, inputs: list[Value], before: list[Done], used: list[int]
    ) -> tuple[list[Value], list[Done]]:
        """Follows an operation.

        Returns its used results, and the operations for which its successors wait.
        """
        name = "/".join([*self._path, op.name])
        if op.type == "NoOp":
            # The graph optimizer keeps only its edges.
            return [], before
        if op.type in _CALLS:
            function = op.graph._get_function(op.get_attr("f").name)
            if not function.cached_definition.attr["_XlaMustCompile"].b:
                return self._inside(op.name, function.graph, inputs, before, used)
            return self._run(
                op, name, inputs, before, used, (CPU if CPU in op.device else GPU, None)
            )
        if op.type in _BRANCHES:
            return self._branches(op, name, inputs, before, used)
        if _is_constant(op, inputs):
            place = CPU if CPU in op.device else GPU
            return [_value(op.outputs[i], place, "", early=True, constant=True) for i in used], []
        return self._run(op, name, inputs, before, used, self._placed(op, inputs))

    def _run(
        self, op: tf.Operation, name: str, inputs: list[Value], before: list[Done], used: list[int],
        placed: tuple[str, Sequence[str] | None],
    ) -> tuple[list[Value], list[Done]]:  # fmt: skip
        """Follows an operation that runs.

        For a compiled operation (None) all arguments are on its device.
        """
        place, on_host = placed
        early = place == CPU and all(v.early for v in inputs) and all(done.early for done in before)
        for done in before:
            if done.place != place:
                self._note(
                    "fetch" if place == CPU else "feed", done.early, done.name, name, "control", 0
                )
        taken, given = _arguments(op)
        memory = {
            argument: HOST if place == CPU or argument in (on_host or ()) else DEVICE
            for argument in taken + given
        }
        for value, argument in zip(inputs, taken, strict=True):
            assert value.dtype != tf.resource or value.place == place, (
                f"{value.name} is not where {name} is"
            )
            self._move(value, name, place, memory[argument])
        outputs = [
            _value(op.outputs[i], place, memory[given[i]], name=name, early=early) for i in used
        ]
        if place == GPU and on_host is None:
            for value in (value for value in outputs if value.dtype == tf.int32):
                self._note("fetch", False, name, "result", value.dtype.name, value.bytes)
        on_device = DEVICE in (memory[argument] for argument in taken + given)
        if place == GPU and on_device and op.type not in _NO_KERNEL:
            self.launched.append(op.type if on_host is not None else f"compiled {op.name}")
        return outputs, [Done(name, place, early)]

    def _inside(
        self,
        name: str,
        graph: tf.Graph,
        inputs: list[Value],
        before: list[Done],
        needed: Iterable[int],
    ) -> tuple[list[Value], list[Done]]:
        self._path.append(name)
        try:
            return self._graph(graph, inputs, before, needed)
        finally:
            self._path.pop()

    def _branches(
        self, op: tf.Operation, name: str, inputs: list[Value], before: list[Done], used: list[int]
    ) -> tuple[list[Value], list[Done]]:
        """Follows both branches.

        The host must know which one runs, so the condition is sent to the GPU when the step reaches
        it.
        """
        self._move(inputs[0], name, GPU, HOST)
        self._note("branch", False, inputs[0].name, name, inputs[0].dtype.name, inputs[0].bytes)
        results = []
        after = []
        launched_before = self.launched
        launched = []
        for branch in ("then_branch", "else_branch"):
            graph = op.graph._get_function(op.get_attr(branch).name).graph
            self.launched = []
            outputs, last = self._inside(f"{op.name}.{branch[:4]}", graph, inputs[1:], before, used)
            launched.append(self.launched)
            results.append(outputs)
            after += last
        self.launched = launched_before + max(launched, key=len)
        merged = []
        for i, *either in zip(used, *results, strict=True):
            output = op.outputs[i]
            gpu = output.dtype != tf.int32 and any(
                v.place == GPU and not v.constant for v in either
            )
            place, memory = (GPU, DEVICE) if gpu else (CPU, HOST)
            early = all(v.early for v in either)
            merged.append(
                _value(output, place, memory, name=name, early=early, either=tuple(either))
            )
        return merged, after

    def _placed(self, op: tf.Operation, inputs: Sequence[Value]) -> tuple[str, Sequence[str]]:
        """Returns the device, and the arguments in the host's memory."""
        variables = [value.place for value in inputs if value.dtype == tf.resource]
        if CPU in op.device or CPU in variables:
            return CPU, ()
        on_host = self._registered(op)
        if on_host is None:
            self.missing.add((op.type, key_of(types_of(op))))
            return CPU, ()
        return GPU, on_host

    def _registered(self, op: tf.Operation) -> Sequence[str] | None:
        """Returns the arguments that the kernel for GPUs keeps on the host; None without one."""
        if op.type in _HOROVOD:
            return _HOROVOD[op.type]
        types = types_of(op)
        self.seen[op.type, key_of(types)] = types
        if self._table is None:
            return ()
        try:
            return self._table[op.type][key_of(types)]
        except KeyError:
            raise LookupError(
                f"{op.type} of {key_of(types)} is not in {TABLE.name}: test_copies.py --long writes"
                " a new one"
            ) from None

    def _move(self, value: Value, consumer: str, place: str, memory: str) -> None:
        """Records the copy that a consumer needs."""
        if value.dtype == tf.resource:
            return
        for other in value.either:
            if not other.constant:
                self._move(other, f"{value.name}, of both branches", value.place, value.memory)
        if value.constant:
            # A constant is in the memory of its device, except 32-bit integers, which are on the
            # host. Without a device it is where it is used.
            if place == CPU:
                return
            source = HOST if value.place == CPU or value.dtype == tf.int32 else DEVICE
        else:
            source = value.memory
        if source != memory:
            kind = "fetch" if memory == HOST else "feed"
            what = f"constant {value.name}" if value.constant else value.name
            self._note(
                kind, value.early and kind == "feed", what, consumer, value.dtype.name, value.bytes
            )

    def _note(
        self, kind: str, early: bool, producer: str, consumer: str, dtype: str, size: int
    ) -> None:
        self.copies.add(
            Copy(
                "early feed" if early and kind == "feed" else kind, producer, consumer, dtype, size
            )
        )


def _live(last: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns these operations and all that they need, in an order of dependence."""
    ordered: dict[str, tf.Operation] = {}
    for result in last:
        stack = [result]
        while stack:
            op = stack[-1]
            needed = [
                other
                for other in (*(t.op for t in op.inputs), *op.control_inputs)
                if other.name not in ordered
            ]
            if needed:
                stack += needed
            else:
                ordered[stack.pop().name] = op
    return list(ordered.values())


def _is_constant(op: tf.Operation, inputs: Sequence[Value]) -> bool:
    """Returns whether the graph optimizer replaces the operation by a constant."""
    if op.type == "Const":
        return True
    if op.type in _SHAPES:
        return all(t.shape.is_fully_defined() for t in op.inputs)
    small = all((t.shape.num_elements() or 0) * t.dtype.size <= _FOLDED_BYTES for t in op.outputs)
    return bool(inputs) and all(v.constant for v in inputs) and not op._is_stateful and small


def _value(tensor: tf.Tensor, place: str, memory: str, name: str = "", **more: Any) -> Value:
    count = tensor.shape.num_elements() if tensor.shape.rank is not None else None
    return Value(
        name or tensor.op.name,
        tensor.dtype,
        (count or 0) * tensor.dtype.size,
        place,
        memory,
        **more,
    )


def _arguments(op: tf.Operation) -> tuple[list[str], list[str]]:
    """Returns the argument names of each input and of each output."""
    definition = op_def_registry.get(op.type)
    parts = definition.input_arg, definition.output_arg
    taken, given = (
        [argument.name for argument in part for _ in range(_count(op, argument))] for part in parts
    )
    return taken, given


def _count(op: tf.Operation, argument: Any) -> int:
    if argument.number_attr:
        return int(op.get_attr(argument.number_attr))
    return len(op.get_attr(argument.type_list_attr)) if argument.type_list_attr else 1


def table() -> dict[str, dict[str, list[str] | None]]:
    """Returns the committed registrations.

    They map operation and types to the arguments in the host's memory, or to null without a kernel.
    """
    registrations: dict[str, dict[str, list[str] | None]] = json.loads(TABLE.read_text())
    return registrations

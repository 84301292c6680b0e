"""Works out from a profile of some training steps where their time went.

TensorFlow's profiler writes an XSpace, which TensorBoard draws. Here its events are sorted into five categories:

* computation: operations of the step (on a GPU: kernels), except the operations of the next two
* optimizer: operations under the name scope of the update
* communication: from the start of a reduction over ranks to its end
* input wait: the trainer's wait for the next batch
* host: everything else; no operation runs and none is waited for

The exclusive time of a category is the time in which it is active and none before it in this list is, so that the
exclusive times add up to the time of the steps: communication that is exclusive is communication that nothing hides.
"""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

CATEGORIES = ("computation", "optimizer", "communication", "input wait", "host")
STEP = "train"
WAIT = "next_batch"
SCOPE = "optimizer_update"  # of optimizers.distributed
# An operation's event is called name:Type.
_OPERATION = re.compile(r"[A-Za-z0-9_.][^: ]*:_?[A-Z][A-Za-z0-9_]*")
_REDUCTION = re.compile(r"Horovod|Collective|nccl", re.IGNORECASE)
_COMPILED = ("StatefulPartitionedCall", "PartitionedCall", "XlaLaunch")  # what XLA has compiled runs under these
_PICOSECONDS = 1e-12


@dataclasses.dataclass(frozen=True)
class Event:
    """An operation of a line (thread or stream) of a plane, from `start` to `end`, in seconds on one clock."""

    plane: str
    line: str
    name: str
    start: float
    end: float
    facts: dict[str, Any]


def read(folder: pathlib.Path) -> list[Event]:
    """Returns the events of the newest profile below a directory.

    Raises:
      FileNotFoundError: if there is none.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    files = sorted(folder.glob("**/*.xplane.pb*"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"no profile in {folder}")
    content = files[-1].read_bytes()
    space = xplane_pb2.XSpace()
    space.ParseFromString(gzip.decompress(content) if files[-1].suffix == ".gz" else content)
    return list(events(space))


def events(space: Any) -> Iterator[Event]:
    """Yields the events of an XSpace."""
    for plane in space.planes:
        names = {number: metadata.name for number, metadata in plane.event_metadata.items()}
        keys = {number: metadata.name for number, metadata in plane.stat_metadata.items()}
        for line in plane.lines:
            origin = line.timestamp_ns * 1e-9
            for event in line.events:
                name = names[event.metadata_id]
                if name.startswith(("Memory", "ThreadpoolListener", "ExecutorState::Process")) and "Async" not in name:
                    continue  # the most numerous by far
                start = origin + event.offset_ps * _PICOSECONDS
                facts = {keys[s.metadata_id]: _value(s, keys) for s in event.stats}
                yield Event(plane.name, line.name, name, start, start + event.duration_ps * _PICOSECONDS, facts)


def _value(stat: Any, keys: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    if kind == "ref_value":
        return keys.get(stat.ref_value)
    return getattr(stat, kind) if kind else None


def span(found: Sequence[Event]) -> tuple[int, float, float]:
    """Returns the number of a profile's steps, and when they begin and end, in the unit of the events.

    Raises:
      ValueError: if the profile holds no step.
    """
    steps = [event for event in found if event.name == STEP]
    if not steps:
        raise ValueError("the profile holds no step")
    return len(steps), min(step.start for step in steps), max(step.end for step in steps)


def summarize(found: Sequence[Event]) -> dict[str, Any]:
    """Returns times by category, in milliseconds per step: `exclusive`, which add up to `step`, and `active`.

    Raises:
      ValueError: if the profile holds no step.
    """
    count, begin, end = span(found)
    intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in CATEGORIES[:-1]}
    operations: dict[str, float] = {}
    for category, event in classified(found):
        start, stop = max(event.start, begin), min(event.end, end)
        if stop > start:
            intervals[category].append((start, stop))
            if category in ("computation", "optimizer"):
                kind = event.name.rpartition(":")[2]
                operations[kind] = operations.get(kind, 0.0) + stop - start
    scale = 1e3 / count
    covered: list[tuple[float, float]] = []
    exclusive, length = {}, 0.0
    for name, own in intervals.items():
        covered = _union([*covered, *own])
        exclusive[name] = (_length(covered) - length) * scale
        length = _length(covered)
    exclusive["host"] = (end - begin - length) * scale
    longest = sorted(operations.items(), key=lambda pair: -pair[1])[:12]
    return {
        "steps": count,
        "step": (end - begin) * scale,
        "exclusive": exclusive,
        "active": {name: _length(_union(own)) * scale for name, own in intervals.items()},
        "operations": {name: seconds * scale for name, seconds in longest},
    }


def classified(found: Sequence[Event]) -> Iterator[tuple[str, Event]]:
    """Yields the events that count, each with its category."""
    devices = {event.plane for event in found if "/device:" in event.plane}
    pending = {}
    for event in found:
        if event.name == "ExecutorState::ProcessAsync::Start":
            pending[_call(event)] = event.start
    for event in found:
        if event.name == WAIT:
            yield "input wait", event
        elif event.name == "ExecutorState::ProcessAsync::Done":
            start = pending.get(_call(event))
            name, kind = str(event.facts.get("name")), str(event.facts.get("kernel_type"))
            # Such an operation lasts from its start to the call that hands over its results.
            whole = dataclasses.replace(event, name=f"{name}:{kind}", start=start or event.start, end=event.start)
            if _REDUCTION.search(kind):
                yield "communication", whole
            elif not devices and kind in _COMPILED:
                yield _part(name), whole
        elif not devices or event.plane in devices:
            name = str(event.facts.get("tf_op", event.name))
            if _REDUCTION.search(event.name):
                yield "communication", event
            elif event.plane in devices or (_OPERATION.fullmatch(name) and not event.line.startswith("tf_data")):
                yield _part(name), dataclasses.replace(event, name=name)


def _part(name: str) -> str:
    return "optimizer" if SCOPE in name or "ResourceApply" in name else "computation"


def _call(event: Event) -> tuple[Any, Any]:
    """Returns the key that the start and the end of one asynchronous operation share."""
    return event.facts.get("step_id"), event.facts.get("name")


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def table(summary: dict[str, Any], first: int) -> str:
    """Returns the summary as text; `first` is the number of the first step."""
    last = first + summary["steps"] - 1
    lines = [
        f"steps {first} to {last}: {summary['step']:.1f} ms per step",
        f"{'':16}{'exclusive ms':>13}{'share':>8}{'active ms':>11}",
    ]
    for name in CATEGORIES:
        own, active = summary["exclusive"][name], summary["active"].get(name)
        shown = f"{active:11.1f}" if active is not None else ""
        lines.append(f"{name:16}{own:13.1f}{100 * own / summary['step']:7.1f}%{shown}")
    lines.append("operations, ms per step, summed over threads:")
    lines += [f"  {name:40}{value:10.1f}" for name, value in summary["operations"].items()]
    return "\n".join(lines)

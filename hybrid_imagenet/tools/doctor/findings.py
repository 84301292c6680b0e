"""What a check finds: a line of the doctor's report, and the comparisons that most checks are made of."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]
Hosts = Mapping[str, Facts]  # by name, in the order of the command line

PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty where nothing is wrong."""

    level: str
    check: str
    message: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Request:
    """The user's settings that hosts are checked against."""

    slots: Mapping[str, int]
    interface: str | None = None
    data_dir: str | None = None
    gpus: bool = False  # whether ranks are meant to run on GPUs: some host has one


def same(check: str, values: Mapping[str, Any], remedy: str, level: str = FAIL) -> Finding:
    """Passes if all hosts have one value; else names each value's hosts."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for host, value in values.items():
        groups["none" if value is None else str(value)].append(host)
    if len(groups) == 1:
        return Finding(PASS, check, next(iter(groups)))
    text = "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
    return Finding(level, check, f"differs: {text}", remedy)


def each(check: str, good: str, problems: Sequence[tuple[str, str]], remedy: str, level: str = WARN) -> Finding:
    """Passes with `good` if there are no (host, problem) pairs."""
    if not problems:
        return Finding(PASS, check, good)
    return Finding(level, check, "; ".join(f"{host}: {problem}" for host, problem in problems), remedy)

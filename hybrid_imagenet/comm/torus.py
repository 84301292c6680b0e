"""Computes grids of ranks for all-reduce in two dimensions: rows, columns, and the parts of a
tensor.

A grid of V rows and H columns (vertical x horizontal, as in Mikami et al., Table 4) holds V * H
ranks. The sum is made by a reduce-scatter in each row, an all-reduce in each column of one H-th of
the data, and an all-gather in each row.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

# Mikami et al., Table 4: number of GPUs -> (vertical, horizontal).
PUBLISHED_GRIDS = {1024: (32, 32), 2048: (32, 64), 2176: (34, 64), 3456: (48, 72), 4096: (64, 64)}


@dataclasses.dataclass(frozen=True)
class Grid:
    """V rows of H ranks each."""

    vertical: int
    horizontal: int

    @property
    def size(self) -> int:
        return self.vertical * self.horizontal

    def __str__(self) -> str:
        return f"{self.vertical}x{self.horizontal}"


def parse_grid(text: str, size: int | None = None) -> Grid:
    """Reads a grid written VxH, as in 2x4.

    Raises:
      ValueError: if the text is not a grid, or the grid does not hold `size` ranks.
    """
    vertical, _, horizontal = text.lower().partition("x")
    if not (
        vertical.isascii() and vertical.isdigit() and horizontal.isascii() and horizontal.isdigit()
    ):
        raise ValueError(f"{text!r} is not a grid: write VxH, as in 2x4")
    grid = Grid(int(vertical), int(horizontal))
    if grid.size == 0:
        raise ValueError(f"{text} is an empty grid: both numbers must be at least 1")
    if size is not None and grid.size != size:
        raise ValueError(f"{text} holds {grid.size} ranks, not {size}: use {nearest_square(size)}")
    return grid


def nearest_square(size: int) -> Grid:
    """The grid of `size` ranks whose sides are closest, with no fewer columns than rows."""
    vertical = max(v for v in range(1, math.isqrt(size) + 1) if size % v == 0)
    return Grid(vertical, size // vertical)


def host_grid(hosts: Sequence[str]) -> Grid | None:
    """One row per host, from the host of every rank; None if the hosts hold different numbers of
    ranks.
    """
    counts = collections.Counter(hosts)
    return Grid(len(counts), counts[hosts[0]]) if len(set(counts.values())) == 1 else None


def default_grid(hosts: Sequence[str]) -> Grid:
    """The grid for these hosts: as published for this number of ranks, else host by host, else
    nearest to a square.

    Hosts count as rows only if there are several, all with the same number of ranks, more than 1.
    """
    size = len(hosts)
    if size in PUBLISHED_GRIDS:
        return Grid(*PUBLISHED_GRIDS[size])
    grid = host_grid(hosts)
    return (
        grid
        if grid is not None and min(grid.vertical, grid.horizontal) > 1
        else nearest_square(size)
    )


def rows(hosts: Sequence[str], grid: Grid) -> list[list[int]]:
    """The ranks of each row, ascending, with the ranks of a host next to each other as far as the
    grid allows.
    """
    first = {host: number for number, host in reversed(list(enumerate(hosts)))}
    order = sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))
    h = grid.horizontal
    return [sorted(order[v * h : (v + 1) * h]) for v in range(grid.vertical)]


def columns(row_ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of each column: those at one place of their rows, which hold the same part of the
    data.
    """
    return [sorted(column) for column in zip(*row_ranks, strict=True)]

"""Computes grids of ranks for all-reduce in two dimensions, and their rows and columns.

A grid of V rows and H columns (vertical x horizontal, as in Mikami et al., Table 4) has V * H
ranks. The sum is a reduce-scatter in each row, an all-reduce of 1/H of the data in each column,
and an all-gather in each row.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

PUBLISHED_GRIDS = {1024: (32, 32), 2048: (32, 64), 2176: (34, 64), 3456: (48, 72), 4096: (64, 64)}
"""Number of GPUs to (vertical, horizontal), from Mikami et al., Table 4."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid of ranks.

    Attributes:
      vertical: Number of rows (V).
      horizontal: Number of ranks in a row (H).
    """

    vertical: int
    horizontal: int

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.vertical * self.horizontal

    def __str__(self) -> str:
        return f"{self.vertical}x{self.horizontal}"


def parse_grid(text: str, size: int | None = None) -> Grid:
    """Parses a grid written as VxH, for example 2x4.

    Args:
      text: The grid.
      size: Number of ranks that the grid must have; None for any number.

    Raises:
      ValueError: If the text is not a grid, or the grid does not have `size` ranks.
    """
    vertical, _, horizontal = text.lower().partition("x")
    if not all(number.isascii() and number.isdigit() for number in (vertical, horizontal)):
        raise ValueError(f"{text!r} is not a grid. Write VxH, for example 2x4.")
    grid = Grid(int(vertical), int(horizontal))
    if grid.size == 0:
        raise ValueError(f"{text} is an empty grid. Both numbers must be at least 1.")
    if size is not None and grid.size != size:
        raise ValueError(
            f"{text} has {grid.size} ranks, but {size} are needed. Use {nearest_square(size)}."
        )
    return grid


def nearest_square(size: int) -> Grid:
    """Returns the grid of `size` ranks nearest to a square, with no more rows than columns."""
    for vertical in range(math.isqrt(size), 0, -1):
        if size % vertical == 0:
            return Grid(vertical, size // vertical)
    raise ValueError(f"{size} ranks do not form a grid")


def host_grid(hosts: Sequence[str]) -> Grid | None:
    """Returns the grid with one row per host.

    Args:
      hosts: Host of every rank.

    Returns:
      The grid; None if the hosts have different numbers of ranks.
    """
    ranks_per_host = collections.Counter(hosts)
    if len(set(ranks_per_host.values())) != 1:
        return None
    return Grid(len(ranks_per_host), ranks_per_host[hosts[0]])


def default_grid(hosts: Sequence[str]) -> Grid:
    """Returns the grid that is used without --torus_grid.

    It is the published grid for this number of ranks. Otherwise it has one row per host if there
    are several hosts with the same number of ranks, more than 1. Otherwise it is the grid nearest
    to a square.

    Args:
      hosts: Host of every rank.
    """
    size = len(hosts)
    if size in PUBLISHED_GRIDS:
        vertical, horizontal = PUBLISHED_GRIDS[size]
        return Grid(vertical, horizontal)
    grid = host_grid(hosts)
    if grid is not None and grid.vertical > 1 and grid.horizontal > 1:
        return grid
    return nearest_square(size)


def rows(hosts: Sequence[str], grid: Grid) -> list[list[int]]:
    """Returns the ranks of each row in ascending order.

    Ranks of a host are next to each other, as far as the grid allows.

    Args:
      hosts: Host of every rank.
      grid: A grid of all ranks.
    """
    first_rank: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first_rank.setdefault(host, rank)
    host_by_host = sorted(range(len(hosts)), key=lambda rank: (first_rank[hosts[rank]], rank))
    row_ranks = []
    for start in range(0, grid.size, grid.horizontal):
        row_ranks.append(sorted(host_by_host[start : start + grid.horizontal]))
    return row_ranks


def columns(row_ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the ranks of each column in ascending order.

    The ranks of a column have the same position in their rows, so the reduce-scatter gives them the
    same chunk of the data.

    Args:
      row_ranks: The result of `rows`.
    """
    return [sorted(column) for column in zip(*row_ranks, strict=True)]

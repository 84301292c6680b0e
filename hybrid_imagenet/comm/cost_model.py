"""Computes the time of an all-reduce by the alpha-beta model, and how much of a step's
backpropagation hides.

Sending n bytes over a link takes alpha + n * beta seconds. On p ranks, n bytes of gradients take

    ring      2 (p-1) a + 2 (p-1)/p n b
    masters   2 (k-1) ai + 2 n bi + 2 (q-1) ae + 2 (q-1)/q n be         (groups of k, q = p/k; Jia
    et al.) torus     2 (X-1) ah + 2 (X-1)/X n bh + 2 (Y-1) av + 2 (Y-1)/Y n/X bv      (X * Y = p;
    Mikami et al.)

with a, b of the link inside a host (i), between hosts (e), along rows (h), along columns (v).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hybrid_imagenet.comm.torus import Grid, nearest_square


@dataclasses.dataclass(frozen=True)
class Link:
    """A link: `latency` in seconds per message, `seconds_per_byte` the reciprocal of its
    bandwidth.
    """

    latency: float
    seconds_per_byte: float

    @classmethod
    def of(cls, gigabytes_per_second: float, microseconds: float) -> Link:
        """From a bandwidth in GB/s (10^9 bytes) and a latency in microseconds."""
        return cls(microseconds * 1e-6, 1e-9 / gigabytes_per_second)

    def shared(self, flows: int) -> Link:
        """The link as one of several simultaneous flows sees it."""
        return Link(self.latency, self.seconds_per_byte * flows)


def ring(size: float, ranks: int, link: Link) -> float:
    """Seconds for `size` bytes around a ring."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * link.latency + 2 * (ranks - 1) / ranks * size * link.seconds_per_byte


def masters(size: float, groups: int, group_size: int, inside: Link, between: Link) -> float:
    """Seconds for reduce in each group, ring over the masters, broadcast in each group."""
    within = (
        2 * (group_size - 1) * inside.latency + 2 * size * inside.seconds_per_byte
        if group_size > 1
        else 0.0
    )
    return within + ring(size, groups, between)


def torus(size: float, grid: Grid, horizontal: Link, vertical: Link) -> float:
    """Seconds for reduce-scatter in rows, all-reduce in columns, all-gather in rows."""
    return ring(size, grid.horizontal, horizontal) + ring(
        size / grid.horizontal, grid.vertical, vertical
    )


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Bytes per second as nccl-tests define it: (n/t) 2 (p-1)/p, the load of each link of a
    ring.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts of equal GPUs; ranks are numbered host by host.

    Attributes:
      hosts: number of hosts.
      local_size: GPUs per host.
      inside: link between GPUs of a host.
      between: link of a host to the others, shared by its GPUs.
    """

    hosts: int
    local_size: int
    inside: Link
    between: Link

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.hosts * self.local_size

    def along(self, neighbors: int) -> Link:
        """The slowest link of rings of `neighbors` consecutive ranks each, of which one at most
        leaves a host.
        """
        return self.inside if self.local_size % neighbors == 0 or self.hosts == 1 else self.between

    def torus_links(self, grid: Grid) -> tuple[Link, Link]:
        """Links of rows and of columns of a grid, whose rows are consecutive ranks.

        A row that crosses hosts is one flow through each; the columns of a row's part on one host
        share its link.
        """
        if self.hosts == 1:
            return self.inside, self.inside
        vertical = self.between.shared(min(grid.horizontal, self.local_size))
        return self.along(grid.horizontal), vertical


Cost = Callable[[float, Topology, Grid | None, float], float]
"""Seconds for an all-reduce over a whole topology, of

  size: bytes on the wire per rank,
  topology: the GPUs,
  grid: what --torus_grid says, if it is given,
  threshold: bytes of --size_switch_kb.

`comm.settings` names that of each algorithm.
"""


def by_ring(size: float, topology: Topology, grid: Grid | None, threshold: float) -> float:
    """`Cost` of one ring over all ranks."""
    return ring(size, topology.ranks, topology.along(topology.ranks))


def by_torus(size: float, topology: Topology, grid: Grid | None, threshold: float) -> float:
    """`Cost` of a torus, by default on the grid nearest to a square."""
    grid = grid or nearest_square(topology.ranks)
    return torus(size, grid, *topology.torus_links(grid))


def by_hierarchical(size: float, topology: Topology, grid: Grid | None, threshold: float) -> float:
    """`Cost` of a torus whose rows are the hosts."""
    return by_torus(size, topology, Grid(topology.hosts, topology.local_size), threshold)


def by_masters(size: float, topology: Topology, grid: Grid | None, threshold: float) -> float:
    """`Cost` of groups with masters, by default hosts."""
    groups = grid or Grid(topology.hosts, topology.local_size)
    inner = topology.along(groups.horizontal)
    return masters(size, groups.vertical, groups.horizontal, inner, topology.along(topology.ranks))


def by_size(size: float, topology: Topology, grid: Grid | None, threshold: float) -> float:
    """`Cost` of masters below `threshold` bytes, else of the ring."""
    return (by_masters if size < threshold else by_ring)(size, topology, grid, threshold)


BACKWARD_SHARE = 2 / 3
"""Backpropagation's share of a step's computation: twice the work of the forward pass."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: a kernel with what follows it.

    Attributes:
      parameters: of all of it.
      operations: multiply-adds of one image's forward pass.
    """

    parameters: int
    operations: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of a step's gradients.

    Attributes:
      seconds: of communication in all.
      exposed: seconds by which it outlasts backpropagation.
      buckets: bytes of each bucket, in the order sent.
    """

    seconds: float
    exposed: float
    buckets: tuple[int, ...]


def exchange(
    layers: Sequence[Layer],
    backward_seconds: float,
    element_bytes: int,
    fusion_bytes: float,
    cost: Callable[[float], float],
) -> Exchange:
    """Sends buckets of fixed size as backpropagation, from the last layer to the first, makes
    gradients.

    A bucket is sent once it holds `fusion_bytes`, the last one when the first layer is done; one
    bucket is under way at a time.

    Args:
      layers: from input to output.
      backward_seconds: of one step.
      element_bytes: bytes per gradient element in the all-reduce.
      fusion_bytes: threshold of a bucket; 0 sends each layer by itself.
      cost: seconds for an all-reduce of N bytes.
    """
    free, held, busy = 0.0, 0, 0.0
    ready = gradients(layers, backward_seconds, element_bytes)
    buckets = []
    for number, (moment, size) in enumerate(ready, 1):
        held += size
        if held >= fusion_bytes or number == len(ready):
            seconds = cost(held)
            free = max(free, moment) + seconds
            busy += seconds
            buckets.append(held)
            held = 0
    return Exchange(busy, max(free - backward_seconds, 0.0), tuple(buckets))


def gradients(
    layers: Sequence[Layer], backward_seconds: float, element_bytes: int
) -> list[tuple[float, int]]:
    """Computes the second at which each layer's gradient is ready, and its bytes, in the order of
    backpropagation.

    Backpropagation spends its time on the layers in proportion to their operations.
    """
    total = sum(layer.operations for layer in layers)
    elapsed, found = 0, []
    for layer in reversed(layers):
        elapsed += layer.operations
        found.append((backward_seconds * elapsed / total, layer.parameters * element_bytes))
    return found

"""Estimates the time of an all-reduce, and how much of it backpropagation hides.

The alpha-beta model: sending n bytes over a link takes a + n b seconds, where a (alpha) is the
latency and b (beta) the reciprocal of the bandwidth. For n bytes of gradients on p ranks:

    ring      2 (p-1) a + 2 (p-1)/p n b
    masters   2 (k-1) ai + 2 n bi + 2 (q-1) ae + 2 (q-1)/q n be
              in q = p/k groups of k ranks (Jia et al.)
    torus     2 (X-1) ah + 2 (X-1)/X n bh + 2 (Y-1) av + 2 (Y-1)/Y n/X bv
              on a grid of Y rows with X ranks each (Mikami et al.)

The indices of a and b stand for links inside a host (i), between hosts (e), along rows (h) and
along columns (v).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hybrid_imagenet.comm.torus import Grid, nearest_square

BACKWARD_SHARE = 2 / 3
"""Fraction of a step's computation that is backpropagation: twice the work of the forward pass."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A network link.

    Attributes:
      latency: Seconds per message.
      seconds_per_byte: Reciprocal of the bandwidth.
    """

    latency: float
    seconds_per_byte: float

    @classmethod
    def of(cls, gigabytes_per_second: float, microseconds: float) -> Link:
        """Creates a link from its bandwidth in GB/s (10^9 bytes) and its latency in us."""
        return cls(microseconds * 1e-6, 1e-9 / gigabytes_per_second)

    def shared(self, flows: int) -> Link:
        """Returns the link as one of `flows` simultaneous flows sees it."""
        return Link(self.latency, self.seconds_per_byte * flows)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Hosts with equal numbers of GPUs; ranks are numbered host by host.

    Attributes:
      hosts: Number of hosts.
      local_size: Number of GPUs per host.
      inside: Link between the GPUs of a host.
      between: Link of a host to the others, which its GPUs share.
    """

    hosts: int
    local_size: int
    inside: Link
    between: Link

    @property
    def ranks(self) -> int:
        """Returns the number of GPUs."""
        return self.hosts * self.local_size

    def slowest_link(self, ring_size: int) -> Link:
        """Returns the slowest link of rings of `ring_size` consecutive ranks each.

        At most one of these rings leaves each host, so a link between hosts is not shared.
        """
        stays_inside = self.local_size % ring_size == 0 or self.hosts == 1
        return self.inside if stays_inside else self.between

    def torus_links(self, grid: Grid) -> tuple[Link, Link]:
        """Returns the links of rows and of columns of a grid.

        Rows are consecutive ranks. A row that crosses hosts is one flow through each of them. The
        columns that pass through the part of a row on one host share the link of this host.
        """
        if self.hosts == 1:
            return self.inside, self.inside
        columns_per_host = min(grid.horizontal, self.local_size)
        return self.slowest_link(grid.horizontal), self.between.shared(columns_per_host)


def ring_seconds(num_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds of an all-reduce around a ring."""
    if ranks == 1:
        return 0.0
    latency = 2 * (ranks - 1) * link.latency
    return latency + 2 * (ranks - 1) / ranks * num_bytes * link.seconds_per_byte


def masters_seconds(
    num_bytes: float, groups: int, group_size: int, inside: Link, between: Link
) -> float:
    """Returns the seconds of reduce in groups, ring over the masters, broadcast in groups.

    Args:
      num_bytes: Bytes of gradients per rank.
      groups: Number of groups, each with one master.
      group_size: Number of ranks per group.
      inside: Link inside a group.
      between: Link between masters.
    """
    seconds_in_groups = 0.0
    if group_size > 1:
        seconds_in_groups = (
            2 * (group_size - 1) * inside.latency + 2 * num_bytes * inside.seconds_per_byte
        )
    return seconds_in_groups + ring_seconds(num_bytes, groups, between)


def torus_seconds(num_bytes: float, grid: Grid, horizontal: Link, vertical: Link) -> float:
    """Returns the seconds of reduce-scatter in rows, all-reduce in columns, all-gather in rows.

    Args:
      num_bytes: Bytes of gradients per rank.
      grid: Rows and columns.
      horizontal: Link along rows.
      vertical: Link along columns.
    """
    row_seconds = ring_seconds(num_bytes, grid.horizontal, horizontal)
    column_seconds = ring_seconds(num_bytes / grid.horizontal, grid.vertical, vertical)
    return row_seconds + column_seconds


CostFunction = Callable[[float, Topology, Grid | None, float], float]
"""Seconds of an all-reduce over all ranks of a topology.

`COSTS` has the function of each algorithm. Its arguments:

  num_bytes: Bytes on the wire per rank.
  topology: The GPUs.
  grid: The value of --torus_grid; None if it is not set.
  threshold_bytes: The value of --size_switch_kb in bytes.
"""


def ring_cost(
    num_bytes: float, topology: Topology, grid: Grid | None, threshold_bytes: float
) -> float:
    """Returns the seconds of one ring over all ranks; see `CostFunction`."""
    return ring_seconds(num_bytes, topology.ranks, topology.slowest_link(topology.ranks))


def torus_cost(
    num_bytes: float, topology: Topology, grid: Grid | None, threshold_bytes: float
) -> float:
    """Returns the seconds of a torus, by default on the grid nearest to a square."""
    grid = grid or nearest_square(topology.ranks)
    horizontal, vertical = topology.torus_links(grid)
    return torus_seconds(num_bytes, grid, horizontal, vertical)


def hierarchical_cost(
    num_bytes: float, topology: Topology, grid: Grid | None, threshold_bytes: float
) -> float:
    """Returns the seconds of a torus with one row per host."""
    host_grid = Grid(topology.hosts, topology.local_size)
    return torus_cost(num_bytes, topology, host_grid, threshold_bytes)


def masters_cost(
    num_bytes: float, topology: Topology, grid: Grid | None, threshold_bytes: float
) -> float:
    """Returns the seconds of groups with masters, by default one group per host."""
    grid = grid or Grid(topology.hosts, topology.local_size)
    inside = topology.slowest_link(grid.horizontal)
    between = topology.slowest_link(topology.ranks)
    return masters_seconds(num_bytes, grid.vertical, grid.horizontal, inside, between)


def size_switched_cost(
    num_bytes: float, topology: Topology, grid: Grid | None, threshold_bytes: float
) -> float:
    """Returns the seconds of masters below `threshold_bytes`, otherwise of the ring."""
    cost = masters_cost if num_bytes < threshold_bytes else ring_cost
    return cost(num_bytes, topology, grid, threshold_bytes)


COSTS: Mapping[str, CostFunction] = {
    "ring": ring_cost,
    "torus": torus_cost,
    "hierarchical": hierarchical_cost,
    "masters": masters_cost,
    "size_switched": size_switched_cost,
}
"""Cost of each value of --allreduce, simple algorithms before complicated ones.

An algorithm that is not in the table is predicted with the cost of the ring.
"""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A kernel and the operations after it, up to the next kernel.

    Attributes:
      parameters: Number of parameters.
      operations: Number of multiply-adds in the forward pass of one image.
    """

    parameters: int
    operations: int


@dataclasses.dataclass(frozen=True)
class ExchangeTiming:
    """The time that exchanging the gradients of a step takes.

    Attributes:
      seconds: Seconds of communication in total.
      exposed_seconds: Seconds by which communication outlasts backpropagation.
      buckets: Bytes of each bucket, in the order in which they are sent.
    """

    seconds: float
    exposed_seconds: float
    buckets: tuple[int, ...]


def simulate_exchange(
    layers: Sequence[Layer],
    backward_seconds: float,
    element_bytes: int,
    fusion_bytes: float,
    cost: Callable[[float], float],
) -> ExchangeTiming:
    """Simulates the exchange of gradients during backpropagation.

    Backpropagation computes gradients from the last layer to the first. A bucket is complete once
    it holds `fusion_bytes`, the last one with the first layer. One bucket is sent at a time.

    Args:
      layers: Layers from input to output.
      backward_seconds: Seconds of backpropagation in a step.
      element_bytes: Bytes per gradient element on the wire.
      fusion_bytes: Size at which a bucket is complete; 0 sends each layer by itself.
      cost: Returns the seconds of an all-reduce of a number of bytes.
    """
    ready_times = gradient_ready_times(layers, backward_seconds, element_bytes)
    link_free_at = 0.0
    total_seconds = 0.0
    buckets = []
    bucket_bytes = 0
    for number, (ready_at, num_bytes) in enumerate(ready_times, 1):
        bucket_bytes += num_bytes
        if bucket_bytes >= fusion_bytes or number == len(ready_times):
            seconds = cost(bucket_bytes)
            link_free_at = max(link_free_at, ready_at) + seconds
            total_seconds += seconds
            buckets.append(bucket_bytes)
            bucket_bytes = 0
    exposed_seconds = max(link_free_at - backward_seconds, 0.0)
    return ExchangeTiming(total_seconds, exposed_seconds, tuple(buckets))


def gradient_ready_times(
    layers: Sequence[Layer], backward_seconds: float, element_bytes: int
) -> list[tuple[float, int]]:
    """Returns when the gradient of each layer is computed, and its size.

    Backpropagation is assumed to spend time on layers in proportion to their operations.

    Args:
      layers: Layers from input to output.
      backward_seconds: Seconds of backpropagation in a step.
      element_bytes: Bytes per gradient element on the wire.

    Returns:
      Pairs of seconds since the start of backpropagation, and bytes, from the last layer to the
      first.
    """
    total_operations = sum(layer.operations for layer in layers)
    done_operations = 0
    ready_times = []
    for layer in reversed(layers):
        done_operations += layer.operations
        ready_at = backward_seconds * done_operations / total_operations
        ready_times.append((ready_at, layer.parameters * element_bytes))
    return ready_times

"""Which algorithm sums which bucket: as told, or measured at start."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
import typing
from collections.abc import Callable, Sequence

import tensorflow as tf

from hybrid_imagenet.comm.algorithms import Algorithm, Masters, ProcessSets, Ring, SixteenBitExchange, Torus
from hybrid_imagenet.comm.fusion import WIRE_BYTES, Bucket
from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import torus

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator

MEASUREMENT_SECONDS = 12.0  # for all candidates and sizes together
CLEARLY_FASTER = 0.95  # of the ring's time: less is within the noise of such a short measurement

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The algorithm for a bucket.

    Attributes:
      name: one of `settings.ALGORITHMS`, or `exchange` for bfloat16.
      algorithm: what does it.
      reason: why, if it was measured.
    """

    name: str
    algorithm: Algorithm
    reason: str = ""


class Selector:
    """Makes the algorithms that the settings ask for and chooses among them. The same on all ranks."""

    def __init__(
        self, communicator: Communicator, settings: Settings, sets: ProcessSets, engine_does_it: bool = False
    ) -> None:
        """Makes the sets of ranks.

        Args:
          communicator: for the ranks, their hosts, and for agreeing on measurements.
          settings: the algorithm, grid and threshold.
          sets: where the sets of ranks are made; one per process, as Horovod refuses duplicates.
          engine_does_it: Horovod's own all-reduce has been set to the algorithm, so that nothing need be composed.

        Raises:
          UserError: if the algorithm needs hosts with equal numbers of ranks.
          ValueError: if the grid does not hold all ranks.
        """
        self._communicator, self._settings = communicator, settings
        self._sets = sets
        self._exchange = Choice("exchange", SixteenBitExchange(communicator.size))
        text, hosts = settings.torus_grid, communicator.hosts
        self.grid = torus.parse_grid(text, communicator.size) if text else torus.default_grid(hosts)
        name = settings.allreduce
        if name == "auto":
            self._candidates = self._all()
        elif engine_does_it:
            self._candidates = {name: Ring()}
        elif name == "hybrid":
            self._candidates = {"masters": self._make("masters"), "ring": Ring()}
        else:
            self._candidates = {name: self._make(name)}

    def select(self, buckets: Sequence[Bucket]) -> list[Choice]:
        """The choice for each bucket. With `auto` all ranks must call it together."""
        sizes = sorted({(b.wire, b.bytes) for b in buckets if b.wire != "bfloat16"})
        if self._settings.allreduce == "auto":
            chosen = self._measure(sizes)
        else:
            chosen = {(wire, size): self._told(size) for wire, size in sizes}
        return [self._exchange if b.wire == "bfloat16" else chosen[b.wire, b.bytes] for b in buckets]

    def _told(self, size: int) -> Choice:
        name = self._settings.allreduce
        if name == "hybrid" and len(self._candidates) > 1:
            name = "masters" if size < self._settings.hybrid_threshold_kb * 1024 else "ring"
        return Choice(name, self._candidates[name])

    def _make(self, name: str) -> Algorithm:
        hosts, rank = self._communicator.hosts, self._communicator.rank
        if name == "ring":
            return Ring()
        grid = self.grid
        if name == "hierarchical":
            try:
                grid = torus.host_grid(hosts)
            except ValueError as error:
                raise UserError(
                    f"--allreduce=hierarchical: {error}: start as many on each, or use --allreduce=ring or torus"
                ) from None
        make = Masters if name == "masters" else Torus
        return make(rank, torus.rows(hosts, grid), self._sets)

    def _all(self) -> dict[str, Algorithm]:
        """Every algorithm that is of use on these ranks; one that coincides with another is left out."""
        found: dict[str, Algorithm] = {"ring": Ring()}
        if min(self.grid.vertical, self.grid.horizontal) > 1:
            found |= {"torus": self._make("torus"), "masters": self._make("masters")}
        try:
            by_host = torus.host_grid(self._communicator.hosts)
        except ValueError:
            return found
        if by_host != self.grid and by_host.vertical > 1 and by_host.horizontal > 1:
            found["hierarchical"] = self._make("hierarchical")
        return found

    def _measure(self, sizes: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Choice]:
        """Times each candidate at each size, the largest first; the ring stays unless another is clearly faster.

        Sizes for which no time is left get the choice of the next larger one that was measured.
        """
        start = time.monotonic()
        chosen: dict[tuple[str, int], Choice] = {}
        last: Choice | None = None
        for place, (wire, size) in enumerate(sorted(sizes, key=lambda item: -item[1])):
            left = MEASUREMENT_SECONDS - (time.monotonic() - start)
            left = self._communicator.broadcast_object(left)
            if len(self._candidates) == 1:
                last = Choice("ring", self._candidates["ring"], "no other algorithm is of use on these ranks")
            elif last is None or left > 0:
                share = left / ((len(sizes) - place) * len(self._candidates))
                last = self._compare(wire, size, share)
            chosen[wire, size] = last
        self._sets.keep([ranks for choice in chosen.values() for ranks in choice.algorithm.sets])
        return chosen

    def _compare(self, wire: str, size: int, share: float) -> Choice:
        """Times the candidates at one size, with `share` seconds for each."""
        seconds: dict[str, float] = {}
        for name, algorithm in self._candidates.items():
            run = summation(algorithm, wire, size // WIRE_BYTES[wire], f"auto_{name}_{wire}_{size}")
            seconds[name] = timed(self._communicator, run, share)
        best = min(seconds, key=lambda name: seconds[name])
        if seconds[best] > CLEARLY_FASTER * seconds["ring"]:
            best = "ring"
        best = self._communicator.broadcast_object(best)
        times = ", ".join(f"{name} {1000 * value:.3g} ms" for name, value in seconds.items())
        reason = f"{size / 2**20:.3g} MiB of {wire}: {times}"
        if self._communicator.rank == 0:
            _log.info("--allreduce=auto takes %s for %s", best, reason)
        return Choice(best, self._candidates[best], reason)


def summation(algorithm: Algorithm, wire: str, elements: int, name: str) -> Callable[[], object]:
    """A function that sums one tensor of zeros over all ranks and waits for the result."""

    @tf.function(autograph=False)
    def run(tensor: tf.Tensor) -> tf.Tensor:
        return algorithm.sum([tensor], name)[0]

    tensor = tf.zeros([elements], wire)
    traced = run.get_concrete_function(tensor)
    return lambda: traced(tensor)[:1].numpy()


def timed(communicator: Communicator, run: Callable[[], object], budget: float, most: int = 7) -> float:
    """The median time of a collective operation in seconds, on the slowest rank; the same on all ranks.

    Args:
      communicator: the ranks, all of which call this.
      run: the operation.
      budget: seconds to spend, within which the first call does not count; if one call takes longer, it has to do.
      most: the largest number of calls that count.
    """
    samples: list[float] = []
    repeats = 0
    while len(samples) <= repeats:
        communicator.barrier()
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
        if len(samples) == 1:
            repeats = communicator.broadcast_object(max(0, min(most, int(budget / max(samples[0], 1e-6)) - 1)))
    return max(communicator.allgather_object(statistics.median(samples[1:] or samples)))

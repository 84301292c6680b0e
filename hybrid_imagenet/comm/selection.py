"""Chooses the algorithm for each bucket, by its size (--allreduce=size_switched) or by measurement (auto)."""

from __future__ import annotations

import logging
import pkgutil
import statistics
import time
import typing
from collections.abc import Callable, Sequence

import tensorflow as tf

from hybrid_imagenet.comm.algorithms import (
    Algorithm,
    Choice,
    Chooser,
    Ranks,
    Ring,
    SixteenBitExchange,
    make,
)
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.fusion import WIRE_BYTES, Bucket
from hybrid_imagenet.comm.settings import ALGORITHMS, Settings
from hybrid_imagenet.options import options_of

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator

MEASUREMENT_SECONDS = 12.0  # for all candidates and sizes together
CLEARLY_FASTER = 0.95  # of the ring's time: less is within the noise of such a short measurement

_log = logging.getLogger(__name__)


class SizeSwitched(Chooser):
    """Sums small buckets by masters and large ones by the ring (Jia et al.)."""

    def __init__(self, ranks: Ranks, *, torus_grid: str | None, size_switch_kb: int) -> None:
        self._threshold = size_switch_kb * 1024
        self._small = make("masters", ranks, torus_grid=torus_grid)
        self._large = make("ring", ranks)

    def choose(self, sizes: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Choice]:
        """Chooses by the threshold."""
        small = [size for size in sizes if size[1] < self._threshold]
        return self._large.choose(sizes) | self._small.choose(small)


class Auto(Chooser):
    """Measures every algorithm that is of use on these ranks, at the sizes of the buckets."""

    def __init__(self, ranks: Ranks, *, torus_grid: str | None) -> None:
        self._communicator = typing.cast("Communicator", ranks.communicator)
        self._collectives = ranks.collectives
        self._candidates = candidates(ranks, {"torus_grid": torus_grid})

    def choose(self, sizes: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Choice]:
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
        self._collectives.keep([ranks for choice in chosen.values() for ranks in choice.algorithm.sets])
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
            _log.info("--allreduce=auto chose %s for %s", best, reason)
        return Choice(best, self._candidates[best], reason)


def candidates(ranks: Ranks, options: dict[str, typing.Any]) -> dict[str, Algorithm]:
    """Returns every algorithm that is of use on these ranks; one that coincides with an earlier one is left out."""
    found: dict[str, Algorithm] = {}
    for name, known in ALGORITHMS.items():
        cls = pkgutil.resolve_name(known.constructor)
        if not issubclass(cls, Algorithm):
            continue
        own = {key: value for key, value in options.items() if key in options_of(known.options)}
        if cls.is_of_use(ranks, **own):
            made = typing.cast(Algorithm, make(name, ranks, **own))
            if all(made.sets != other.sets or not isinstance(made, type(other)) for other in found.values()):
                found[name] = made
    return found


class Selector:
    """Makes the algorithms that the settings ask for and chooses among them. The same on all ranks."""

    def __init__(
        self, communicator: Communicator, settings: Settings, collectives: Collectives, engine_does_it: bool = False
    ) -> None:
        """Makes the sets of ranks.

        Args:
          communicator: for the ranks, their hosts, and for agreeing on measurements.
          settings: the algorithm with its options.
          collectives: the engine's operations; one object per process, as Horovod refuses the same set twice.
          engine_does_it: the engine's own all-reduce has been set to the algorithm, so that nothing need be composed.

        Raises:
          UserError: if the algorithm needs hosts with equal numbers of ranks.
          ValueError: if the grid does not hold all ranks.
        """
        ranks = Ranks(communicator.rank, communicator.hosts, collectives, communicator)
        self._exchange = Choice("exchange", SixteenBitExchange(ranks))
        self._chooser: Chooser
        if engine_does_it:
            ring = Ring(ranks)
            ring.name = settings.allreduce
            self._chooser = ring
        else:
            self._chooser = make(settings.allreduce, ranks, **settings.options)

    def select(self, buckets: Sequence[Bucket]) -> list[Choice]:
        """Returns the choice for each bucket. All ranks must call it together."""
        sizes = sorted({(b.wire, b.bytes) for b in buckets if b.wire != "bfloat16"})
        chosen = self._chooser.choose(sizes)
        return [self._exchange if b.wire == "bfloat16" else chosen[b.wire, b.bytes] for b in buckets]


def summation(algorithm: Algorithm, wire: str, elements: int, name: str) -> Callable[[], object]:
    """Returns a function that sums one tensor of zeros over all ranks and waits for the result."""

    @tf.function(autograph=False)
    def run(tensor: tf.Tensor) -> tf.Tensor:
        return algorithm.sum(tensor, name)

    tensor = tf.zeros([elements], wire)
    traced = run.get_concrete_function(tensor)
    return lambda: traced(tensor)[:1].numpy()


def timed(communicator: Communicator, run: Callable[[], object], budget: float, most: int = 7) -> float:
    """Returns the median time of a collective operation in seconds, on the slowest rank; the same on all ranks.

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

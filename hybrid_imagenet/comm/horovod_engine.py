"""Connects several ranks through Horovod. `start` calls it after the environment has been prepared."""

from __future__ import annotations

import contextlib
import os
import pkgutil
from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hybrid_imagenet.comm import elastic, hosts
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.comm.horovod_collectives import HorovodCollectives
from hybrid_imagenet.comm.selection import Selector
from hybrid_imagenet.comm.settings import ALGORITHMS, Settings
from hybrid_imagenet.errors import UserError

_ELASTIC_ATTEMPTS = 10


class HorovodCommunicator(ConnectedRanks):
    """Runs collectives over all ranks of MPI or Gloo, through Horovod."""

    def __init__(
        self, settings: Settings, watch: elastic.HostWatch | None = None, others: Sequence[Settings] = ()
    ) -> None:
        """Connects to the other ranks.

        Args:
          settings: how gradients travel.
          watch: the former communicator's, when ranks connect anew.
          others: settings of further reductions, whose sets of ranks are to be known too.

        Raises:
          UserError: if the algorithm or grid does not fit the ranks and their hosts, or elastic ranks do not come
            together.
        """
        self._watch = watch
        built_in, keys = False, None
        if elastic.enabled():
            self._connect_elastic()
        place = placement()
        self.collectives = self._host = HorovodCollectives(place.size)
        self._neighbors = self._group_of_neighbors(settings.neighbors, place.rank, place.size)
        if not elastic.enabled():
            built_in = _set_engine(settings)
            composed = any(s.allreduce != "ring" for s in (*([] if built_in else [settings]), *others))
            if composed:
                keys = hosts.gather(placement(), hosts.key(), "horovod")
            if keys is None:
                if composed:
                    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # more sets will follow
                hvd.init(process_sets=self.collectives.made())
        self.rank, self.size = place.rank, place.size
        self._take_places(keys or self.allgather_object(hosts.key()))
        selector = Selector(self, settings, self.collectives, built_in)
        for other in others:
            Selector(self, other, self.collectives)  # asks for its sets
        if not hvd.is_initialized():
            hvd.init(process_sets=self.collectives.made())
        self._reduce_by(settings, selector, _nccl())

    def watch_hosts(self, callback: Callable[[], None]) -> None:
        """Calls back on rank 0 when the elastic launcher tells it of a change."""
        if self._watch is not None:
            self._watch.call(callback)

    def shutdown(self) -> None:
        """Leaves the group; the other ranks' later collectives fail."""
        hvd.shutdown()

    def rejoin(self, settings: Settings) -> HorovodCommunicator:
        """Leaves the group and connects to the ranks that are there now; elastic ranks only."""
        if self._watch is not None:
            self._watch.forget()
        self.shutdown()
        return HorovodCommunicator(settings, self._watch)

    def _connect_elastic(self) -> None:
        # Groups of gradients must not be merged, see `_set_engine`; what that sets besides cannot be set twice.
        os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
        for _ in range(_ELASTIC_ATTEMPTS):
            with contextlib.suppress(ValueError):  # a rank was lost while they connected; Horovod has said so
                hvd.init()
                break
            hvd.shutdown()
        else:
            raise UserError(f"the ranks could not connect to each other in {_ELASTIC_ATTEMPTS} attempts: see above")
        elastic.watch_connections()
        # Horovod asks the launcher for new numbers and changes the variables behind Python's back.
        for name in ("rank", "size", "local_rank", "local_size"):
            os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(hvd, name)())
        if self._watch is None:
            self._watch = elastic.HostWatch()


def _nccl() -> bool:
    """Returns whether NCCL carries the gradients."""
    return bool(hvd.nccl_built() and tf.config.get_visible_devices("GPU"))


def _set_engine(settings: Settings) -> bool:
    """Sets Horovod's own options; returns whether its all-reduce itself does what `settings.allreduce` asks for.

    Horovod reads them when it starts. What the launcher or the user has set stays.
    """
    nccl = _nccl()
    os.environ.setdefault("HOROVOD_CYCLE_TIME", f"{settings.cycle_ms(nccl):g}")
    # A bucket is one group. Groups must not be merged, or sums would be rounded differently from run to run,
    # nor split: a bucket of several gradients holds less than twice the threshold.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(2 * settings.fusion_bytes))
    if not nccl:
        return False
    # Sums are handed on while they still run; otherwise Horovod waits for each on the host, and what follows is
    # launched only then. Not with elastic ranks, which learn of a lost rank by that wait.
    os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    variable: str = pkgutil.resolve_name(ALGORITHMS[settings.allreduce]).built_in
    if variable and not any(settings.options.values()):  # Horovod's own has no options, as a grid of one's own
        os.environ.setdefault(variable, "1")
        return True
    return False

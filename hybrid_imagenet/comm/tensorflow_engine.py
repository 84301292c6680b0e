"""Connects several ranks through TensorFlow's runtime, without Horovod (--engine=tensorflow)."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.cluster import hosts, launcher_variables
from hybrid_imagenet.cluster.environment import RANK_VARIABLE, Placement, read_placement
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.errors import RankTimeoutError, UserError, pluralize

# The watchdog names a silent rank after 30 s, with its stack. TensorFlow must not end the job
# before that, as it would with its default of 10 s.
_HEARTBEAT_TIMEOUT_MS = 35_000
# How often to look for the socket on which TensorFlow's server listens.
_SOCKET_CHECK_SECONDS = 0.001
# gRPC connects to the hosts of this list without a proxy.
_NO_GRPC_PROXY_VARIABLE = "no_grpc_proxy"
CONNECT_SECONDS_VARIABLE = "HYBRID_IMAGENET_CONNECT_SECONDS"
"""Environment variable with the seconds after which the ranks must have found each other."""
# As in the program, where a stage of the startup may last twice --stall_timeout.
_DEFAULT_CONNECT_SECONDS = 600.0
# How long a single attempt to reach a rank may take, and the pause before the next one.
_ATTEMPT_SECONDS = 2.0
_RETRY_SECONDS = 0.1
_MAX_NAMED_RANKS = 5


class TensorFlowCommunicator(ConnectedRanks):
    """Runs collectives over all ranks through servers that TensorFlow starts in each rank."""

    def __init__(
        self,
        settings: CommunicationSettings,
        additional_settings: Sequence[CommunicationSettings] = (),
    ) -> None:
        """Connects to the other ranks.

        A process connects only once; later communicators share the connection.

        Args:
          settings: How gradients are sent.
          additional_settings: Settings of further reductions.

        Raises:
          UserError: If the algorithm or grid does not fit the ranks, their hosts or devices, or the
            ranks cannot find each other.
        """
        placement = read_placement()
        nccl = bool(tf.config.get_visible_devices("GPU"))
        for each_settings in (settings, *additional_settings):
            check_gpu_support(has_gpu=nccl, allreduce=each_settings.allreduce)
        connection = connect_servers(placement)
        host_keys = connection.host_keys
        self.rank = placement.rank
        self.size = placement.size
        self._host_collectives = TensorFlowCollectives(placement.rank, placement.size)
        self._set_topology(placement, host_keys or self.allgather_object(hosts.host_key()))
        if self.rank == 0 and not connection.is_loopback_only:
            ports = pluralize(self.size, "TCP port")
            hosts_count = pluralize(len(set(self.hosts)), "host")
            print(
                f"warning: TensorFlow's engine opens {ports} without a password on all network"
                f" interfaces of {hosts_count}: anyone who reaches one can run code in this job, so"
                " use it only in a network that you trust (docs/trust.md)",
                file=sys.stderr,
                flush=True,
            )
        self.collectives = self._host_collectives
        if nccl:
            self.collectives = TensorFlowCollectives(placement.rank, placement.size, gpu=True)
        # The number of rank 0 counts, because only rank 0 may know the run that is resumed, and
        # with it the batch size.
        group_size = self.broadcast_object(settings.neighbors)
        self._neighbor_group = self._create_neighbor_group(
            group_size, placement.rank, placement.size
        )
        self._set_gradient_exchange(settings, self.make_selector(settings), nccl)

    def check_wire_dtype(self, wire_dtype: str) -> None:
        """Raises UserError for a dtype that would give wrong sums."""
        exchange = self.gradient_exchange
        check_gpu_support(wire_dtype=wire_dtype, has_gpu=exchange is not None and exchange.nccl)

    def shutdown(self) -> None:
        """Does nothing, because the servers end with their processes."""


def check_gpu_support(*, has_gpu: bool, allreduce: str = "ring", wire_dtype: str = "") -> None:
    """Raises UserError for settings that give wrong sums on GPUs.

    These settings need TensorFlow's all-to-all or all-gather over NCCL, which gave wrong sums with
    four ranks on an H100.
    """
    if has_gpu and (allreduce in ("torus", "hierarchical") or wire_dtype == "bfloat16"):
        raise UserError(
            "--engine=tensorflow does not support --allreduce=torus, --allreduce=hierarchical and"
            " --compression=bf16 on GPUs, where they give wrong sums. Use --allreduce=ring with"
            " --compression=fp16, or --engine=horovod."
        )


class Connection(NamedTuple):
    """The connection of this rank's server to the others.

    Attributes:
      host_keys: `hosts.host_key` of every rank; None if TF_CONFIG or Slurm has given the addresses,
        because the ranks have not exchanged their keys then.
      is_loopback_only: Whether other hosts cannot reach the port of this rank.
    """

    host_keys: list[list[str]] | None
    is_loopback_only: bool


@functools.cache
def connect_servers(placement: Placement) -> Connection:
    """Starts this rank's server and connects TensorFlow to the servers of the other ranks.

    The result is cached, because a process can connect only once.

    Args:
      placement: Placement of this process.

    Returns:
      The connection.

    Raises:
      RankTimeoutError: If ranks do not answer in time.
      UserError: If a rank cannot be reached, or TensorFlow has been used before.
    """
    if RANK_VARIABLE not in os.environ:
        launcher_placement = launcher_variables.read_launcher_placement(os.environ)
        if launcher_placement is not None:
            is_one_host = placement.local_size == placement.size
            is_loopback_only = _start_server(
                launcher_placement.servers, placement.rank, is_one_host
            )
            return Connection(None, is_loopback_only)
    own_key = hosts.host_key()
    own_addresses = hosts.select_interfaces(hosts.interfaces()).values()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
        # Keep the port open until all ranks have one, so that no two ranks of a host get the same.
        gathered = hosts.gather_by_mpi([*own_key, port, *own_addresses], placement.size)
    port_index = len(own_key)
    host_keys = [strings[:port_index] for strings in gathered]
    ports = [strings[port_index] for strings in gathered]
    is_one_host = all(key == own_key for key in host_keys)
    if is_one_host:
        # Some containers do not know the name "localhost".
        addresses = ["127.0.0.1"] * placement.size
    else:
        addresses = hosts.reachable_addresses(
            [strings[port_index + 1 :] for strings in gathered], host_keys
        )
    servers = [f"{address}:{port}" for address, port in zip(addresses, ports, strict=True)]
    return Connection(host_keys, _start_server(servers, placement.rank, is_one_host))


def _start_server(servers: Sequence[str], rank: int, is_one_host: bool) -> bool:
    """Starts the server of a rank, and connects TensorFlow to all servers.

    Args:
      servers: Address of every rank's server as host:port, in the order of ranks.
      rank: This rank.
      is_one_host: Whether all ranks are on this host, so that others need not reach the port.

    Returns:
      Whether other hosts cannot reach the port.

    Raises:
      RankTimeoutError: If ranks do not answer in time.
      UserError: If TensorFlow has been used before.
    """
    bypass_proxies(servers, os.environ)
    if private_api.tensorflow_was_used():
        # As in a program that calls `model.fit` before it connects the ranks.
        raise UserError(
            "--engine=tensorflow: the ranks must be connected before TensorFlow is used. Use"
            " --engine=horovod here."
        )
    _wait_for_ranks(servers, rank, connect_seconds(os.environ))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(servers)}),
        task_type="worker",
        task_id=rank,
        rpc_layer="grpc",
    )
    runtime = private_api.eager_context()
    runtime.configure_coordination_service = functools.partial(
        runtime.configure_coordination_service, heartbeat_timeout_in_ms=_HEARTBEAT_TIMEOUT_MS
    )
    port = int(servers[rank].rpartition(":")[2])
    # The constructor of the strategy is the public way to a server and to collective operations.
    # Nothing else of the strategy is used.
    with LoopbackPort(port) if is_one_host else contextlib.nullcontext() as loopback_port:
        tf.distribute.MultiWorkerMirroredStrategy(resolver)
    if threading.current_thread() is threading.main_thread():
        # TensorFlow has replaced the handler of SIGTERM by one that does nothing. Install Python's
        # handler again.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return loopback_port is not None and loopback_port.is_restricted


class LoopbackPort:
    """Restricts a port, on which a library of this process listens, to the loopback interface.

    TensorFlow's server listens on all interfaces, and its API cannot change that. So a thread waits
    until the socket listens, which takes milliseconds, and binds it to the device.

    Attributes:
      is_restricted: Whether it was found and restricted; known after the block.
    """

    def __init__(self, port: int) -> None:
        self.is_restricted = False
        self._port = port
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._wait_for_socket, daemon=True)

    def __enter__(self) -> LoopbackPort:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        self.is_restricted = self.is_restricted or self._restrict()

    def _wait_for_socket(self) -> None:
        while not self._has_ended.wait(_SOCKET_CHECK_SECONDS):
            if self._restrict():
                self.is_restricted = True
                return

    def _restrict(self) -> bool:
        """Returns whether the socket listens and is now bound to the loopback interface."""
        for link in pathlib.Path("/proc/self/fd").iterdir():
            # Other threads open and close files meanwhile, and Linux before 5.7 allows only root to
            # bind to a device.
            with contextlib.suppress(OSError):
                if not str(link.readlink()).startswith("socket:"):
                    continue
                # Closing a duplicate leaves the socket itself open.
                with socket.socket(fileno=os.dup(int(link.name))) as listener:
                    if (
                        listener.family in (socket.AF_INET, socket.AF_INET6)
                        and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        and listener.getsockname()[1] == self._port
                    ):
                        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
                        return True
        return False


def connect_seconds(environ: Mapping[str, str]) -> float:
    """Returns how long to wait for the other ranks.

    Raises:
      UserError: If the environment variable is not a positive number.
    """
    text = environ.get(CONNECT_SECONDS_VARIABLE, str(_DEFAULT_CONNECT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(
            f"{CONNECT_SECONDS_VARIABLE}={text} is not a positive number. Set it to the seconds to"
            " wait for all ranks, or unset it."
        )
    return seconds


def _wait_for_ranks(servers: Sequence[str], rank: int, seconds: float) -> None:
    """Waits until every rank accepts connections at its address.

    TensorFlow itself waits without a limit, in native code that no thread of Python can interrupt.

    Args:
      servers: Address of every rank's server as host:port, in the order of ranks.
      rank: This rank.
      seconds: How long to wait.

    Raises:
      RankTimeoutError: If some ranks have not answered by then.
    """
    deadline = time.monotonic() + seconds
    own_port = int(servers[rank].rpartition(":")[2])
    # Until TensorFlow's server takes over the port, this socket answers the other ranks. It does
    # not accept their connections, because then the port could not be opened again at once.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", own_port))
        except OSError as error:
            raise UserError(
                f"Rank {rank} cannot open its port, {servers[rank]} ({error.strerror}). Use"
                " another port, or end the program that uses it."
            ) from None
        listener.listen(len(servers))
        pending = [other for other in range(len(servers)) if other != rank]
        while pending := [other for other in pending if not _answers(servers[other])]:
            if time.monotonic() > deadline:
                raise _timeout_error(servers, pending, seconds)
            time.sleep(_RETRY_SECONDS)


def _answers(server: str) -> bool:
    """Returns whether a connection to an address host:port succeeds."""
    host, _, port = server.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ATTEMPT_SECONDS):
            return True
    except OSError:
        return False


def _timeout_error(
    servers: Sequence[str], pending: Sequence[int], seconds: float
) -> RankTimeoutError:
    """Returns the error that names the ranks that have not answered."""
    missing = [f"rank {rank} at {servers[rank]}" for rank in pending[:_MAX_NAMED_RANKS]]
    if len(pending) > _MAX_NAMED_RANKS:
        missing.append(pluralize(len(pending) - _MAX_NAMED_RANKS, "more rank"))
    return RankTimeoutError(
        f"{', '.join(missing)} did not answer within {seconds:g} s. Check that these ranks have"
        " started, that the host names lead to the right addresses, and that no firewall blocks"
        f" TCP between the hosts. If the ranks only start slowly, raise {CONNECT_SECONDS_VARIABLE}."
    )


def bypass_proxies(servers: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Makes gRPC connect the ranks directly instead of through the proxy of http_proxy.

    Only gRPC reads no_grpc_proxy, so other programs and libraries still use the proxy. gRPC reads
    no_proxy only if no_grpc_proxy is not set, so the hosts of no_proxy are part of the new value.

    Args:
      servers: Address of every rank's server as host:port.
      environ: Environment variables of this process.
    """
    excluded = environ.get(_NO_GRPC_PROXY_VARIABLE, environ.get("no_proxy", ""))
    hosts_without_proxy = [host.strip() for host in excluded.split(",") if host.strip()]
    hosts_without_proxy += [server.rpartition(":")[0].strip("[]") for server in servers]
    # A dictionary keeps the order and removes duplicates.
    environ[_NO_GRPC_PROXY_VARIABLE] = ",".join(dict.fromkeys(hosts_without_proxy))


class RankGroup(NamedTuple):
    """A group of ranks.

    Attributes:
      number: Number of the group, the same on all ranks.
      ranks: Its ranks in ascending order.
    """

    number: int
    ranks: tuple[int, ...]


class TensorFlowCollectives(Collectives):
    """Runs TensorFlow's collective operations.

    The runtime pairs operations by two numbers: one for the group and one for the operation.
    All tensors of a group are on the same kind of device. So ranks with GPUs have one object for
    tensors on GPUs and another for tensors in host memory.
    """

    def __init__(self, rank: int, size: int, *, gpu: bool = False) -> None:
        """Creates the group of all ranks, after `connect_servers`.

        Args:
          rank: This rank.
          size: Number of ranks.
          gpu: Whether tensors are on GPUs.
        """
        self._rank = rank
        self._gpu = gpu
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        # Label of each operation by its number, to find two operations with the same number.
        self._labels: dict[int, str] = {}
        # Positions that the runtime has given to the ranks of a group, by the group's number.
        self._positions: dict[int, list[int]] = {}
        # NCCL's kernels must start in the same order on all ranks. The runtime runs operations that
        # share a resource in the order of the program.
        self._ordering_token = [tf.Variable(0.0, trainable=False).handle] if gpu else []
        self._all_ranks = self.create_group(range(size))

    def create_group(self, ranks: Sequence[int]) -> RankGroup:
        """Returns the group of these ranks; the first request gives it the next number."""
        key = tuple(sorted(ranks))
        if key not in self._groups:
            self._groups[key] = RankGroup(len(self._groups) + 1, key)
        return self._groups[key]

    def allreduce(
        self,
        tensor: tf.Tensor,
        name: str,
        group: RankGroup | None = None,
        *,
        use_name_scope: bool = False,
    ) -> tf.Tensor:
        if use_name_scope:
            name = _unique_in_graph(name)
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            merge_op="Add",
            final_op="Id",
            **self._pairing("sum", tensor, name, group),
        )

    def allreduce_max(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            merge_op="Max",
            final_op="Id",
            **self._pairing("maximum", tensor, _unique_in_graph(name), None),
        )

    def reducescatter(self, vector: tf.Tensor, name: str, group: RankGroup) -> tf.Tensor:
        """Sends each rank its chunk, and adds the received chunks in the order of ranks.

        The runtime has no reduce-scatter on CPUs.
        """
        received = self._exchange(vector, name, group)
        return tf.add_n(tf.unstack(tf.reshape(received, [len(group.ranks), -1])))

    def allgather(self, vector: tf.Tensor, name: str, group: RankGroup | None = None) -> tf.Tensor:
        group = group or self._all_ranks
        supported = _as_supported_dtype(vector)
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=supported, **self._pairing("gather", supported, name, group)
        )
        rows = tf.reshape(gathered, [len(group.ranks), -1])
        in_rank_order = _reorder(rows, self._rank_positions(group))
        return tf.bitcast(tf.reshape(in_rank_order, [-1]), vector.dtype)

    def alltoall(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        return self._exchange(vector, name, self._all_ranks)

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, group: RankGroup | None = None
    ) -> tf.Tensor:
        if self._gpu:
            # The runtime's broadcast takes no ordering token. The operation of a receiver could
            # start too early and block NCCL's stream, so sum with zeros instead.
            contribution = tensor if self._rank == root else tf.zeros_like(tensor)
            return self.allreduce(contribution, f"{name} from {root}", group)
        pairing = self._pairing(f"broadcast from {root}", tensor, name, group)
        del pairing["ordering_token"]
        if self._rank == root:
            return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **pairing)
        return tf.raw_ops.CollectiveBcastRecvV2(T=tensor.dtype, shape=tensor.shape, **pairing)

    def _exchange(self, vector: tf.Tensor, name: str, group: RankGroup) -> tf.Tensor:
        """Sends chunk i of a vector [n] to the i-th rank of the group.

        Returns:
          The chunks that this rank has received, [n], in the order of the ranks.
        """
        size = len(group.ranks)
        positions = self._rank_positions(group)
        ranks_by_position = sorted(range(size), key=positions.__getitem__)
        chunks = tf.reshape(_as_supported_dtype(vector), [size, -1])
        sent = _reorder(chunks, ranks_by_position)
        received = tf.raw_ops.CollectiveAllToAllV2(
            input=sent, **self._pairing("exchange", sent, name, group)
        )
        in_rank_order = _reorder(received, positions)
        return tf.bitcast(tf.reshape(in_rank_order, [-1]), vector.dtype)

    def _rank_positions(self, group: RankGroup) -> list[int]:
        """Returns the runtime's position of each rank of a group.

        The runtime orders ranks itself and does not report the order, so the ranks gather their
        numbers once per group to find it out.
        """
        if group.number not in self._positions:
            with tf.init_scope():
                # Integers of 32 bits would be in host memory, even if the group is on GPUs.
                own_rank = tf.constant([self._rank], tf.float32)
                pairing = self._pairing("order", own_rank, f"group_{group.number}", group)
                gathered = tf.raw_ops.CollectiveGatherV2(input=own_rank, **pairing)
                ranks = gathered.numpy().tolist()
            self._positions[group.number] = [ranks.index(rank) for rank in group.ranks]
        return self._positions[group.number]

    def _pairing(
        self, kind: str, tensor: tf.Tensor, name: str, group: RankGroup | None
    ) -> dict[str, Any]:
        """Returns the arguments by which the runtime pairs an operation with other ranks.

        Args:
          kind: The kind of operation.
          tensor: The tensor that is sent.
          name: The name of the operation.
          group: The ranks of the operation; None for all.

        Raises:
          ValueError: If another operation has the same number by chance.
        """
        group = group or self._all_ranks
        # For a number that it has seen before, the runtime requires the same shape and dtype, so
        # they are part of the number.
        label = f"{group.number} {kind} {tensor.dtype.name} {tensor.shape} {name}"
        # The runtime's numbers are positive and have 31 bits.
        number = zlib.crc32(label.encode()) >> 1
        other_label = self._labels.setdefault(number, label)
        if other_label != label:
            raise ValueError(
                f"The operations {label!r} and {other_label!r} have the same number. Rename one."
            )
        return {
            "group_size": len(group.ranks),
            "group_key": 2 * group.number + self._gpu,
            "instance_key": number,
            "ordering_token": self._ordering_token,
            "communication_hint": "nccl" if self._gpu else "ring",
        }


def _unique_in_graph(name: str) -> str:
    """Returns a name that no other operation of the graph that is traced now has."""
    if tf.executing_eagerly():
        return name
    unique_name: str = tf.compat.v1.get_default_graph().unique_name(name)
    return unique_name


def _as_supported_dtype(vector: tf.Tensor) -> tf.Tensor:
    """Returns uint16 as the bits of float16, because the operations do not support uint16."""
    return tf.bitcast(vector, tf.float16) if vector.dtype == tf.uint16 else vector


def _reorder(rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """Returns the rows with the indices `order`, without a copy if that changes nothing."""
    return rows if list(order) == sorted(order) else tf.gather(rows, order)

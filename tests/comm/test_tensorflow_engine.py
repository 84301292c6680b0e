"""Tests errors of TensorFlow's engine. Its collectives are tested together with Horovod's."""

import json
import socket
import subprocess
import sys
import time

import pytest

from hybrid_imagenet.cluster import hosts
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.comm import tensorflow_engine
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.errors import EXIT_STALLED, UserError
from tests.ranks import ROOT, environment
from tests.support import program


def connection_error(monkeypatch, keys):
    """Returns the error of connecting two ranks whose hosts have these keys."""
    monkeypatch.setattr(hosts, "gather_by_mpi", lambda key, size: keys)
    with pytest.raises(UserError) as error:
        tensorflow_engine.connect_servers(Placement(0, 2, 0, 2))
    return str(error.value)


def test_connect_servers_without_a_reachable_address_raises(monkeypatch):
    key = hosts.host_key()
    keys = [[*key, "4000", "10.0.0.1"], ["far", key[1], "4000"]]
    assert connection_error(monkeypatch, keys).startswith(
        "host far has no unique IPv4 address at which other hosts"
    )
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert (
        "on the interfaces of NCCL_SOCKET_IFNAME=eth7. Correct --network_interfaces"
        in connection_error(monkeypatch, keys)
    )


def bound_device(listener):
    return listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


def test_loopback_port_binds_only_the_listening_socket_of_its_port():
    with socket.socket() as other, socket.socket() as listener:
        other.bind(("", 0))
        other.listen()
        listener.bind(("", 0))
        loopback_port = tensorflow_engine.LoopbackPort(listener.getsockname()[1])
        with loopback_port:
            listener.listen()
        assert loopback_port.is_restricted
        assert bound_device(listener) == b"lo"
        assert bound_device(other) == b""
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5):
            pass


def test_loopback_port_without_a_listening_socket_is_not_restricted():
    with socket.socket() as closed:
        closed.bind(("", 0))
        with tensorflow_engine.LoopbackPort(closed.getsockname()[1]) as loopback_port:
            pass
    assert not loopback_port.is_restricted


PRINT_DEVICES = """
import os, pathlib, socket
import hybrid_imagenet as hi

hi.init()
total = hi.communicator().allgather_object(hi.rank())
devices = []
for link in pathlib.Path("/proc/self/fd").iterdir():
    if link.is_symlink() and str(link.readlink()).startswith("socket:"):
        with socket.socket(fileno=os.dup(int(link.name))) as listener:
            family = listener.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
            listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and family != socket.AF_UNIX:
                device = listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                devices.append(device.decode().rstrip(chr(0)))
# One write, so that the lines of the ranks do not mix.
os.write(1, f"{total} listens on {devices}\\n".encode())
"""


def test_ranks_of_one_host_behind_a_proxy_connect_and_listen_on_loopback_only(tmp_path):
    script = tmp_path / "devices.py"
    script.write_text(PRINT_DEVICES)
    command = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2", "--engine=tensorflow"]
    # Nothing listens there.
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment() | proxies,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1] listens on ['lo']"] * 2
    assert "without a password" not in done.stderr


WRONG_SUMS = "Use --allreduce=ring with --compression=fp16, or --engine=horovod"


@pytest.mark.parametrize("allreduce", ["torus", "hierarchical"])
def test_tensorflow_engine_with_an_allreduce_that_gives_wrong_sums_on_gpus_raises(
    allreduce, monkeypatch
):
    monkeypatch.setattr(tensorflow_engine.tf.config, "get_visible_devices", lambda kind: ["GPU:0"])
    with pytest.raises(UserError, match=WRONG_SUMS):
        tensorflow_engine.TensorFlowCommunicator(CommunicationSettings(allreduce=allreduce))
    tensorflow_engine.check_gpu_support(has_gpu=True, allreduce="masters")


def test_tensorflow_engine_on_gpus_rejects_to_send_bfloat16():
    with pytest.raises(UserError, match=WRONG_SUMS):
        tensorflow_engine.check_gpu_support(has_gpu=True, wire_dtype="bfloat16")
    tensorflow_engine.check_gpu_support(has_gpu=False, wire_dtype="bfloat16")
    tensorflow_engine.check_gpu_support(has_gpu=True, wire_dtype="float16")


def test_tensorflow_engine_warns_once_that_ports_are_open_on_all_interfaces(monkeypatch, capsys):
    connection = tensorflow_engine.Connection([["near", "a"], ["far", "b"]], False)
    monkeypatch.setattr(tensorflow_engine, "connect_servers", lambda placement: connection)
    monkeypatch.setattr(
        tensorflow_engine.TensorFlowCommunicator, "broadcast_object", lambda self, value: value
    )
    for rank in range(2):
        monkeypatch.setattr(
            tensorflow_engine, "read_placement", lambda rank=rank: Placement(rank, 2)
        )
        tensorflow_engine.TensorFlowCommunicator(CommunicationSettings())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: TensorFlow's engine opens 2 TCP ports without a password on all network "
    )
    assert "interfaces of 2 hosts: anyone who reaches one can run code in this job" in line


def test_connect_servers_after_tensorflow_has_started_raises(monkeypatch):
    tensorflow_engine.tf.constant(1.0) + 1.0
    keys = [[*hosts.host_key(), str(4000 + rank), "10.0.0.1"] for rank in range(2)]
    assert "must be connected before TensorFlow is used" in connection_error(monkeypatch, keys)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "10.0.0.1,node2"),
        ({"no_proxy": "localhost, .site"}, "localhost,.site,10.0.0.1,node2"),
        ({"no_proxy": "localhost", "no_grpc_proxy": "node2"}, "node2,10.0.0.1"),
    ],
)
def test_bypass_proxies_adds_the_hosts_of_all_ranks(environ, expected):
    servers = ["10.0.0.1:4000", "10.0.0.1:4001", "node2:4000"]
    variables = dict(environ)
    tensorflow_engine.bypass_proxies(servers, variables)
    assert variables == environ | {"no_grpc_proxy": expected}


def test_connect_servers_does_not_use_a_proxy_between_ranks(monkeypatch):
    monkeypatch.setenv("no_grpc_proxy", "")
    tensorflow_engine.tf.constant(1.0) + 1.0
    keys = [[*hosts.host_key(), str(4000 + rank), "10.0.0.1"] for rank in range(2)]
    connection_error(monkeypatch, keys)
    assert tensorflow_engine.os.environ["no_grpc_proxy"] == "127.0.0.1"


def free_ports(count):
    """Returns ports of this host that no program uses now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def start_rank(rank, ports, seconds):
    """Starts a rank of a job of TF_CONFIG that calls `hi.init` and sums the ranks' numbers."""
    servers = [f"127.0.0.1:{port}" for port in ports]
    config = {"cluster": {"worker": servers}, "task": {"type": "worker", "index": rank}}
    code = """
import hybrid_imagenet as hi
hi.init(1)
import tensorflow as tf
print("sum", int(hi.communicator().allreduce_sum(tf.constant(hi.rank() + 1.0), "numbers")))
"""
    variables = {
        "TF_CONFIG": json.dumps(config),
        tensorflow_engine.CONNECT_SECONDS_VARIABLE: str(seconds),
    }
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=program.environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_init_without_the_other_rank_names_it_and_ends():
    ports = free_ports(2)
    process = start_rank(0, ports, seconds=2)
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == EXIT_STALLED, errors
    assert errors.splitlines()[-1].startswith(
        f"error: rank 0 on {socket.gethostname()}: rank 1 at 127.0.0.1:{ports[1]} did not answer"
        " within 2 s. Check that these"
    )
    assert "Traceback" not in errors
    assert output == ""


def test_init_waits_for_a_rank_that_comes_later():
    ports = free_ports(2)
    processes = [start_rank(1, ports, seconds=120)]
    try:
        time.sleep(5)
        processes.append(start_rank(0, ports, seconds=120))
        for process in processes:
            output, errors = process.communicate(timeout=120)
            assert output == "sum 3\n", errors
    finally:
        for process in processes:
            process.kill()


def test_init_whose_port_is_used_raises():
    ports = free_ports(2)
    with socket.socket() as other:
        other.bind(("", ports[0]))
        other.listen()
        process = start_rank(0, ports, seconds=120)
        try:
            errors = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    assert process.returncode == 2
    assert f"Rank 0 cannot open its port, 127.0.0.1:{ports[0]} (Address already in use)" in errors


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon", ""])
def test_connect_seconds_that_are_not_positive_raise(text):
    variables = {tensorflow_engine.CONNECT_SECONDS_VARIABLE: text}
    with pytest.raises(UserError, match=f"{text} is not a positive number"):
        tensorflow_engine.connect_seconds(variables)


def test_connect_seconds_are_ten_minutes_by_default():
    assert tensorflow_engine.connect_seconds({}) == 600.0

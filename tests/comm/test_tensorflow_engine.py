"""Errors of TensorFlow's engine. Its collectives are tested together with Horovod's."""

import pytest

from hybrid_imagenet.comm import hosts, tensorflow_engine
from hybrid_imagenet.comm.environment import Placement
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.errors import UserError


def connection_error(monkeypatch, found):
    monkeypatch.setattr(hosts, "gather_by_mpi", lambda own, size: found)
    with pytest.raises(UserError) as caught:
        tensorflow_engine.connect_servers(Placement(0, 2, 0, 2))
    return str(caught.value)


def test_connect_servers_without_a_reachable_address_raises(monkeypatch):
    own = hosts.host_key()
    found = [[*own, "4000", "10.0.0.1"], ["far", own[1], "4000"]]
    assert connection_error(monkeypatch, found).startswith(
        "host far has no unique IPv4 address at which other hosts"
    )
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert (
        "on the interfaces of NCCL_SOCKET_IFNAME=eth7. Correct --network_interfaces"
        in connection_error(monkeypatch, found)
    )


@pytest.mark.parametrize(
    "asked", [{"allreduce": "torus"}, {"allreduce": "hierarchical"}, {"compression": "bf16"}]
)
def test_settings_with_wrong_sums_on_gpus_raise(asked, monkeypatch):
    monkeypatch.setattr(tensorflow_engine.tf.config, "get_visible_devices", lambda kind: ["GPU:0"])
    with pytest.raises(
        UserError, match="Use --allreduce=ring with --compression=fp16, or --engine=horovod"
    ):
        tensorflow_engine.TensorFlowCommunicator(CommunicationSettings(**asked))
    tensorflow_engine.check_gpu_support(CommunicationSettings(allreduce="masters"))


def test_connecting_warns_once_that_ports_are_open_on_all_interfaces(monkeypatch, capsys):
    keys = [["near", "a"], ["far", "b"]]
    monkeypatch.setattr(tensorflow_engine, "connect_servers", lambda place: keys)
    monkeypatch.setattr(
        tensorflow_engine.TensorFlowCommunicator, "broadcast_object", lambda self, value: value
    )
    for rank in range(2):
        monkeypatch.setattr(tensorflow_engine, "placement", lambda rank=rank: Placement(rank, 2))
        tensorflow_engine.TensorFlowCommunicator(CommunicationSettings())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: TensorFlow's engine opens 2 TCP ports without a password on all network "
    )
    assert "interfaces of 2 hosts: anyone who reaches one can run code in this job" in line


def test_connect_servers_after_tensorflow_has_started_raises(monkeypatch):
    tensorflow_engine.tf.constant(1.0) + 1.0
    found = [[*hosts.host_key(), str(4000 + rank), "10.0.0.1"] for rank in range(2)]
    assert "must be connected before TensorFlow is used" in connection_error(monkeypatch, found)

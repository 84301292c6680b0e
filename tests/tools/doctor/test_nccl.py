"""The doctor's trial of NCCL: which ranks are started, and what their output comes to."""

import copy

import pytest

from hybrid_imagenet.tools.doctor import nccl, one_sum
from hybrid_imagenet.tools.doctor.findings import FAIL, PASS, WARN
from hybrid_imagenet.tools.doctor.nccl import Outcome, Trial
from tests.comm.test_nccl_log import BETWEEN, INSIDE
from tests.tools.doctor.healthy import GPU, HEALTHY

HOSTS = {"a": HEALTHY, "b": HEALTHY}
ONE, TWO = Trial("inside a", "a:2", between=False), Trial("from a to b", "a:1,b:1", between=True)
SOCKET = INSIDE.replace("P2P/CUMEM/read", "NET/Socket/0")


def test_one_trial_inside_each_kind_of_host_and_one_between_two():
    other = copy.deepcopy(HEALTHY) | {"gpus": [GPU | {"name": "P40"}] * 2}
    lone = copy.deepcopy(HEALTHY) | {"gpus": [GPU]}
    without = copy.deepcopy(HEALTHY) | {"gpus": []}
    unbuilt = copy.deepcopy(HEALTHY) | {"nccl": False}
    assert nccl.trials(HOSTS) == [ONE, TWO]
    assert [t.hosts for t in nccl.trials({"x": without, "a": HEALTHY, "p": other})] == ["a:2", "p:2", "a:1,p:1"]
    assert [t.hosts for t in nccl.trials({"a": lone, "b": unbuilt})] == []
    assert [t.hosts for t in nccl.trials({"a": lone, "b": lone})] == ["a:1,b:1"]


@pytest.mark.parametrize(
    ("trial", "outcome", "level", "text"),
    [
        (ONE, Outcome(0, INSIDE), PASS, "P2P/CUMEM/read"),
        (ONE, Outcome(0, INSIDE.replace("P2P/CUMEM/read", "SHM/direct/direct")), WARN, "IOMMU"),
        (ONE, Outcome(0, SOCKET), WARN, "should not cross the network"),
        (ONE, Outcome(0, "rank 0 of 2: the sum is right, on the CPU"), FAIL, "did not go through NCCL"),
        (ONE, Outcome(None, "a line\n"), FAIL, "no sum within 120 s: a line"),
        (ONE, Outcome(1, "h:1:1 [0] x.cc:1 NCCL WARN Cuda failure\nbye\n"), FAIL, "exit code 1: h:1:1 [0] x.cc:1 NCCL"),
        (TWO, Outcome(0, BETWEEN), WARN, "nvidia-peermem"),
        (TWO, Outcome(0, BETWEEN.replace("NET/IB/1\n", "NET/IB/1/GDRDMA\n")), PASS, "GDRDMA"),
        (TWO, Outcome(0, SOCKET), WARN, "RDMA adapters are there but not used"),
    ],
)  # fmt: skip
def test_the_output_of_two_ranks_is_judged(trial, outcome, level, text):
    finding = nccl.judge(trial, outcome, HOSTS)
    assert finding.level == level
    assert text in f"{finding.message} {finding.remedy}"
    assert bool(finding.remedy) == (level != PASS)


def test_sockets_are_right_between_hosts_without_adapters():
    hosts = {name: copy.deepcopy(HEALTHY) | {"rdma": []} for name in ("a", "b")}
    assert nccl.judge(TWO, Outcome(0, SOCKET), hosts).level == PASS


def test_all_trials_are_made():
    asked = []

    def attempt(trial):
        asked.append(trial)
        return Outcome(0, INSIDE if trial == ONE else BETWEEN)

    assert [f.check for f in nccl.examine(HOSTS, attempt)] == ["NCCL inside a", "NCCL from a to b"]
    assert asked == [ONE, TWO]


def test_the_ranks_of_a_trial_add_up_and_say_where(pools):
    for rank, done in enumerate(pools[2].call(run_sum)):
        assert done == [0, f"rank {rank} of 2: the sum is right, on the CPU\n"]


def run_sum():
    """The rank of a trial, in a rank of the pool: exit code and output."""
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = one_sum.add()
    return [code, output.getvalue()]

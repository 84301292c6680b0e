"""Tests the doctor's trials: which ranks are started, and the verdict on their output."""

import copy

import pytest

from hybrid_imagenet.tools.doctor import trials
from hybrid_imagenet.tools.doctor.diagnosis import FAIL, PASS, WARN
from hybrid_imagenet.tools.doctor.trials import Trial, TrialOutcome
from tests.comm.test_nccl_log import BETWEEN, INSIDE
from tests.tools.doctor.healthy import GPU, HEALTHY

HOSTS = {"a": HEALTHY, "b": HEALTHY}
ONE = Trial("inside a", "a:2", between_hosts=False)
TWO = Trial("from a to b", "a:1,b:1", between_hosts=True)
SUMS = "rank 0 of 2: the sum is right, on the CPU\nrank 1 of 2: the sum is right, on the CPU\n"
SOCKET = INSIDE.replace("P2P/CUMEM/read", "NET/Socket/0")


def test_choose_trials_inside_each_kind_of_host_and_between_two():
    other = copy.deepcopy(HEALTHY) | {"gpus": [GPU | {"name": "P40"}] * 2}
    lone = copy.deepcopy(HEALTHY) | {"gpus": [GPU]}
    without = copy.deepcopy(HEALTHY) | {"gpus": []}
    unbuilt = copy.deepcopy(HEALTHY) | {"nccl": False}
    assert trials.choose_trials(HOSTS, True) == [ONE, TWO]
    hosts = {"x": without, "a": HEALTHY, "p": other}
    assert [t.hosts for t in trials.choose_trials(hosts, True)] == ["a:2", "p:2", "a:1,p:1"]
    assert [t.hosts for t in trials.choose_trials({"a": lone, "b": unbuilt}, True)] == []
    assert [t.hosts for t in trials.choose_trials({"a": lone, "b": lone}, True)] == ["a:1,b:1"]
    assert [t.hosts for t in trials.choose_trials(hosts, False)] == ["x:2", "x:1,a:1"]


@pytest.mark.parametrize(
    ("trial", "nccl_output", "level", "text"),
    [
        (ONE, INSIDE, PASS, "P2P/CUMEM/read"),
        (ONE, INSIDE.replace("P2P/CUMEM/read", "SHM/direct/direct"), WARN, "IOMMU"),
        (ONE, SOCKET, WARN, "should not cross the network"),
        (ONE, "", FAIL, "did not use NCCL"),
        (TWO, BETWEEN, WARN, "nvidia-peermem"),
        (TWO, BETWEEN.replace("NET/IB/1\n", "NET/IB/1/GDRDMA\n"), PASS, "GDRDMA"),
        (TWO, SOCKET, WARN, "RDMA adapters are not used"),
    ],
)
def test_judge_outcome_depends_on_the_transport(trial, nccl_output, level, text):
    finding = trials.judge_outcome(trial, TrialOutcome(0, nccl_output + SUMS), HOSTS, 5)
    assert finding.level == level
    assert text in f"{finding.message} {finding.remedy}"
    assert bool(finding.remedy) == (level != PASS)


def test_judge_outcome_of_sockets_between_hosts_without_adapters_passes():
    hosts = {name: copy.deepcopy(HEALTHY) | {"rdma": []} for name in ("a", "b")}
    assert trials.judge_outcome(TWO, TrialOutcome(0, SOCKET + SUMS), hosts, 5).level == PASS


@pytest.mark.parametrize("hosts", [None, HOSTS])
@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (TrialOutcome(0, SUMS.splitlines()[0]), "exit code 0: rank 0 of 2"),
        (TrialOutcome(4, "error: host b: lost\nbye\n"), "exit code 4: error: host b: lost"),
        (
            TrialOutcome(1, "h:1:1 [0] x.cc:1 NCCL WARN Cuda failure\nbye\n"),
            "exit code 1: h:1:1 [0] x.cc:1 NCCL",
        ),
        (TrialOutcome(None, "a line\n"), "no sum within 120 s: a line"),
    ],
)
def test_judge_outcome_of_a_failed_trial_names_a_command_to_repeat_it(outcome, words, hosts):
    finding = trials.judge_outcome(ONE, outcome, hosts, 5)
    assert finding.level == FAIL and words in finding.message
    assert "hybrid-imagenet run -np 2 -H a:2" in finding.remedy


@pytest.mark.slow
def test_run_trials_with_real_ranks_passes():
    findings = trials.run_trials({"localhost": {}}, False, trials.run_trial)
    assert [(f.level, f.check) for f in findings] == [(PASS, "two ranks inside localhost")]

"""Tests the doctor's trials: which ranks are started, and what their output means."""

import copy

import pytest

from hybrid_imagenet.commands.doctor import trials
from hybrid_imagenet.commands.doctor.diagnosis import FAIL, PASS
from hybrid_imagenet.commands.doctor.trials import Trial, TrialOutcome
from tests.commands.doctor.healthy import GPU, HEALTHY

HOSTS = {"a": HEALTHY, "b": HEALTHY}
ONE = Trial("inside a", "a:2")
TWO = Trial("from a to b", "a:1,b:1")
SUMS = "rank 0 of 2: the sum is right, on the CPU\nrank 1 of 2: the sum is right, on the CPU\n"


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


@pytest.mark.parametrize(("expect_nccl", "check"), [(True, "NCCL"), (False, "two ranks")])
def test_check_outcome_of_two_right_sums_passes(expect_nccl, check):
    finding = trials.check_outcome(TWO, TrialOutcome(0, SUMS), expect_nccl, 5)
    assert (finding.level, finding.check, finding.remedy) == (PASS, f"{check} from a to b", "")
    assert finding.message == "they summed a vector in 5 s, including their start"


@pytest.mark.parametrize("expect_nccl", [True, False])
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
def test_check_outcome_of_a_failed_trial_names_a_command_to_repeat_it(outcome, words, expect_nccl):
    finding = trials.check_outcome(ONE, outcome, expect_nccl, 5)
    assert finding.level == FAIL and words in finding.message
    assert "hybrid-imagenet run -np 2 -H a:2" in finding.remedy


@pytest.mark.slow
def test_run_trials_with_real_ranks_passes():
    findings = trials.run_trials({"localhost": {}}, False, trials.run_trial)
    assert [(f.level, f.check) for f in findings] == [(PASS, "two ranks inside localhost")]

"""The doctor's trial of TensorFlow and of two ranks."""

import pytest

from hybrid_imagenet.tools.doctor import nccl, ranks
from hybrid_imagenet.tools.doctor.findings import FAIL, PASS
from hybrid_imagenet.tools.doctor.nccl import Outcome

GOOD = Outcome(0, "rank 0 of 2: the sum is right, on the CPU\nrank 1 of 2: the sum is right, on the CPU\n")


def examine(names, imported, outcome):
    tried = []

    def attempt(trial):
        tried.append(trial.hosts)
        return outcome

    return ranks.examine(names, lambda: imported, attempt), tried


def test_ranks_are_tried_inside_the_first_host_and_between_two():
    findings, tried = examine(["a"], Outcome(0, "2.21.0\n"), GOOD)
    assert [(f.level, f.check) for f in findings] == [(PASS, "TensorFlow"), (PASS, "two ranks on a")]
    assert findings[0].message.startswith("2.21.0, imported in ")
    assert tried == ["a:2"]
    findings, tried = examine(["a", "b", "c"], Outcome(0, "2.21.0\n"), GOOD)
    assert findings[-1].check == "two ranks from a to b" and tried == ["a:2", "a:1,b:1"]


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome(0, "rank 0 of 2: the sum is right, on the CPU\n"), "exit code 0: rank 0 of 2"),
        (Outcome(4, "error: host b: lost\nbye\n"), "exit code 4: error: host b: lost"),
        (Outcome(None, ""), "no sum within 120 s"),
    ],
)
def test_ranks_that_do_not_add_up_fail_with_a_command_to_repeat(outcome, words):
    findings, _ = examine(["a"], Outcome(0, "2.21.0"), outcome)
    assert findings[1].level == FAIL and words in findings[1].message
    assert "hybrid-imagenet run -np 2 -H a:2" in findings[1].remedy


def test_without_tensorflow_no_ranks_are_started():
    findings, tried = examine(["a"], Outcome(1, "Traceback\nModuleNotFoundError: No module named 'tensorflow'\n"), GOOD)
    assert [(f.level, f.check) for f in findings] == [(FAIL, "TensorFlow")]
    assert "No module named 'tensorflow'" in findings[0].message and tried == []


def test_real_ranks_on_this_host():
    findings = ranks.examine(["localhost"], ranks.import_tensorflow, nccl.run)
    assert [(f.level, f.check) for f in findings] == [(PASS, "TensorFlow"), (PASS, "two ranks on localhost")], findings

"""Tests several cells at once: their cores and GPUs, equal results, failures and Ctrl-C."""

import json
import os
import sys

from hybrid_imagenet.cluster import gpus
from studies import jobs, running, trial_runs
from studies.running import Place

FLAGS = ("--dataset=digits", "--model=resnet10", "--epochs=2")


def cells(root, seeds):
    return [trial_runs.create(root, (*FLAGS, f"--seed={seed}"), 1) for seed in seeds]


def facts_of(cell):
    """Returns the facts that `pretend.py` has printed for a cell."""
    return json.loads(cell.output.read_text().splitlines()[1])


def test_places_divide_cores_and_gpus_among_jobs():
    assert jobs.places(1, 1, range(16), 4, {"CUDA_VISIBLE_DEVICES": "1"}) == [Place()]
    four = jobs.places(4, 1, range(16), 2, {})
    assert [sorted(place.cores) for place in four] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert [place.gpus for place in four] == ["0", "1", "0", "1"]
    assert [sorted(place.cores) for place in jobs.places(3, 1, {2, 5}, 0, {})] == [[2], [2], [5]]
    pairs = jobs.places(3, 2, range(6), 5, {"CUDA_VISIBLE_DEVICES": "7,3,GPU-a,1,0"})
    assert [place.gpus for place in pairs] == ["7,3", "GPU-a,1", "7,3"]
    # There are too few GPUs. The run itself raises the error.
    assert {place.gpus for place in jobs.places(2, 2, range(4), 1, {})} == {None}


def test_jobs_at_once_have_the_results_of_jobs_one_after_another(tmp_path, monkeypatch):
    # Each cell runs `pretend.py` for half a second.

    def command(cell, launcher):
        return [
            sys.executable,
            "-m",
            "tests.studies.pretend",
            str(cell.directory),
            "0.5",
            *cell.flags,
        ]

    monkeypatch.setattr(running, "command", command)
    monkeypatch.setattr(gpus, "count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    planned = [cells(tmp_path / name, (2, 3)) for name in ("alone", "together")]
    alone = list(jobs.ended(planned[0], "mpirun"))
    together = list(jobs.ended(planned[1], "mpirun", 2))
    assert [end.number for end in alone] == [0, 1]
    assert sorted(end.number for end in together) == [0, 1]
    for end in together:
        same = alone[end.number].result
        assert (end.result.status, end.result.summary, end.ran) == (same.status, same.summary, True)
    assert [end.result.status for end in alone].count(trial_runs.FAILED) == 1
    assert alone[1].result.reason == "exit code 1: error: seed 3 fails"

    facts = [facts_of(cell) for cell in planned[1]]
    assert any(a["began"] < b["began"] < a["ended"] for a in facts for b in facts)
    assert {f["gpus"] for f in facts} == {"0", "1"}
    assert {facts_of(cell)["gpus"] for cell in planned[0]} == {None}
    mine = os.sched_getaffinity(0)
    assert all(len(f["cores"]) <= max(1, -(-len(mine) // 2)) for f in facts)
    assert os.sched_getaffinity(0) == mine
    again = list(jobs.ended(planned[1], "mpirun", 2))
    assert [end.ran for end in sorted(again, key=lambda end: end.number)] == [False, True]

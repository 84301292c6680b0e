"""The hand-over study: its points differ in what they are called after, and its rivals are as they were tuned."""

import dataclasses

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import derived
from studies import tuning
from studies.handover import GPUS, HANDOVER
from studies.questions import LARGE

ARMS = {arm.name: arm for arm in HANDOVER.arms}


def settled(arm, *flags):
    own = dataclasses.replace(ARMS[arm], flags=(*ARMS[arm].flags, *flags))
    return config.resolve(HANDOVER.arguments(own, 0), 1)


@pytest.mark.parametrize("each", ARMS["handover"].points, ids=lambda each: each.label)
def test_a_point_is_what_it_is_called(each):
    power, step = each.at
    resolved = settled("handover", *each.flags)
    base = settled("default")
    assert resolved.chosen["adabound_lr"] == pytest.approx(0.001 * GPUS**power, rel=1e-3)
    assert resolved.chosen["lars_eta"] == pytest.approx(step * base.chosen["lars_eta"], rel=1e-3)
    assert resolved.lr_schedule == ("exponential" if "kappa" in each.label else "poly")
    assert resolved.chosen["hybrid_ramp_epochs"] == float(each.label.rsplit(" ", 1)[1])
    assert derived.base_batch(resolved) == LARGE


def test_several_seeds_choose_by_their_mean(tmp_path):
    trials = tuning.plan(HANDOVER, tmp_path, 1)
    assert len(trials) == 2 * len(ARMS["handover"].points)
    seeds = [config.resolve(trial.cell.flags).seed for trial in trials]
    assert seeds == sorted(seeds) and set(seeds) == {tuning.SEED, tuning.SEED + 1}
    assert len({trial.cell for trial in trials}) == len(trials)
    top1 = {"a N, step x 0.5, poly, ramp 0": (0.9, 0.7), "a N, step x 0.25, poly, ramp 0": (0.81, 0.81)}
    found = {}
    for trial, seed in zip(trials, seeds, strict=True):
        value = top1.get(trial.point.label, (0.5, 0.5))[seed - tuning.SEED]
        found[trial.cell] = tuning.Result(tuning.trial_runs.FINISHED, summary={"val_top1": value})
    (choice,) = tuning.choose(HANDOVER, trials, found)
    assert choice.point.label == "a N, step x 0.25, poly, ramp 0"
    assert choice.top1[:2] == (pytest.approx(0.8), pytest.approx(0.81))
    assert choice.missing == 0
    assert "16 runs for each arm, with 2 seeds" in "\n".join(tuning.lines([choice], 2))

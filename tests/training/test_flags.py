"""Flags that no recipe sets reach the component that they configure."""

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import derived
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.schedules import run_length
from hybrid_imagenet.training import hardware, rank_requests


def test_batch_growth_enlarges_the_batch_or_the_accumulation():
    flags = ["--per_gpu_batch=8", "--batch_schedule=1:*2"]
    batches = {
        growth: derived.batches(config.resolve([*flags, f"--batch_growth={growth}"])).at(1)
        for growth in ("per_gpu", "accumulation")
    }
    assert (batches["per_gpu"].per_gpu_batch, batches["per_gpu"].accumulation) == (16, 1)
    assert (batches["accumulation"].per_gpu_batch, batches["accumulation"].accumulation) == (8, 2)


def test_choose_precision_of_a_large_fp16_network_on_a_cpu_is_rejected():
    assert hardware.choose_precision("mixed_float16", "resnet8") == "mixed_float16"
    with pytest.raises(
        UserError, match="--precision=mixed_float16 with --model=resnet50 needs a GPU"
    ):
        hardware.choose_precision("mixed_float16", "resnet50")


def test_evaluation_offset_of_mlperf_lars_validates_epochs_7_and_11():
    config_ = config.resolve(
        ["--epochs=12", "--eval_every_epochs=4", "--recipe=mlperf_lars", "--per_gpu_batch=32"], 51
    )
    every = config_.evaluation.eval_every_epochs
    offset = derived.evaluation_offset(config_)
    due = [e for e in range(1, 13) if run_length.is_due(every, offset, e - 1.0, float(e))]
    assert due == [7, 11]


def test_rank_requests_ask_for_a_checkpoint_after_the_given_seconds(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(rank_requests.time, "monotonic", lambda: clock[0])
    requests = rank_requests.RankRequests(
        config.resolve(["--checkpoint_every_seconds=30"]).evaluation.checkpoint_every_seconds
    )
    save_requests = []
    for seconds in (0, 29, 1, 29, 1):
        clock[0] += seconds
        save_requests.append(bool(requests.vector()[1]))
    assert save_requests == [False, False, True, False, True]
    default = config.resolve([]).evaluation.checkpoint_every_seconds
    assert not rank_requests.RankRequests(default).vector()[1]

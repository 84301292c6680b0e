"""Flags that no recipe sets reach the component that they configure."""

from unittest import mock

import pytest

from hybrid_imagenet import config, run_plan, train, xla
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.config import Origin
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.resilience import step_requests
from hybrid_imagenet.training import build, hardware


def test_batch_growth_enlarges_the_batch_or_the_accumulation():
    flags = ["--per_gpu_batch=8", "--batch_schedule=1:*2"]
    batches = {
        growth: run_plan.make(config.resolve([*flags, f"--batch_growth={growth}"])).batches.at(1)
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


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        ((6, 0), "float32"),
        ((6, 1), "float32"),
        ((7, 0), "mixed_float16"),
        ((7, 5), "mixed_float16"),
        ((8, 0), "mixed_float16"),
        ((9, 0), "mixed_float16"),
        (None, "float32"),
    ],
)
def test_choose_precision_auto_on_a_gpu_is_fp16_from_tensor_cores_on(
    capability, precision, monkeypatch
):
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    monkeypatch.setattr(gpus, "compute_capability", lambda: capability)
    assert hardware.choose_precision("auto", "resnet50") == precision
    assert hardware.choose_precision("mixed_float16", "resnet50") == "mixed_float16"


@pytest.mark.parametrize(
    ("features", "precision"),
    [({"avx2"}, "float32"), ({"avx2", "avx512_bf16"}, "mixed_bfloat16")],
)
def test_choose_precision_auto_on_a_cpu_follows_its_instructions(features, precision, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_features", lambda: features)
    assert hardware.choose_precision("auto", "resnet50") == precision


@pytest.mark.parametrize(
    ("others", "expected"), [(["mixed_float16"], "mixed_float16"), (["float32"], "float32")]
)
def test_precision_of_ranks_on_different_hardware_is_float32(others, expected, monkeypatch):
    monkeypatch.setattr(hardware, "choose_precision", lambda requested, model: "mixed_float16")
    communicator = mock.Mock(allgather_object=lambda own: [own, *others])
    assert train._choose_precision(config.resolve([]), communicator) == expected


@pytest.mark.parametrize("origin", [Origin.HARDWARE, Origin.RUN])
def test_step_is_compiled_by_default_only_on_a_gpu_whose_xla_works(origin, monkeypatch):
    default = run_plan.make(config.resolve([]).replace(origin, jit_compile=True)).step.xla
    asked = run_plan.make(config.resolve(["--jit_compile"])).step.xla
    compiled = []
    for has_gpu, works in [(True, True), (True, False), (False, True)]:
        monkeypatch.setattr(xla, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        monkeypatch.setattr(xla, "supports_step", lambda works=works: works)
        compiled.append((build._compiles_step(default), build._compiles_step(asked)))
    assert compiled == [(True, True), (False, True), (False, True)]


def test_evaluation_offset_of_mlperf_lars_validates_epochs_7_and_11():
    config_ = config.resolve(
        ["--epochs=12", "--eval_every_epochs=4", "--recipe=mlperf_lars", "--per_gpu_batch=32"], 51
    )
    validation = run_plan.make(config_).validation
    due = [e for e in range(1, 13) if validation.is_due(e - 1.0, float(e))]
    assert due == [7, 11]


def test_step_requests_ask_for_a_checkpoint_after_the_given_seconds(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(step_requests.time, "monotonic", lambda: clock[0])
    requests = step_requests.StepRequests(
        None, config.resolve(["--checkpoint_every_seconds=30"]).evaluation.checkpoint_every_seconds
    )
    save_requests = []
    for seconds in (0, 29, 1, 29, 1):
        clock[0] += seconds
        requests.post()
        requests.follow()
        save_requests.append(requests.save)
    assert save_requests == [False, False, True, False, True]
    default = config.resolve([]).evaluation.checkpoint_every_seconds
    requests = step_requests.StepRequests(None, default)
    requests.post()
    requests.follow()
    assert not requests.save

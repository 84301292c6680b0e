"""GPUs by the names that nvidia-smi gives them, and the arithmetic that they are used with."""

import pathlib

import pytest

from hybrid_imagenet.analysis import gpu_models
from hybrid_imagenet.analysis.published import GPU_SPEEDS


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("Tesla P40", 23040, "p40"),
        ("Tesla V100-SXM2-16GB", 16384, "v100"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L40", 46068, None),
        ("NVIDIA GH200 480GB", 97871, None),
        ("Tesla P4", 7680, None),
        ("NVIDIA B200", 183359, None),
    ],
)
def test_gpus_are_recognized(name, memory, key):
    assert gpu_models.recognize(name, memory) == key


@pytest.mark.parametrize(
    ("key", "precision", "kind"),
    [
        ("v100", "mixed_float16", "fp16"),
        ("v100", "float32", "fp32"),
        ("a100", "float32", "tf32"),
        ("h100", "mixed_bfloat16", "fp16"),
        ("p40", "float32", "fp32"),
        ("p40", "mixed_float16", "fp32"),
    ],
)
def test_a_precision_has_its_arithmetic(key, precision, kind):
    assert gpu_models.arithmetic(gpu_models.GPUS[key], precision) == kind


@pytest.mark.parametrize("key", ["v100", "p40"])
def test_bf16_is_refused_where_it_is_missing(key):
    with pytest.raises(ValueError, match="has no BF16: take mixed_float16"):
        gpu_models.arithmetic(gpu_models.GPUS[key], "mixed_bfloat16")


def test_every_gpu_has_a_published_speed_in_an_arithmetic_of_its_own():
    assert {speed.gpu for speed in GPU_SPEEDS} == set(gpu_models.GPUS)
    for speed in GPU_SPEEDS:
        gpu = gpu_models.GPUS[speed.gpu]
        assert speed.precision in gpu.flops
        # 4.09 GMAC forward and twice as many backward: no published speed may pass the matrix units.
        assert 3 * 2 * 4.089e9 * speed.images_per_second < gpu.flops[speed.precision], speed


def test_the_page_of_the_first_run_prints_the_published_speeds():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "dev" / "gpu-figures.md").read_text()
    for speed in GPU_SPEEDS:
        row = [
            gpu_models.GPUS[speed.gpu].title,
            speed.precision.upper(),
            speed.batch,
            f"{speed.images_per_second:,.0f}",
        ]
        assert f"| {' | '.join(map(str, row))} | {speed.gpus} | {speed.source} |" in page

"""Published results and GPU figures."""

import pathlib

import pytest

from hybrid_imagenet.analysis import published


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("Tesla P40", 23040, "p40"),
        ("Tesla V100-SXM2-16GB", 16384, "v100"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L40", 46068, None),
        ("NVIDIA GH200 480GB", 97871, None),
        ("Tesla P4", 7680, None),
    ],
)
def test_recognize_gpu_finds_it_by_name_and_memory(name, memory, key):
    assert published.recognize_gpu(name, str(memory)) == key


@pytest.mark.parametrize(
    ("key", "precision", "kind"),
    [
        ("v100", "mixed_float16", "fp16"),
        ("v100", "float32", "fp32"),
        ("a100", "float32", "tf32"),
        ("h100", "mixed_bfloat16", "fp16"),
        ("p40", "mixed_float16", "fp32"),
    ],
)
def test_arithmetic_of_a_gpu_and_precision_is_the_published_kind(key, precision, kind):
    assert published.GPUS[key].arithmetic(precision) == kind


def test_speed_above_the_peak_of_the_gpu_is_not_compared_with():
    (printed,) = [s for s in published.speeds_in("Lu et al., Table 3.2") if s.precision == "fp32"]
    assert printed.images_per_second == 758
    assert printed not in published.speeds("v100", "fp32")
    assert max(s.images_per_second for s in published.speeds("v100", "fp32")) == 432


@pytest.mark.parametrize(
    ("images_per_second", "resized", "cores"),
    [(5707, False, 20), (5707, True, 11), (297, False, 1), (298, False, 2), (0, False, 1)],
)
def test_decoding_cores_of_a_speed_are_whole_and_at_least_one(images_per_second, resized, cores):
    assert published.decoding_cores(images_per_second, resized=resized) == cores


def test_measurements_page_lists_the_published_speeds():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "dev" / "measurements.md").read_text()
    for speed in published.GPU_SPEEDS:
        title = published.GPUS[speed.gpu].title
        rate = f"{speed.images_per_second:,.0f}"
        row = (title, speed.precision.upper(), speed.batch, rate)
        assert f"| {' | '.join(map(str, row))} | {speed.gpus} | {speed.described_source} |" in page

"""The model of one GPU's step, worked by hand."""

import pytest

from hybrid_imagenet.analysis import gpu_roofline
from hybrid_imagenet.analysis.gpu_models import Gpu
from hybrid_imagenet.analysis.gpu_roofline import (
    CONVOLUTION,
    KERNEL_SECONDS,
    LAUNCH_SECONDS,
    MATRIX_SHARE,
    MEMORY_SHARE,
    NORMALIZATION,
    UPDATE,
    VECTOR_SHARE,
    Work,
)  # fmt: skip

GPU = Gpu("made", (8, 0), {"fp16": 100e12, "fp32": 10e12}, 1e12, 16)


def predict(*works, arithmetic="fp16"):
    return gpu_roofline.predict(works, GPU, arithmetic)


def test_a_kernel_takes_the_longest_of_its_operations_its_bytes_and_the_floor():
    assert gpu_roofline.seconds(Work(CONVOLUTION, 1, 1e12, 1e9), GPU, "fp16") == pytest.approx(0.01 / MATRIX_SHARE)
    assert gpu_roofline.seconds(Work(CONVOLUTION, 1, 1e9, 1e10), GPU, "fp16") == pytest.approx(0.01 / MEMORY_SHARE)
    assert gpu_roofline.seconds(Work(CONVOLUTION, 1, 1e12), GPU, "fp32") == pytest.approx(0.1 / VECTOR_SHARE)
    assert gpu_roofline.seconds(Work(UPDATE, 9, 0, 1e3), GPU, "fp16") == 9 * KERNEL_SECONDS


def test_a_step_is_what_its_kernels_take_if_the_host_keeps_up():
    found = predict(
        Work(CONVOLUTION, 50, 1e12, 1e9), Work(NORMALIZATION, 50, 0, 1e10), Work(UPDATE, 9, 0, 1e9, late=True)
    )
    parts = 0.01 / MATRIX_SHARE, 0.01 / MEMORY_SHARE, 1e-3 / MEMORY_SHARE
    assert found.step_seconds == pytest.approx(sum(parts))
    assert found.device_seconds == pytest.approx(sum(parts))
    assert (found.late_launches, found.late_seconds) == (9, pytest.approx(parts[2]))
    assert found.rows[NORMALIZATION].bytes == 1e10
    assert found.bound == ("arithmetic" if parts[0] > parts[1] + parts[2] else "memory")


def test_many_small_kernels_behind_the_last_all_reduce_cost_what_starting_them_takes():
    small = [Work(UPDATE, 1, 0, 1e4, late=True)] * 1000
    found = predict(Work(CONVOLUTION, 50, 1e12, 1e9), *small)
    assert found.late_seconds == pytest.approx(1000 * LAUNCH_SECONDS)
    assert found.step_seconds == pytest.approx(0.01 / MATRIX_SHARE + 1000 * LAUNCH_SECONDS)
    hidden = predict(Work(CONVOLUTION, 50, 1e12, 1e9), *(Work(UPDATE, 1, 0, 1e4) for _ in range(1000)))
    assert hidden.step_seconds == pytest.approx(0.01 / MATRIX_SHARE + 1000 * KERNEL_SECONDS), "the host is ahead there"


@pytest.mark.parametrize(
    ("work", "bound"),
    [
        (Work(CONVOLUTION, 1, 1e13, 1e9), "arithmetic"),
        (Work(NORMALIZATION, 1, 0, 1e11), "memory"),
        (Work(NORMALIZATION, 1000, 0, 1e6), "the host's launches"),
    ],
)
def test_what_bounds_a_step_is_named(work, bound):
    assert predict(work).bound == bound


def test_published_speeds_are_those_of_the_gpu_and_its_arithmetic():
    speeds = gpu_roofline.published("v100", "fp32")
    assert [s.images_per_second for s in speeds] == [412, 432, 384]
    assert gpu_roofline.published("v100", "tf32") == []

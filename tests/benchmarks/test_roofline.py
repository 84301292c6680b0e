import json
import subprocess
import sys

import pytest

from hybrid_imagenet import models
from hybrid_imagenet.benchmarks import roofline
from tests import ranks


def totals(works, group):
    chosen = [work for work in works if work.group == group]
    return sum(work.flops for work in chosen), sum(work.bytes for work in chosen)


def test_a_forward_pass_has_the_published_number_of_operations():
    """ResNet-50 with the stride in the 3x3 convolution: 4.09 GMAC per image of 224 pixels (torchvision's figure)."""
    network = models.create("resnet50", 1000, 224, precision="mixed_bfloat16")
    works = list(roofline.works(network, batch=16, size=2))
    forward = totals(works, "convolution, forward")
    assert forward[0] == pytest.approx(16 * 2 * 4.089e9, rel=1e-3)
    assert totals(works, "convolution, gradient of kernel") == forward
    stem = 16 * 2 * 112 * 112 * 64 * 7 * 7 * 3
    assert totals(works, "convolution, gradient of input")[0] == pytest.approx(forward[0] - stem)
    flops, moved = totals(works, "update")
    assert (flops, moved) == (0, pytest.approx(6 * 4 * 25_557_032))
    # 53 normalizations of 11.1 M elements per image in all
    assert totals(works, "normalization, forward")[1] == pytest.approx(3 * 2 * 16 * 11.1e6, rel=0.01)


@pytest.mark.parametrize(
    ("event", "group"),
    [
        ("resnet50/stage1_block1_2_conv/Conv2D:_MklNativeConv2D", "convolution, forward"),
        ("resnet50/stage1_block1_1_conv/MatMul:_MklMatMul", "convolution, forward"),
        ("gradient_tape/resnet50/stage1_block1_1_conv/MatMul/MatMul:_MklMatMul", "convolution, gradient of input"),
        ("gradient_tape/resnet50/stage1_block1_1_conv/MatMul/MatMul_1:_MklMatMul", "convolution, gradient of kernel"),
        ("MatMul_17:_MklMatMul", "convolution, gradient of kernel"),
        ("gradient_tape/x/Conv2DBackpropFilter:_MklNativeConv2DBackpropFilter", "convolution, gradient of kernel"),
        ("Conv2DBackpropInput_3:_MklNativeConv2DBackpropInput", "convolution, gradient of input"),
        ("resnet50/stem_bn/FusedBatchNormV3:_MklNativeFusedBatchNormEx", "normalization, forward"),
        ("gradient_tape/x/FusedBatchNormGradV3:_MklNativeFusedBatchNormGradV3", "normalization, gradient"),
        ("gradient_tape/x/ReluGrad:ReluGrad", "ReLU, sums, pooling"),
        ("AddN_3:AddN", "ReLU, sums, pooling"),
        ("resnet50/x/Cast:Cast", "padding, slices, casts"),
        ("resnet50/x/AssignVariableOp:AssignVariableOp", "other"),
    ],
)
def test_operations_are_told_apart_by_their_events(event, group):
    assert roofline.group_of(event) == group


@pytest.mark.slow
def test_the_groups_of_a_measured_step_make_up_the_step(tmp_path):
    path = tmp_path / "roofline.json"
    options = ["--model=resnet8", "--batch=4", "--image_size=32", "--precision=float32", "--steps=1"]
    command = [sys.executable, "-m", "hybrid_imagenet.benchmarks", "roofline", *options, f"--json={path}"]
    subprocess.run(command, check=True, capture_output=True, cwd=ranks.ROOT, timeout=300)
    report = json.loads(path.read_text())
    rows = report["groups"]
    assert list(rows) == list(roofline.GROUPS)
    assert sum(row["milliseconds"] for row in rows.values()) <= 1.01 * report["step_milliseconds"]
    for name in roofline.GROUPS[:-1]:
        assert rows[name]["milliseconds"] > 0, name
    assert min(report["peak_flops_per_second"], report["copy_bytes_per_second"]) > 1e8
    assert "GFLOP/s" in roofline.table(report)

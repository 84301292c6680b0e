"""Counts of a traced step, and the prediction that is made of them."""

import pytest

from hybrid_imagenet import config as configuration
from hybrid_imagenet.analysis import gpu_roofline
from hybrid_imagenet.analysis.gpu_models import GPUS
from hybrid_imagenet.analysis.gpu_roofline import CONVOLUTION, KINDS, LAYOUT, NORMALIZATION, POINTWISE, UPDATE, Row
from hybrid_imagenet.benchmarks import roofline
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools.plan import command, one_gpu, settings, training_graph

BATCH, SIDE = 4, 8
FLAGS = [
    "--dataset=synthetic_tensors",
    "--model=resnet8",
    "--width=4",
    f"--image_size={SIDE}",
    f"--per_gpu_batch={BATCH}",
]


@pytest.fixture(scope="module")
def graphs():
    return training_graph.trace(configuration.resolve(FLAGS), "mixed_float16", classes=10)


def counted(graph, fuses=True, transposes=False):
    """Kernels, operations and bytes by kind."""
    works = training_graph.works(graph, "hybrid", fuses=fuses, transposes=transposes)
    prediction = gpu_roofline.predict(works, GPUS["a100"], "fp16")
    return prediction.rows, prediction


def test_operations_are_those_of_the_layers(graphs):
    """The oracle counts layer by layer from their shapes, as the roofline of the CPU does."""
    from hybrid_imagenet import models

    network = models.create("resnet8", 10, SIDE, precision="mixed_float16", width=4)
    layers = list(roofline.works(network, BATCH, 2))
    rows, _ = counted(graphs.step)
    colors = 2 * BATCH * 3 * 3  # the product of the augmentation's color noise
    assert rows[CONVOLUTION].flops == sum(work.flops for work in layers) + colors


def test_normalization_without_fusion_reads_and_writes_what_its_layers_do(graphs):
    from hybrid_imagenet import models

    network = models.create("resnet8", 10, SIDE, precision="mixed_float16", width=4)
    passes = [w.bytes for w in roofline.works(network, BATCH, 2) if w.group.startswith("normalization")]
    rows, _ = counted(graphs.step, fuses=False)
    assert rows[NORMALIZATION].bytes == sum(passes)
    assert rows[NORMALIZATION].launches == len(passes)
    assert rows[LAYOUT] == Row(0, 0, 0, 0)


def test_transpositions_read_and_write_each_image_of_a_normalization_five_times(graphs):
    rows, _ = counted(graphs.step, fuses=False, transposes=True)
    plain, _ = counted(graphs.step, fuses=False)
    # 3 + 5 passes over an image in the normalization and its gradient, 2 x (2 + 3) in the transpositions
    assert rows[LAYOUT].bytes == pytest.approx(plain[NORMALIZATION].bytes * 10 / 8)
    assert rows[LAYOUT].launches == 5 * plain[NORMALIZATION].launches / 2


def test_fusion_takes_relu_and_sums_into_the_normalization(graphs):
    fused, plain = counted(graphs.step)[0], counted(graphs.step, fuses=False)[0]
    assert fused[POINTWISE].launches < plain[POINTWISE].launches / 2
    assert fused[NORMALIZATION].launches == plain[NORMALIZATION].launches
    assert fused[NORMALIZATION].bytes >= plain[NORMALIZATION].bytes
    assert sum(r.bytes for r in fused.values()) < sum(r.bytes for r in plain.values())


def test_the_update_is_nine_kernels_and_one_of_each_variable_many_more(graphs):
    now, each = counted(graphs.step)[1], counted(graphs.each)[1]
    assert now.late_launches == 9
    variables = 0
    for operation in graphs.each.get_operations():
        variables += operation.type == "L2Loss"
    assert each.late_launches > 4 * variables > 4 * 9
    assert each.late_seconds > now.late_seconds
    assert each.rows[UPDATE].launches == each.late_launches


def test_a_plan_for_a_gpu_predicts_it_beside_what_is_published(monkeypatch, capsys, tmp_path, graphs):
    monkeypatch.setattr(training_graph, "trace", lambda config, precision: graphs)
    assert command.main(["--gpu=a100", f"--per_gpu_batch={BATCH}", "--hosts=1", f"--json={tmp_path}/plan.json"]) == 0
    text = capsys.readouterr().out
    assert "on one A100 SXM 40 GB" in text and "bound by the host's launches" in text
    assert "published: 2,375 images/s alone, batch 256" in text
    assert "after the last all-reduce: 9 kernels" in text
    plan = settings.parse(["--gpu=a100", f"--per_gpu_batch={BATCH}"])
    job = settings.resolve(plan).job
    single = one_gpu.predict("a100", "resnet50", BATCH, None)
    assert job.compute_seconds == single.now.step_seconds
    assert single.images_per_second == BATCH / single.now.step_seconds
    assert set(single.now.rows) == set(KINDS)
    assert single.first.step_seconds > single.now.step_seconds


@pytest.mark.parametrize(("gpu", "precision"), [("v100", "bf16"), ("p40", "bf16")])
def test_a_precision_that_the_gpu_lacks_is_refused(gpu, precision):
    with pytest.raises(UserError, match=r"--precision=bf16: .* has no BF16"):
        one_gpu.predict(gpu, "resnet50", 256, precision)

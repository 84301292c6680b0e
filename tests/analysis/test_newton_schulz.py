import math

import tensorflow as tf

from hybrid_imagenet import models
from hybrid_imagenet.analysis import newton_schulz
from hybrid_imagenet.analysis.gpu_models import GPUS
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify
from hybrid_imagenet.optimizers.muon import orthogonalized
from hybrid_imagenet.tools.plan.layers import layers_of


def products(rows, columns, steps):
    """Twice the multiply-adds of every matrix product in the graph of Muon's own function."""
    function = tf.function(lambda x: orthogonalized(x, steps), autograph=False)
    graph = function.get_concrete_function(tf.TensorSpec([rows, columns])).graph
    found = [op for op in graph.get_operations() if op.type in ("MatMul", "BatchMatMulV2")]
    return sum(2 * op.outputs[0].shape.num_elements() * op.inputs[0].shape[1] for op in found)


def test_the_formula_counts_the_products_of_the_optimizer():
    for rows, columns, steps in ((12, 5, 1), (5, 12, 3), (7, 7, 5)):
        assert newton_schulz.operations(rows, columns, steps) == products(rows, columns, steps)


def test_the_planner_has_the_matrices_of_the_network():
    network = models.create("resnet18", 1000, 224, precision="float32")
    kinds = zip(network.trainable_variables, classify(network), strict=True)
    kernels = [variable.shape for variable, kind in kinds if kind is ParameterKind.KERNEL]
    matrices = sorted((math.prod(shape[:-1]), shape[-1]) for shape in kernels)
    assert sorted(layer.matrix for layer in layers_of("resnet18")) == matrices


def test_seconds_worked_by_hand():
    """A V100 computes float32 at 15.7 TFLOP/s, 0.6 of which count; a product takes 2 us at least."""
    large = 5 * (4 * 1000**2 * 3000 + 2 * 1000**3) / (0.6 * 15.7e12)
    assert newton_schulz.seconds([(3000, 1000), (4, 2)], 5, GPUS["v100"]) == large + 15 * 2e-6

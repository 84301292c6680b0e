"""Small problems on which an optimizer and its oracle can be compared."""

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.sgd import SGD
from tests.references import optimizers_reference as reference

SHAPES = ((3, 3, 2, 4), (4,), (4,), (5, 4), (4,))
KINDS = (
    ParameterKind.KERNEL,
    ParameterKind.NORM_SCALE,
    ParameterKind.NORM_OFFSET,
    ParameterKind.KERNEL,
    ParameterKind.BIAS,
)
# Updates are packed as on a GPU. test_update.py compares them with the form for a CPU.
PACKED = True
KERNELS = [kind is ParameterKind.KERNEL for kind in KINDS]


class Problem:
    """A noisy quadratic: the gradient at w is curvature * (w - target) + noise(step).

    The seed determines the noise.
    """

    def __init__(self, shapes=SHAPES, seed=0):
        random = np.random.default_rng(seed)
        self.start = [random.normal(0, 0.5, s).astype(np.float32) for s in shapes]
        self.target = [random.normal(0, 0.5, s) for s in shapes]
        self.curvature = [10 ** random.uniform(-2, 0, s) for s in shapes]
        self.noise = [[random.normal(0, 0.05, s) for s in shapes] for _ in range(256)]

    def grads(self, weights, step):
        parts = zip(weights, self.target, self.curvature, self.noise[step % 256], strict=True)
        return [c * (np.asarray(w, np.float64) - t) + n for w, t, c, n in parts]

    def layers(self):
        return reference.layers_of(self.start, KERNELS)

    def variables(self):
        return [keras.Variable(w, name=f"w{i}") for i, w in enumerate(self.start)]


def omit_xla(optimizer):
    """Runs the programs of an update without XLA, which takes a second to compile them.

    `test_update.py` compares both forms for every optimizer.
    """
    optimizer.executor._jit_compile = False


class Runner:
    """Runs an optimizer as a training step does, with gradients multiplied by a loss scale."""

    def __init__(self, optimizer, problem, loss_scale=1.0, kinds=KINDS):
        self.optimizer = optimizer
        self.problem = problem
        self.loss_scale = loss_scale
        self.variables = problem.variables()
        optimizer.set_kinds(kinds)
        self.distributed = DistributedOptimizer(
            optimizer,
            loss_scale=LossScale(loss_scale),
            communicator=SingleProcess(),
            packed=PACKED,
        )
        self.distributed.build(self.variables)
        omit_xla(self.distributed)
        self.count = 0
        self.function = tf.function(
            lambda grads: self.distributed.accumulate_or_update(grads), autograph=False
        )

    def weights(self):
        return [v.numpy() for v in self.variables]

    def step(self, hyper=None, grads=None):
        if hyper:
            self.optimizer.hyperparameters.assign(hyper)
        if grads is None:
            grads = self.problem.grads(self.weights(), self.count)
        self.function([tf.constant(g * self.loss_scale, tf.float32) for g in grads])
        self.count = int(self.optimizer.iterations.numpy())


def one_kernel_runner(optimizer, start):
    """Returns a runner of one kernel that begins with these values."""
    problem = Problem([np.shape(start)])
    problem.start = [np.asarray(start, np.float32)]
    return Runner(optimizer, problem, kinds=[ParameterKind.KERNEL])


def scaled_sgd(start, scale, momentum=0.0, **options):
    """Returns variables, their distributed SGD with a learning rate of 0.5, and its step.

    The step takes the gradients.
    """
    variables = [keras.Variable(value, name=f"w{i}") for i, value in enumerate(start)]
    optimizer = DistributedOptimizer(
        SGD(0.5, momentum, weight_decay=0.0),
        loss_scale=scale or 1,
        communicator=SingleProcess(),
        **options,
    )
    optimizer.build(variables)
    omit_xla(optimizer)

    @tf.function(autograph=False)
    def step(*grads):
        optimizer.apply([optimizer.scale_loss(grad) for grad in grads])

    return variables, optimizer, step


def follow(runner, rate, oracle):
    """Compares 200 steps at the learning rate `rate(step)` with those of an oracle.

    The oracle is called as `oracle(layer, gradient, step, rate)`.
    """
    layers = runner.problem.layers()
    for step in range(200):
        runner.step({"learning_rate": rate(step)})
        grads = runner.problem.grads([layer["w"] for layer in layers], step)
        for layer, grad in zip(layers, grads, strict=True):
            oracle(layer, grad, step, rate(step))
        if step in (0, 1, 119, 120, 199):
            assert_close(runner.weights(), layers)


def assert_close(actual, layers, tolerance=1e-5):
    """Asserts that every tensor is within `tolerance` of the oracle's, relative to its size."""
    for value, layer in zip(actual, layers, strict=True):
        assert np.linalg.norm(value - layer["w"]) <= tolerance * np.linalg.norm(layer["w"])
        np.testing.assert_allclose(
            value, layer["w"], rtol=tolerance, atol=tolerance * np.abs(layer["w"]).max()
        )

"""Tests the traced reduction: order, overlap with backpropagation, and errors. Nothing is sent."""

import pytest
import tensorflow as tf

from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.comm.algorithms import AlgorithmSelector, RankContext
from hybrid_imagenet.comm.communicator import GradientExchange
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.optimizers.reducer import GradientReducer, backward_order
from tests.support.gradients import means

HorovodCollectives = pytest.importorskip("hybrid_imagenet.comm.horovod_engine").HorovodCollectives
LAYERS = 6


class TwoEqualRanks(SingleProcess):
    """Replaces rank 0 of two ranks, of which the other one always sends the same."""

    def __init__(self, settings, nccl=False):
        super().__init__()
        self.size = 2
        self.hosts *= 2
        self.gradient_exchange = GradientExchange(settings, selector(settings), nccl)


def selector(settings):
    return AlgorithmSelector(RankContext(0, ["here"] * 2, HorovodCollectives(2)), settings)


def trace(settings, rescale=False):
    """Traces a chain of layers; returns the order and the operations of gradients and sums."""
    reducer = GradientReducer(TwoEqualRanks(settings), "float16")
    weights = [tf.Variable(tf.ones([4, 4])) for _ in range(LAYERS)]
    results = {}

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            for w in weights:
                x = tf.tanh(x @ w)
            loss = tf.reduce_sum(x)
        grads = tape.gradient(loss, weights)
        if rescale:
            # This adds operations in the order of the variables, not in backward order.
            grads = [g * 2.0 for g in grads]
        results["order"] = backward_order(grads)
        reduced = means(reducer.reduce, grads, [f"w{i}" for i in range(LAYERS)])
        results["grads"] = [g.op for g in grads]
        results["reduced"] = [r.op for r in reduced]
        return reduced

    step.get_concrete_function(tf.ones([2, 4]))
    return results


def ancestors(op):
    names = set()
    queue = [op]
    while queue:
        op = queue.pop()
        if op.name not in names:
            names.add(op.name)
            queue += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return names


@pytest.mark.parametrize("rescale", [False, True])
def test_backward_order_begins_with_the_last_layers(rescale):
    assert trace(CommunicationSettings(), rescale)["order"] == list(range(LAYERS))[::-1]


def test_backward_order_outside_a_graph_is_the_reverse_order():
    assert backward_order([tf.zeros([1])] * 3) == [2, 1, 0]


@pytest.mark.parametrize(
    "settings",
    [
        CommunicationSettings(fusion_threshold_mb=2 * 32 / 2**20),
        CommunicationSettings(fusion_threshold_mb=0),
    ],
)
@pytest.mark.parametrize("rescale", [False, True])
def test_reduce_sends_late_layers_before_early_gradients_exist(settings, rescale):
    # With buckets of two gradients or one, a sum depends on no gradient of earlier layers.
    results = trace(settings, rescale)
    members = 2 if settings.fusion_threshold_mb else 1
    for layer in range(LAYERS):
        operations = ancestors(results["reduced"][layer])
        assert results["grads"][layer].name in operations
        first_of_bucket = layer - layer % members
        for earlier in range(first_of_bucket):
            assert results["grads"][earlier].name not in operations


def test_reduce_makes_one_operation_of_horovod_per_bucket():
    results = trace(CommunicationSettings(fusion_threshold_mb=2 * 32 / 2**20))
    graph = results["grads"][0].graph
    operations = [op for op in graph.get_operations() if "allreduce" in op.type.lower()]
    assert [len(op.outputs) for op in operations] == [1, 1, 1]


@pytest.mark.parametrize(("nccl", "steps"), [(False, 1), (True, 0)])
def test_reduce_with_nccl_does_not_time_steps(nccl, steps):
    reducer = GradientReducer(TwoEqualRanks(CommunicationSettings(), nccl))
    traced = tf.function(
        lambda g: reducer.reduce([g], ["w"]).buckets, autograph=False
    ).get_concrete_function(tf.ones([4]))
    assert sum(op.type == "Timestamp" for op in traced.graph.get_operations()) == 2 * steps
    assert reducer.statistics()["exposed_ms"] is None


def unknown_shape(reduce):
    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def step(grad):
        return reduce([grad], ["w"]).buckets

    return step(tf.zeros([3]))


@pytest.mark.parametrize("ranks", ["alone", "two"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda r: r([tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]))], ["table"]),
            "table is sparse",
        ),
        (lambda r: r([None], ["w"]), "No gradient reaches w"),
        (lambda r: r([tf.constant([1])], ["w"]), "w has the dtype int32"),
        (lambda r: r([tf.zeros([1]), tf.zeros([1])], ["w", "w"]), "one unique name per gradient"),
        (unknown_shape, "not static"),
    ],
    ids=["sparse", "missing", "integers", "names", "shape"],
)
def test_reduce_of_gradients_that_cannot_be_summed_raises(ranks, call, message):
    communicator = SingleProcess() if ranks == "alone" else TwoEqualRanks(CommunicationSettings())
    with pytest.raises((TypeError, ValueError), match=message):
        call(GradientReducer(communicator).reduce)


def test_reduce_in_a_single_process_only_casts_gradients():
    reducer = GradientReducer(SingleProcess())
    mean_gradients = means(
        reducer.reduce,
        [tf.constant([1.5], tf.float16), tf.constant(1e-9)],
        ["a", "b"],
    )
    assert [g.dtype for g in mean_gradients] == [tf.float32] * 2
    assert float(mean_gradients[0][0]) == 1.5 and float(mean_gradients[1]) == pytest.approx(1e-9)
    assert reducer.statistics() == {}

"""Counts the ReLUs of ResNet-50's step that TensorFlow fuses with a normalization.

It is run with TensorFlow's CUDA wheel on the path, and takes flags of training. The graph optimizer
needs no GPU, but it needs shapes. A serialized graph has no variables and arguments with shapes, so
these become tensors of their shapes. The output holds the number of ReLUs that remain, the number
that are fused into a normalization, and the normalizations to which a tensor of another shape is
added.
"""

import collections
import json
import os
import sys

# TensorFlow reads this variable once, before the first use.
os.environ["TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"] = "1"

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.grappler import cluster, tf_optimizer

from tests.gpu import graphs

HOST = "/job:localhost/replica:0/task:0"
# This describes an H100, which need not exist.
FACTS = {"architecture": "9.0", "cuda": "12050", "cudnn": "9280"}

with graphs.on_gpu():
    ((_, step),) = graphs.training(
        graphs.resolved("--model=resnet50", "--model_width=64", "--image_size=64", *sys.argv[1:])
    )
meta = meta_graph_pb2.MetaGraphDef(graph_def=step.graph.as_graph_def(add_shapes=True))
meta.collection_def["train_op"].node_list.value.extend(op.name for op in step.graph.control_outputs)
nodes = meta.graph_def.node
for node in list(nodes):
    node.device = HOST + (node.device or "/device:GPU:0")
    tensor = node.op == "Placeholder" and node.attr["dtype"].type != tf.resource.as_datatype_enum
    if tensor or node.op == "ReadVariableOp":
        sizes = [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim]
        shape = nodes.add(name=f"{node.name}/sizes", op="Const", device=node.device)
        shape.attr["dtype"].type = tf.int32.as_datatype_enum
        shape.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(sizes, tf.int32, [len(sizes)]))
        node.op = "Empty"
        node.input[:] = [shape.name]
settings = config_pb2.ConfigProto()
settings.graph_options.rewrite_options.min_graph_nodes = -1
settings.graph_options.rewrite_options.optimizers.append("remap")
gpu = device_properties_pb2.DeviceProperties(
    type="GPU", frequency=1000, num_cores=132, environment=FACTS
)
host = cluster.Cluster(
    devices=[device_properties_pb2.NamedDevice(properties=gpu, name=f"{HOST}/device:GPU:0")]
)
optimized = tf_optimizer.OptimizeGraph(settings, meta, cluster=host)


def shape_of(tensor):
    """Returns the static shape of a traced tensor, by its name in the optimized graph."""
    name, _, index = tensor.partition(":")
    return step.graph.get_operation_by_name(name).outputs[int(index or 0)].shape


kinds = collections.Counter(node.op for node in optimized.node)
report = {
    name: kinds[name] for name in ("Relu", "ReluGrad", "_FusedBatchNormEx", "_FusedBatchNormGradEx")
}
report["wrong shapes"] = [
    node.name
    for node in optimized.node
    if node.op == "_FusedBatchNormEx" and node.attr["num_side_inputs"].i
    if shape_of(node.name).as_list() != shape_of(node.input[5]).as_list()
]
print(json.dumps(report))

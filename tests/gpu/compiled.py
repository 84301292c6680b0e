"""Compiles an HLO module for a GPU and prints the kernels that it starts.

It is run with JAX's CUDA plugin on the path. The compiler needs a description of the GPU (such as
a100.txtpb), but no GPU. Arguments: a serialized HLO module, and the name of a description.
"""

import os
import pathlib
import re
import sys

# There is no driver whose version could be checked.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir

HERE = pathlib.Path(__file__).parent
STARTED = re.compile(
    r"= .*? (fusion|copy|custom-call|call|reduce|scatter|sort|while|conditional|dot)\("
)

target = topologies.get_topology_desc(
    platform="cuda",
    topology_name=sys.argv[2],
    topology="1x1x1",
    target_config=(HERE / f"{sys.argv[2]}.txtpb").read_text(),
)
with mlir.make_ir_context():
    module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(pathlib.Path(sys.argv[1]).read_bytes()))
devices = xla_client.DeviceList(tuple(target.devices))
executable = target.devices[0].client.compile(module, devices, xla_client.CompileOptions())
(compiled,) = executable.hlo_modules()
entry = compiled.to_string().partition("\nENTRY")[2]
for line in entry.splitlines():
    if STARTED.search(line):
        print(line.partition(", metadata=")[0].strip()[:200])

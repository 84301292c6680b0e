"""Started with JAX's CUDA plugin on its path: compiles an HLO module for a GPU and writes what it
starts there.

The compiler needs a description of the GPU (such as a100.txtpb), not the GPU. Arguments: a
serialized HLO module, and the name of a description.
"""

import os
import pathlib
import re
import sys

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to be of the right version

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

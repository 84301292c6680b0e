"""One rank of `bench gpu`: times training steps on a batch in memory, and profiles some of them on rank 0.

    python -m hybrid_imagenet.benchmarks._gpu_rank --steps=20 -- FLAGS

prints one line with its result as JSON on rank 0. FLAGS are those of the training program.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet import comm
from hybrid_imagenet import config as configuration
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.config import RunConfig, derived
from hybrid_imagenet.errors import EXIT_OK
from hybrid_imagenet.tools import command_line

MARK = "gpu-rank-result "


def main(argv: Sequence[str]) -> int:
    """Measures as one of the ranks; rank 0 prints the result."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    parser = command_line.Parser("bench gpu: a rank", (__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=command_line.positive, default=20)
    parser.add_argument("--rounds", type=command_line.positive, default=3)
    parser.add_argument("--classes", type=command_line.positive, default=1000)
    parser.add_argument("--profiled", type=int, default=0, help="steps to profile; 0 for none")
    options = parser.parse_args(words[:place])
    config = configuration.resolve(words[place + 1 :], comm.placement().size)
    settings = derived.communication(config)
    communicator = comm.start(settings, persistent_batch_norm=config.persistent_batch_norm)
    row = scaling.measure(config, communicator, options.steps, options.rounds, options.classes)
    if options.profiled:
        row["profile"] = profiled(config, communicator, options.profiled, options.classes)
    row |= _machine()
    if communicator.rank == 0:
        print(MARK + json.dumps(row), flush=True)
    communicator.shutdown()
    return EXIT_OK


def profiled(config: RunConfig, communicator: Communicator, steps: int, classes: int) -> dict[str, Any] | None:
    """What the device did in a few steps, as `runlog.kernels` sums it up; None without a GPU."""
    from hybrid_imagenet.training import hardware

    precision = hardware.choose_precision(config.precision, config.model)
    step, wait = scaling.training_step(config, communicator, communicator, precision, classes)
    for _ in range(3):  # traces, and lets cuDNN choose its kernels
        step()
    wait()
    with tempfile.TemporaryDirectory() as folder:
        return _profile(step, wait, steps, Path(folder))


def _profile(step: Callable[[], object], wait: Callable[[], object], steps: int, folder: Path) -> dict[str, Any] | None:
    import tensorflow as tf

    from hybrid_imagenet.runlog import kernels, profile

    with tf.profiler.experimental.Profile(str(folder)):
        for number in range(steps):
            with tf.profiler.experimental.Trace(profile.STEP, step_num=number, _r=1):
                step()
                if number == steps - 1:
                    wait()
    found = kernels.device(profile.read(folder))
    return None if found is None else dataclasses.asdict(found)


def _machine() -> dict[str, Any]:
    import tensorflow as tf

    from hybrid_imagenet.training import hardware

    gpus = tf.config.get_visible_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    build = tf.sysconfig.get_build_info()
    return {
        "gpu": details.get("device_name"),
        "versions": {key: build[key] for key in ("cuda_version", "cudnn_version") if key in build},
        "described": hardware.describe(),
    }


if __name__ == "__main__":
    sys.exit(command_line.run(main, sys.argv[1:]))

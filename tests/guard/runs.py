"""Short trainings whose exact results must not change, and the digests of their results.

`RUNS` lists them by name. Each trains a tiny ResNet on 96 of the digits. It is described only by
command-line flags, so that the list stays valid when code is restructured. `digest` runs on every
rank of a pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from unittest import mock

import numpy as np

from hybrid_imagenet import recipes, xla
from hybrid_imagenet.optimizers import grouped
from tests.support import in_process

NETWORK = (
    *(
        "--dataset=digits",
        "--augmentation=digits",
        "--model=resnet8",
        "--model_width=4",
        "--stem=3x3",
    ),
    *("--image_size=16", "--per_gpu_batch=4", "--precision=float32"),
)
COMMON = (
    *("--deterministic", "--progress=none", "--log_every_steps=1", "--target_top1=0"),
    # The digests were recorded when FP32 runs did not scale the loss on several ranks.
    "--loss_scale=1",
)
# The first of two epochs is the warmup, so that hybrid takes steps in both of its phases.
OPTIMIZER_FLAGS = (*NETWORK, "--epochs=2", "--warmup_epochs=1", "--per_gpu_batch=4")
MAX_STEPS = 20
# Keys of records that do not depend on time.
METRICS = (
    *(
        "kind",
        "step",
        "epoch",
        "phase",
        "train_loss",
        "train_top1",
        "val_loss",
        "val_top1",
        "val_top5",
        "val_count",
    ),
    *(
        "learning_rate",
        "momentum",
        "lower_bound",
        "upper_bound",
        "skipped_steps",
        "loss_scale",
        "global_batch",
    ),
)


@dataclasses.dataclass(frozen=True)
class GuardedRun:
    """A training whose result is guarded.

    Attributes:
      ranks: number of ranks.
      flags: flags of the training program.
      packed: whether all weights are updated as one vector, as on GPUs.
    """

    ranks: int
    flags: tuple[str, ...]
    packed: bool = False


# These optimizers existed when the digests were recorded. New ones need no digest.
OPTIMIZERS = ("hybrid", "adabound", "sgd", "lars", "lamb", "muon")


def _runs() -> Mapping[str, GuardedRun]:
    runs = {}
    for optimizer in OPTIMIZERS:
        for ranks in (1, 2, 4):
            for accumulation in (1, 3):
                for packed in (False, True):
                    form = "packed" if packed else "per-variable"
                    flags = (
                        *OPTIMIZER_FLAGS,
                        f"--optimizer={optimizer}",
                        f"--gradient_accumulation_steps={accumulation}",
                    )
                    runs[f"{optimizer}-{form}-ranks{ranks}-accumulation{accumulation}"] = (
                        GuardedRun(ranks, flags, packed)
                    )
    for recipe in recipes.names():
        network = NETWORK
        if recipe == "four_minutes_alexnet":
            network = (
                "--dataset=digits",
                "--augmentation=digits",
                "--image_size=63",
                "--per_gpu_batch=4",
                "--precision=float32",
            )
        elif recipe == "flash_exp3":
            # The first stage of this recipe needs a multiple of 27 images.
            network = (*NETWORK, "--per_gpu_batch=27")
        flags = (*network, f"--recipe={recipe}", "--epochs=2")
        if recipe in ("hybrid", "hybrid_p40", "lu_as_printed"):
            flags += ("--warmup_epochs=1",)
        elif recipe == "short":
            flags += ("--image_size_schedule=0:12,1:16", "--eval_image_size=24", "--ema_every=2")
        elif recipe == "flash_exp4":
            flags += ("--batch_schedule=0:*1,1:*2.5",)
        runs[f"recipe-{recipe}"] = GuardedRun(2, flags)
    return runs


RUNS = _runs()
# Runs that the tests repeat without --long.
ALWAYS = ("hybrid-packed-ranks2-accumulation3",)


def digest(name: str, data_dir: str, run_dir: str) -> str:
    """Trains a run of `RUNS`; returns a digest of its results on rank 0, else an empty string."""
    run = RUNS[name]
    flags = [
        *run.flags,
        *COMMON,
        f"--max_steps={MAX_STEPS}",
        f"--data_dir={data_dir}",
        f"--run_dir={run_dir}",
    ]
    with contextlib.ExitStack() as stack:
        if run.packed:
            stack.enter_context(mock.patch.object(grouped, "xla", _PackedXla()))
        code, output, errors = in_process.call("hybrid_imagenet.main", flags)
    assert code == 0, f"{name} ended with code {code}: {output}{errors}"
    return (
        results_digest(pathlib.Path(run_dir))
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
        else ""
    )


class _PackedXla:
    """Replaces the module `xla`, so that optimizers use the packed form of GPUs."""

    has_gpu = staticmethod(lambda: True)
    supported = staticmethod(xla.supported)


def results_digest(run_dir: pathlib.Path) -> str:
    """Returns a digest of the last checkpoint's arrays and of the metrics of a run.

    The names of the arrays do not matter.
    """
    (checkpoint,) = sorted((run_dir / "checkpoints").glob("step-*.npz"))[-1:]
    arrays = []
    with np.load(checkpoint) as archive:
        for key in archive.files:
            array = archive[key]
            # These are weights, slots and statistics.
            if array.dtype.kind == "f" and array.size > 1:
                content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
                arrays.append(f"{array.dtype} {array.shape} {content}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: record[key] for key in METRICS if key in record} for record in records]
    text = json.dumps([sorted(arrays), metrics], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Short trainings whose exact results must not change, and the digests of their results.

`RUNS` lists them by name. Those of the program train a tiny ResNet on 96 of the digits. They are
described only by command-line flags, so that the list stays valid when code is restructured.
`fit_runs` has those of the library. `digest` runs on every rank of a pool.
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
from tests.guard import fit_runs
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

EPOCH_MEANS = frozenset({"train_loss", "train_top1"})


@dataclasses.dataclass(frozen=True)
class GuardedRun:
    """A training whose result is guarded.

    Attributes:
      ranks: Number of ranks.
      flags: Flags of the training program.
      packed: Whether all weights are updated as one vector, as on GPUs.
      interrupted_after: Step after which the run is interrupted and then resumed; 0 for a run
        without an interruption.
      has_epoch_means: Whether the mean training loss of an epoch is part of the digest. A run
        that is resumed within an epoch averages only the steps after the interruption.
    """

    ranks: int
    flags: tuple[str, ...]
    packed: bool = False
    interrupted_after: int = 0
    has_epoch_means: bool = True


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
    for name, flags in FLOAT16_FLAGS.items():
        whole = GuardedRun(2, flags, has_epoch_means=False)
        runs[name] = whole
        # Step 7 is within an epoch.
        runs[f"{name}-resumed"] = dataclasses.replace(whole, interrupted_after=7)
    for name in fit_runs.RUNS:
        runs[name] = GuardedRun(2, ())
    return runs


# FP16 with the loss scale that the program chooses itself.
FLOAT16_FLAGS = {
    "float16": (
        *OPTIMIZER_FLAGS,
        "--optimizer=hybrid",
        "--precision=mixed_float16",
        "--loss_scale=auto",
    ),
    "float16-accumulation3": (
        *OPTIMIZER_FLAGS,
        "--optimizer=sgd",
        "--precision=mixed_float16",
        "--loss_scale=auto",
        "--gradient_accumulation_steps=3",
    ),
}
RUNS = _runs()
# Each of these runs must have the digest of the run without an interruption.
RESUMED = {name: name.removesuffix("-resumed") for name in RUNS if name.endswith("-resumed")}
# Runs that the tests repeat without --long.
ALWAYS = ("hybrid-packed-ranks2-accumulation3", "fit-hybrid")


def digest(name: str, data_dir: str, run_dir: str) -> str:
    """Trains a run of `RUNS`; returns a digest of its results on rank 0, else an empty string."""
    if name in fit_runs.RUNS:
        return fit_runs.digest(name, run_dir)
    run = RUNS[name]
    flags = [*COMMON, *run.flags, f"--data_dir={data_dir}", f"--run_dir={run_dir}"]
    with contextlib.ExitStack() as stack:
        if run.packed:
            stack.enter_context(mock.patch.object(grouped, "xla", _PackedXla()))
        if run.interrupted_after:
            _train(name, [*flags, f"--max_steps={run.interrupted_after}"])
            flags.append("--resume")
        _train(name, [*flags, f"--max_steps={MAX_STEPS}"])
    return (
        results_digest(pathlib.Path(run_dir), run)
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
        else ""
    )


def _train(name: str, flags: list[str]) -> None:
    code, output, errors = in_process.call("hybrid_imagenet.main", flags)
    assert code == 0, f"{name} ended with code {code}: {output}{errors}"


class _PackedXla:
    """Replaces the module `xla`, so that optimizers use the packed form of GPUs."""

    has_gpu = staticmethod(lambda: True)
    supported = staticmethod(xla.supported)


def results_digest(run_dir: pathlib.Path, run: GuardedRun) -> str:
    """Returns a digest of the last checkpoint's arrays and of the metrics of a run.

    The names of the arrays do not matter. The record of the evaluation at an interruption is not
    part of it.
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
    metrics = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        is_epoch = record["kind"] == "epoch"
        if is_epoch and run.interrupted_after and record["step"] == run.interrupted_after:
            continue
        left_out = EPOCH_MEANS if is_epoch and not run.has_epoch_means else ()
        metrics.append({key: record[key] for key in METRICS if key in record.keys() - left_out})
    text = json.dumps([sorted(arrays), metrics], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""Defines the study of orders that keep to a window of shards (--shuffle_window).

It has the images, the network and the epochs of `questions` at their largest batch, in 60 shards. What counts is how
many batches a window holds: on ImageNet 16 of 1,024 shards hold 3.3 batches of 6,144; 10 and 20 of these 60 hold 2.0
and 4.1.
"""

from __future__ import annotations

from studies.base import Arm, Claim, Study
from studies.questions import BASE, GPU_IMAGES, LARGE, hybrid_points

SHARDS, IMAGES = 60, 12_500
WINDOWS = (20, 10, 5, 2)
TUNED = 16.0
"""The relative step that `accuracy-by-batch` has chosen at this batch, as a factor on that of MLPerf's points."""


def batches(window: int) -> float:
    """The updates whose images come from one window."""
    return window * IMAGES / SHARDS / LARGE


SHUFFLE_WINDOW = Study(
    name="shuffle-window",
    title="An order that keeps to a few shards at a time",
    source="",
    statement="How many batches must a window of shards hold, for the accuracy of an order that mixes all images?",
    arms=(
        Arm("all", "all images mixed"),
        *(
            Arm(
                f"window_{window}",
                f"{window} of {SHARDS} shards, {batches(window):.1f} batches",
                (f"--shuffle_window={window}",),
            )
            for window in WINDOWS
        ),
    ),
    claims=tuple(Claim(f"window_{window}", "all", "equal", by_paper=False) for window in WINDOWS),
    notes=(
        "The shards are mixed over the classes: `hybrid-imagenet data prepare --from=fashion_mnist --data_dir=DIR "
        "--per_shard=1000 --to=SHARDS`, then `-- --data_dir=SHARDS`. The images to tune on are taken from all of them.",
        "No arm is tuned: all have the relative step that `accuracy-by-batch` has chosen at this batch.",
        "A window of 2 shards holds less than half of a batch, whose images then come from five shards and more.",
    ),
    base=(
        *BASE,
        "--dataset=tfrecord",
        "--data_cache=decoded",
        "--eval_split=validation",
        f"--virtual_gpus={LARGE // GPU_IMAGES}",
        *hybrid_points(LARGE, (TUNED,))[0].flags,
    ),
)

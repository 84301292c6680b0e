"""Builds descriptions of runs as checkpoints store them."""

from __future__ import annotations

import numpy as np

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.order.sampling import Cursor

ARRAYS = {"a/weights": np.arange(60, dtype=np.float32).reshape(3, 20), "b": np.array(7, np.int64)}


def meta(step, top1=None, **changes):
    """Returns a description from which a run of one rank can continue after `step` steps."""
    epochs = step // 4
    state = RunState(
        Cursor(epochs, 0), step, images=8 * step, finished_epochs=epochs, seconds=0.5 * step
    )
    return {
        "state": state.to_dict(),
        "val_top1": top1,
        "world_size": 1,
        "epoch_sums": [[0.0, 0.0, 0.0, 0.0]],
        "model": "resnet18",
        "num_classes": 2,
        "class_names": ["a", "b"],
        **changes,
    }

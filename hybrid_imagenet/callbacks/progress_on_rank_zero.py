"""Shows the progress bar of Keras on rank 0 only."""

from __future__ import annotations

from typing import Any

import keras

from hybrid_imagenet.comm import process


class ProgressOnRankZero(keras.callbacks.Callback):
    """Shows Keras's progress on rank 0 only, whatever `verbose` is on the others.

    It is one of `default_callbacks()`.
    """

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Silences the other ranks.

        Keras passes the same parameters to its own progress bar after this.
        """
        super().set_params(params)
        if params and process.rank() != 0:
            params["verbose"] = 0

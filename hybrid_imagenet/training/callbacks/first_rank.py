"""Keeps what one rank is to show and write to rank 0, in `model.fit`."""

from __future__ import annotations

from typing import Any

import keras

from hybrid_imagenet.comm import process


class ProgressOnFirstRank(keras.callbacks.Callback):
    """Lets Keras show its progress on rank 0 alone, whatever `verbose` says on the others."""

    def set_params(self, params: dict[str, Any] | None) -> None:
        """Silences the other ranks; Keras gives its own progress bar the same parameters after this."""
        super().set_params(params)
        if params and process.rank() != 0:
            params["verbose"] = 0


def on_first_rank(*callbacks: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Returns the callbacks on rank 0 and none on others: for those that write files, as `ModelCheckpoint`.

    They must not communicate, nor end training by themselves, which the other ranks would not notice.
    """
    return list(callbacks) if process.rank() == 0 else []

"""The learning rate of steps in which LARS scales the layers."""

from __future__ import annotations

from typing import Any

from hybrid_imagenet.callbacks.step_schedule import (
    StepSchedule,
    is_bounded_warmup,
    scales_layers,
)
from hybrid_imagenet.optimizers import compiled_model
from hybrid_imagenet.optimizers.trust_coefficient import set_trust_coefficient


class LARSSchedule(StepSchedule):
    """Sets the learning rate and the momentum of LARS before each step.

    It is one of `default_callbacks()`. It acts on optimizers that scale layers, except in the steps
    of `AdaBoundBounds`. In `fit` it also derives η from the global batch and the peak learning
    rate, unless it was passed.

    With linear scaling the learning rate of N workers is lr N (Lu et al. §2.2.1). LARS multiplies
    it in each layer by the trust ratio

        η |w| / (|g| + λ |w|)

    of the norms of the layer's weights w and of their gradient g, with the weight decay λ and the
    trust coefficient η. The optimizer computes the ratio. After the warmup of hybrid gradient
    computing, the exponent of the ratio may grow from 0 to 1 over some epochs
    (`trust_ratio_exponent`, --hybrid_ramp_epochs).

    Args:
      derives_coefficient: Whether to set the trust coefficient of optimizers that lack one
        (default: True).

    Reference:
      Lu et al. §2.2.1; You et al., arXiv 1708.03888.
    """

    def __init__(self, *, derives_coefficient: bool = True):
        super().__init__()
        self._derives_coefficient = derives_coefficient
        self._is_first_epoch = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._is_first_epoch = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets missing trust coefficients in the first epoch; every rank calls it.

        Later callbacks, such as `Checkpoint`, restore a coefficient when training begins, so this
        cannot be earlier. It cannot be later, because the first step is compiled with it.

        Raises:
          SharedError: See `set_trust_coefficient`.
        """
        super().on_epoch_begin(epoch, logs)
        if self._derives_coefficient and self._is_first_epoch:
            epochs = self.params.get("epochs", 0)
            for optimizer in compiled_model.optimizers(self.model).values():
                set_trust_coefficient(optimizer, epochs, self.communicator)
        self._is_first_epoch = False

    def applies_to(self, optimizer: Any, epoch: float) -> bool:
        return scales_layers(optimizer) and not is_bounded_warmup(optimizer, epoch)

"""Suggests flags for a run that ran out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig


def advice(config: RunConfig) -> str:
    """Returns a sentence with the flags to try, which halve the batch of each GPU."""
    optimization = config.optimization
    if optimization.batch_schedule:
        return "Try smaller batches in --batch_schedule."
    half = optimization.per_gpu_batch // 2
    if not half:
        return "Try a smaller --image_size or --model."
    flags = f"--per_gpu_batch={half}"
    is_even = optimization.per_gpu_batch % 2 == 0
    # With twice the micro-batches, an update has as many images as before. Synchronized statistics
    # need all images of an update at once, so they cannot be combined with micro-batches.
    if is_even and not config.network.sync_batch_norm:
        flags += f" --gradient_accumulation_steps={2 * optimization.gradient_accumulation_steps}"
    if config.evaluation.eval_batch is not None and config.evaluation.eval_batch > half:
        flags += f" --eval_batch={half}"
    images = f"{optimization.per_gpu_batch} images per GPU"
    return f"The batch has {images}. Try {flags}, and --resume if the run has saved a checkpoint."

"""A program that the tests of data run on each rank."""

from hybrid_imagenet import comm
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.numerics.sampling import Cursor, SampleOrder
from tests.data.support import MemorySource


def labels(batch: int, start: list, steps: int) -> list:
    """The labels of this rank's batches of one epoch over 1003 examples, from a place of the order on."""
    c = comm.start()
    batches = pipeline.training(
        MemorySource(1003), SampleOrder(1003, seed=7), Cursor(*start), (batch, 1), c.rank, c.size,
        epochs=1, image_size=8, augmentation="none",
    )  # fmt: skip
    return [[int(label) for label in element["label"]] for element, _ in zip(batches, range(steps), strict=False)]

"""A program that the tests of data run on each rank."""

from hybrid_imagenet import comm, data
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.errors import StorageError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from tests.data.support import MemorySource


def labels(batch: int, start: list, steps: int) -> list:
    """The labels of this rank's batches of one epoch over 1003 examples, from a place of the order
    on.
    """
    c = comm.start()
    batches = pipeline.training_batches(
        MemorySource(1003), SampleOrder(1003, seed=7), Cursor(*start), (batch, 1), c.rank, c.size,
        epochs=1, image_size=8, augmentation="none",
    )  # fmt: skip
    return [
        [int(label) for label in element["label"]]
        for element, _ in zip(batches, range(steps), strict=False)
    ]


def labels_at(url: str, copies: str, start: list) -> tuple[list, str]:
    """The labels of this rank's batches of one epoch of a set at a URL, and how it ended if that
    was too early.
    """
    c = comm.start()
    source = data.open_source("webdataset", url, cache_dir=copies, storage_timeout=1.0)
    c.allgather_object(None)  # the server dies of what comes now
    batches = pipeline.training_batches(
        source,
        pipeline.example_order(source, 2, seed=8),
        Cursor(*start),
        (4, 1),
        c.rank,
        c.size,
        epochs=1,
        image_size=8,
        augmentation="none",
        options=pipeline.HostOptions(readers=1, prefetch=1, threads=1),
    )
    seen = []
    try:
        for element in batches:
            seen.append([int(label) for label in element["label"]])
    except StorageError as error:
        return seen, str(error)
    return seen, ""

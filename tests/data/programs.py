"""Contains the programs that the tests of data run on each rank."""

from hybrid_imagenet import comm
from hybrid_imagenet.data import datasets, pipeline
from hybrid_imagenet.errors import StorageError
from hybrid_imagenet.order.sampling import Cursor


def labels_at(url: str, copies: str, start: list) -> tuple[list, str]:
    """Returns the labels of this rank's batches in one epoch of a dataset at a URL, and an error.

    The error is "" if the rank has read the whole epoch.
    """
    communicator = comm.start()
    source = datasets.open_source("webdataset", url, cache_dir=copies, storage_timeout=1.0)
    # All ranks are ready. The server dies during the following requests.
    communicator.allgather_object(None)
    batches = pipeline.training_batches(
        source,
        pipeline.example_order(source, 2, seed=8),
        Cursor(*start),
        (4, 1),
        communicator.rank,
        communicator.size,
        epochs=1,
        image_size=8,
        augmentation="none",
        options=pipeline.HostOptions(readers=1, prefetch=1, threads=1),
    )
    labels_of_batches = []
    try:
        for element in batches:
            labels_of_batches.append([int(label) for label in element["label"]])
    except StorageError as error:
        return labels_of_batches, str(error)
    return labels_of_batches, ""

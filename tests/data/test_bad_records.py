"""Reading of examples that can be used."""

import threading

import numpy as np

from hybrid_imagenet import data
from hybrid_imagenet.data.bad_records import BadRecords, UsableExamples


def test_pipelines_share_their_reading_threads():
    source = data.open_source("synthetic", split="train", num_examples=16, num_classes=3)
    before = sum(thread.name.startswith("reads") for thread in threading.enumerate())
    for _ in range(5):  # as many pipelines as a run of some epochs has
        reader = UsableExamples(source, BadRecords(source, "fail", 0), reads=4)
        assert len(reader.read(np.arange(8))[0]) == 8
    assert sum(thread.name.startswith("reads") for thread in threading.enumerate()) <= before + 4

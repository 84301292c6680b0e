"""Trains on nothing: records what each step sees, slowly, until it is killed; goes on where the record ends."""

import json
import os
import sys
import time
from pathlib import Path

from hybrid_imagenet.data import pipeline
from hybrid_imagenet.numerics.sampling import Cursor, SampleOrder
from tests.data.support import MemorySource


def main(path, remainder):
    lines = path.read_text().splitlines() if path.exists() else []
    cursor = Cursor(*json.loads(lines[-1])["cursor"]) if lines else Cursor()
    order = SampleOrder(1003, seed=6, remainder=remainder)
    batches = pipeline.training(MemorySource(1003), order, cursor, (10, 1), epochs=1, image_size=8, augmentation="none")
    with path.open("a") as file:
        for element in batches:
            cursor = order.advance(cursor, 10)
            step = {"labels": element["label"].numpy().tolist(), "start": int(bool(lines))}
            file.write(json.dumps(step | {"cursor": [cursor.epoch, cursor.offset]}) + "\n")
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

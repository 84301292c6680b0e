"""Records the digests of guarded runs, or compares them.

Usage: python -m tests.guard.record [--check] [NAME ...]

Without --check it writes them to hashes.json. NAME selects the runs whose names contain it. All
runs take about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time

from hybrid_imagenet.data import datasets
from tests.guard import hashes, runs
from tests.ranks import Pool

TRAINING_IMAGES = 96
VALIDATION_IMAGES = 24


def write_digits(folder: pathlib.Path) -> None:
    """Writes a small part of the digits, for --dataset=digits --data_dir=FOLDER."""
    from unittest import mock

    from hybrid_imagenet.data.sources import digits

    images, labels = digits._load_digits()
    count = TRAINING_IMAGES + VALIDATION_IMAGES
    with (
        mock.patch.object(digits, "_load_digits", lambda: (images[:count], labels[:count])),
        mock.patch.object(digits, "_NUM_VALIDATION_IMAGES", VALIDATION_IMAGES),
    ):
        datasets.open_source("digits", str(folder))


def main() -> int:
    """Runs the selected runs; returns 1 if a digest differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", default=[""])
    options = parser.parse_args()
    expected = hashes.load()
    differing = []
    pools = {1: Pool(1, ""), 2: Pool(2), 4: Pool(4)}
    selected = {
        name: run for name, run in runs.RUNS.items() if any(part in name for part in options.names)
    }
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        write_digits(folder / "digits")
        for name, run in sorted(selected.items(), key=lambda item: item[1].ranks):
            start = time.monotonic()
            digest = pools[run.ranks].call(
                runs.digest, name, str(folder / "digits"), str(folder / name)
            )[0]
            verdict = "recorded"
            if options.check:
                verdict = (
                    "same" if digest == expected.get(name) else f"DIFFERS from {expected.get(name)}"
                )
            else:
                hashes.save({name: digest})
            if verdict.startswith("DIFFERS"):
                differing.append(name)
            print(f"{name}: {digest} {verdict} ({time.monotonic() - start:.1f} s)", flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{len(selected)} runs, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())

"""Any sequence of saves, kills, damage and resumes leaves the latest valid checkpoint restorable.

The test decides by bytes whether a file is valid: it must hold exactly the bytes that were once
renamed to its name.
"""

import collections
import os
import pathlib
import re
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.errors import UserError
from tests.checkpoints.support import meta

KEEP = 2
TOP1 = st.sampled_from([None, 0.2, 0.4, 0.4, 0.6])
EVENTS = st.one_of(
    st.tuples(st.just("save"), TOP1),
    st.tuples(st.just("save"), TOP1),
    st.tuples(st.just("kill"), TOP1, st.integers(0, 9)),
    st.tuples(st.just("cut"), st.integers(0, 4), st.floats(0, 0.99)),
    st.tuples(st.just("flip"), st.integers(0, 4), st.integers(0, 2047)),
    st.tuples(
        st.just("replace"), st.integers(0, 4), st.sampled_from(["empty", "FIFO", "directory"])
    ),
    st.tuples(st.just("plant"), st.integers(1, 9), st.sampled_from(["empty", "FIFO", "directory"])),
    st.tuples(st.just("resume")),
)
UNLIMITED_OPERATIONS = 10**6


class Killed(Exception):  # noqa: N818
    """Ends the simulated process, as SIGKILL would."""


class Run:
    """A run whose process may end between any two operations on the disk."""

    def __init__(self, folder):
        self.folder = folder
        # Maps a file name to the bytes that were renamed to it and the top-1 accuracy.
        self.written = {}
        self.step = 0
        self.top1 = None
        # The process ends after so many operations.
        self.operations_left = UNLIMITED_OPERATIONS
        self.store = self.open()

    def open(self):
        return CheckpointStore(self.folder, KEEP, keep_best=True, log=lambda line: None)

    def counted(self, original):
        """Wraps an operation so that the process ends when no operations are left."""

        def operation(*arguments, **options):
            if self.operations_left <= 0:
                raise Killed
            self.operations_left -= 1
            if original is REPLACE:
                source, target = arguments
                self.written[target.name] = (source.read_bytes(), self.top1)
            return None if original is SYNC else original(*arguments, **options)

        return operation

    def save(self, top1, operations=UNLIMITED_OPERATIONS):
        """Saves the next step; if it is killed after some operations, it is resumed."""
        self.step += 1
        self.top1 = top1
        self.operations_left = operations
        array = np.full(64, self.step, np.float32)
        try:
            self.store.save(self.step, {"w": array}, meta(self.step, top1))
            self.store.wait()
        except UserError:
            assert self.operations_left <= 0
            self.resume()
        self.operations_left = UNLIMITED_OPERATIONS

    def resume(self):
        self.operations_left = UNLIMITED_OPERATIONS
        self.store = self.open()
        valid = self.valid()
        checkpoint = self.store.latest_valid()
        assert (checkpoint.path if checkpoint else None) == (valid[0] if valid else None)
        self.step = checkpoint.meta["state"]["step"] if checkpoint else 0
        if checkpoint:
            assert checkpoint.arrays["w"].tolist() == [self.step] * 64

    def files(self):
        return sorted(
            (p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{9}\.npz", p.name)),
            reverse=True,
        )

    def valid(self):
        """Returns the valid files, latest first."""
        return [
            p
            for p in self.files()
            if p.is_file() and self.written.get(p.name, ("",))[0] == p.read_bytes()
        ]

    def best(self, paths):
        """Returns the earliest file with the highest top-1, as a list."""
        scored = [p for p in reversed(paths) if self.written[p.name][1] is not None]
        return sorted(scored, key=lambda p: -self.written[p.name][1])[:1]

    def damaged(self):
        """Counts the contents of invalid files under any name, and entries that are not files."""
        others = [
            p for p in self.folder.iterdir() if p not in self.valid() and not p.name.startswith(".")
        ]
        return collections.Counter(p.read_bytes() if p.is_file() else "no file" for p in others)

    def damage(self, kind, which, how):
        if kind == "plant":
            path = self.folder / f"step-{self.step + which:09d}.npz"
        elif self.files():
            path = self.files()[which % len(self.files())]
        else:
            return
        if kind in ("cut", "flip"):
            if not path.is_file() or not path.stat().st_size:
                return
            content = bytearray(path.read_bytes())
            if kind == "cut":
                del content[int(how * len(content)) :]
            else:
                # Flip a bit among the 256 bytes of the array.
                start = content.find(np.full(2, int(path.stem[-9:]), np.float32).tobytes())
                content[min(max(start, 0) + how // 8, len(content) - 1)] ^= 1 << how % 8
            path.write_bytes(content)
            # The clock of the file system is too coarse for this test.
            later = path.stat().st_mtime + 1
            os.utime(path, (later, later))
        elif not path.is_dir():
            path.unlink(missing_ok=True)
            {"empty": path.touch, "FIFO": lambda: os.mkfifo(path), "directory": path.mkdir}[how]()


REPLACE = pathlib.Path.replace
RENAME = pathlib.Path.rename
UNLINK = pathlib.Path.unlink
SYNC = os.fsync


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENTS, min_size=4, max_size=16))
def test_latest_valid_checkpoint_is_restored_after_any_events(events):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run = Run(pathlib.Path(folder))
        for kind, *arguments in events:
            before = run.valid()
            damaged = run.damaged()
            if kind in ("cut", "flip", "replace", "plant"):
                run.damage(kind, *arguments)
                continue
            with patch.context() as armed:
                for owner, name, original in (
                    (pathlib.Path, "replace", REPLACE),
                    (pathlib.Path, "rename", RENAME),
                    (pathlib.Path, "unlink", UNLINK),
                    (os, "fsync", SYNC),
                ):
                    armed.setattr(owner, name, run.counted(original))
                run.resume() if kind == "resume" else run.save(*arguments)
            after = run.valid()
            assert not damaged - run.damaged()
            # This includes the new checkpoint, if its write was completed.
            candidates = sorted({*after[:1], *before}, reverse=True)
            kept = {*candidates[:KEEP], *run.best(candidates)}
            if kind == "save":
                assert after[0].name == f"step-{run.step:09d}.npz"
                assert set(after) == kept
            else:
                assert set(after) >= kept
        run.resume()

"""Tests stacks of this process's threads, as other threads see them."""

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_imagenet.resilience import stacks
from hybrid_imagenet.resilience.stacks import FrameWatch


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_frame_watch_in_a_generator_runs_until_the_call_ends(fails):
    # The watch is created in a generator. Its own thread and another one ask whether it runs.
    with ThreadPoolExecutor(1) as other_thread:

        def generator():
            watch = FrameWatch("watched")
            yield watch
            yield other_thread.submit(watch.is_running).result()

        def watched():
            values = generator()
            results.extend([next(values), next(values)])
            return 1 / (not fails)

        results = []
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            watched()
    watch, was_running = results
    assert was_running
    assert not watch.is_running()
    assert not watch.is_running()


def test_frame_watch_of_a_function_that_was_not_called_always_runs():
    assert FrameWatch("a function that does not exist").is_running()


def test_main_stack_switches_garbage_collection_off_while_frames_are_listed(monkeypatch):
    was_enabled = []

    def list_frames():
        was_enabled.append(gc.isenabled())
        return {}

    monkeypatch.setattr(stacks.sys, "_current_frames", list_frames)
    assert stacks.main_stack() == ()
    assert was_enabled == [False]
    assert gc.isenabled()

"""Files are written whole or not at all; what can be made again is, whatever its damage."""

import os
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    target, order = tmp_path / "config.json", []
    target.write_text("old")
    sync, replace = os.fsync, pathlib.Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("sync") or sync(descriptor))
    monkeypatch.setattr(pathlib.Path, "replace", lambda *paths: order.append("replace") or replace(*paths))
    with files.replacing(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert order == ["sync", "replace", "sync"]  # the last one of the directory
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert target.read_text() == "new"


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / "config.json"
    target.write_text("old")
    with pytest.raises(OSError, match="full"), files.replacing(target) as temporary:
        temporary.write_text("ne")
        raise OSError("full")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_several_may_write_one_file_at_once(tmp_path):
    target, together = tmp_path / "index", threading.Barrier(4)

    def write(number):
        with files.replacing(target) as temporary:
            temporary.write_text(str(number) * 1000)
            together.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert target.read_text() in {str(number) * 1000 for number in range(4)}
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100000])
def test_a_file_that_cannot_be_made_again_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config.json: .*restore it"):
        files.read_json(path)

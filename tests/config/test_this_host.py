"""What --check_only says about the host that it runs on."""

import shutil
from collections import namedtuple

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import this_host

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def large_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, 1e12))


def told(tmp_path, *flags):
    return this_host.warnings(config.resolve(["--dataset=digits", *flags]), gpus=tmp_path / "no GPUs")


def test_nothing_is_said_about_a_run_that_fits(tmp_path):
    assert told(tmp_path) == []
    assert told(tmp_path, f"--data_dir={tmp_path}", f"--run_dir={tmp_path}/new") == []


def test_a_disk_without_room_for_the_checkpoints_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, 2e9))
    line = told(tmp_path, f"--run_dir={tmp_path}/a/b", "--keep_checkpoints=2")[0]
    assert line.startswith(f"{tmp_path}: 2.0 GB free; 2 checkpoints")
    assert line.endswith("up to 3.0 GB")


def test_fp16_asks_for_a_gpu(tmp_path):
    fp16 = config.resolve(["--precision=mixed_float16"])
    assert "--precision=auto" in this_host.warnings(fp16, gpus=tmp_path / "none")[0]
    assert this_host.warnings(fp16, gpus=tmp_path) == []


def test_nothing_is_said_where_the_ranks_run_elsewhere(tmp_path, monkeypatch):
    assert told(tmp_path, "--precision=mixed_float16") != []
    monkeypatch.setenv("HYBRID_IMAGENET_RANKS_ELSEWHERE", "1")
    assert told(tmp_path, "--precision=mixed_float16") == []

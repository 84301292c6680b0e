"""Data sets at a URL: copies of their files, servers that are killed, and copies that make room."""

import collections
import errno
import fcntl
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from hybrid_imagenet import data
from hybrid_imagenet.data import pipeline, remote
from hybrid_imagenet.data.sources import webdataset
from hybrid_imagenet.data.sources.source import BadRecord, write_index
from hybrid_imagenet.errors import EXIT_STALLED, UserError
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.order.shard_order import ShardOrder
from hybrid_imagenet.tools.data import prepare
from tests.data import programs, support, test_webdataset
from tests.data.http_server import Server
from tests.data.test_sources import cache  # noqa: F401
from tests.ranks import ROOT, environment
from tests.support import program
from tests.support.processes import wait_for

COUNT = 60  # images of the set that is read slowly; the label of each is its number


@pytest.fixture
def serve(tmp_path):
    """Starts servers, and kills them at the end."""
    servers = []

    def start(directory, **options):
        servers.append(Server(directory, tmp_path / f"log{len(servers)}", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def numbered(directory):
    """COUNT different images in ten tar files, and one for validation."""
    directory.mkdir()
    for split, count in (("train", COUNT), ("validation", 2)):
        pairs = [(support.jpeg(number, 12, 16), number) for number in range(count)]
        support.write_tars(directory, split, pairs, per_file=6)
    support.write_info(directory)
    (directory / "labels.txt").write_text("\n".join(map(str, range(COUNT))))
    return directory


def opened(server, copies):
    """The directory of a server, with its copies."""
    return remote.RemoteDirectory(server.url, copies, 120.0)


def fetched(server):
    """How often each file was sent whole, by the first bytes that were asked for."""
    return collections.Counter(
        path for method, path, part in server.requests() if part.startswith("bytes=0-")
    )


@pytest.mark.parametrize(
    ("name", "ranges"), [("webdataset", True), ("webdataset", False), ("parquet", True)]
)
def test_a_set_at_a_url_is_the_set_in_the_directory(name, ranges, tmp_path, serve):
    directory = tmp_path / "set"
    if name == "webdataset":
        test_webdataset.write(directory)
    else:
        for split in data.SPLITS:
            support.write_parquet(directory / "data", split, support.tiny(split))
    server = serve(directory, ranges=ranges)
    for _ in range(2):
        for split in data.SPLITS:
            local = data.open_source(name, str(directory), split)
            source = data.open_source(name, server.url, split, cache_dir=str(tmp_path / "copies"))
            images, labels = source.read(range(source.num_examples))
            assert list(zip(images, labels.tolist(), strict=True)) == support.tiny(split)
            assert source.class_names == local.class_names
            assert source.shard_sizes.tolist() == local.shard_sizes.tolist()
            assert source.locate(4) == (
                local.locate(4)[0].replace(str(directory), server.url),
                local.locate(4)[1],
            )
    files = [path for path in directory.rglob("*.*") if path.suffix in (".tar", ".parquet")]
    # one copy of each; a footer, which both openings ask for, is all of a file as small as these
    if ranges:
        times = {"webdataset": 1, "parquet": 3}[name]
        assert fetched(server) == {f"/{path.relative_to(directory)}": times for path in files}


def test_only_files_that_are_needed_are_copied(tmp_path, serve):
    server = serve(numbered(tmp_path / "set"))
    source = data.open_source("webdataset", server.url, cache_dir=str(tmp_path / "copies"))
    assert source.num_examples == COUNT
    assert not fetched(server)
    assert source.read_one(20) == (support.jpeg(20, 12, 16), 20)
    assert fetched(server) == {"/train-0003.tar": 1}
    source.prefetch([4, 5])
    wait_for(lambda: set(fetched(server)) == {f"/train-000{n}.tar" for n in (3, 4, 5)})


def batches(source):
    """Micro-batches of three, one shard after another."""
    order = ShardOrder(source.shard_sizes, 1, seed=4)
    options = pipeline.HostOptions(readers=1, prefetch=1, threads=1, reads=2)
    return pipeline.training_batches(
        source,
        order,
        Cursor(),
        (3, 1),
        epochs=1,
        image_size=8,
        augmentation="none",
        options=options,
    )


def test_a_server_that_is_killed_inside_of_an_epoch_and_comes_back_loses_nothing(
    tmp_path, serve, caplog
):
    directory = numbered(tmp_path / "set")
    expected = [
        batch["image"].numpy() for batch in batches(data.open_source("webdataset", str(directory)))
    ]
    server = serve(directory)
    source = data.open_source("webdataset", server.url, cache_dir=str(tmp_path / "copies"))
    seen = []
    for number, batch in enumerate(batches(source)):
        if number == 3:
            server.kill()
            threading.Timer(1.5, server.start).start()
        seen.append(batch["image"].numpy())
    assert np.array_equal(seen, expected)
    warnings = [
        record.message
        for record in caplog.records
        if "trying again for 120 seconds" in record.message
    ]
    assert 1 <= len(warnings) <= 3
    assert fetched(server).keys() == {f"/train-{n:04d}.tar" for n in range(10)}


def test_a_connection_that_breaks_inside_of_a_file_goes_on_where_it_broke(
    tmp_path, serve, monkeypatch
):
    server = serve(numbered(tmp_path / "set"))
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 3000)
    directory = opened(server, tmp_path / "copies")
    asked = []

    def broken_once(path, start, end, cat=directory._file_system.cat_file):
        asked.append(start)
        content = cat(path, start=start, end=end)
        return content[:100] if asked.count(6000) == 1 and start == 6000 else content

    monkeypatch.setattr(directory._file_system, "cat_file", broken_once)
    whole = tmp_path / "set" / "train-0000.tar"
    assert directory.local_path("train-0000.tar").read_bytes() == whole.read_bytes()
    assert asked == [*range(0, 6000, 3000), 6000, *range(6000, whole.stat().st_size, 3000)]


def test_the_files_of_a_set_on_the_hub_are_read_like_those_of_any_url(tmp_path, serve):
    directory = tmp_path / "set"
    support.write_parquet(directory / "data", "train", support.tiny("train"))
    hub = {
        "HF_ENDPOINT": serve(directory).url,
        "HF_HOME": str(tmp_path / "home"),
    }  # which is read at import
    place = (
        f"'parquet', 'hf://datasets/me/tiny', cache_dir={str(tmp_path / 'copies')!r},"
        " storage_timeout=10.0"
    )
    code = (
        "from hybrid_imagenet import data;"
        f" print(data.open_source({place}).read(range(14))[1].sum())"
    )
    reader = [sys.executable, "-c", code]
    done = subprocess.run(
        reader, cwd=ROOT, env=environment() | hub, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert done.stdout.split()[-1] == str(sum(label for _, label in support.tiny("train")))


def test_ranks_whose_server_dies_go_on_with_exactly_the_rest(pools, tmp_path, serve):
    server = serve(numbered(tmp_path / "set"), dies_after=5)
    place = server.url, str(tmp_path / "copies")
    ends = pools[2].call(programs.labels_at, *place, [0, 0])
    assert all(
        "has failed for --storage_timeout=1 seconds" in error and "\n" not in error
        for _, error in ends
    )
    steps = min(len(seen) for seen, _ in ends)  # a job trains on what all ranks have
    assert 1 <= steps < COUNT // 8
    server.start()
    rest = pools[2].call(programs.labels_at, *place, [0, 8 * steps])
    assert [error for _, error in rest] == ["", ""]
    parts = [before[:steps] + after for (before, _), (after, _) in zip(ends, rest, strict=True)]
    stream = [label for step in zip(*parts, strict=True) for part in step for label in part]
    assert sorted(stream[:COUNT]) == list(range(COUNT))


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        (
            "http://127.0.0.1:9/set",
            {"name": "tfrecord"},
            "is a URL, which --dataset=tfrecord does not support. Only webdataset and parquet",
        ),
        (
            "http://127.0.0.1:9/set",
            {"cache_dir": None},
            "is a URL. Set --data_cache_dir to a local directory for copies",
        ),
        ("http://127.0.0.1:9/set?token=x", {}, "has a query or a fragment"),
        ("nonsense://host/set", {}, "not a URL that can be read"),
        ("s3://bucket/set", {}, "s3fs"),
        (
            "http://127.0.0.1:9/set",
            {"storage_timeout": 0.1},
            "has failed for --storage_timeout=0.1 seconds",
        ),
        (
            "http://127.0.0.1:9/set",
            {"cache_dir": "/proc/nothing"},
            "--data_cache_dir=/proc/nothing: cannot be written",
        ),
    ],
)
def test_a_remote_directory_that_cannot_be_used_raises_one_line(url, options, message, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        data.open_source(
            **{"name": "webdataset", "data_dir": url, "cache_dir": str(tmp_path), **options}
        )
    assert "\n" not in str(caught.value)


def test_files_that_the_server_does_not_have_are_named_at_once(tmp_path, serve):
    directory = test_webdataset.write(tmp_path / "set")
    support.write_info(directory)
    (directory / "tiny-train-0003.tar").unlink()
    server = serve(directory)
    for name in ("webdataset", "parquet"):
        with pytest.raises(UserError, match=r"/nothing does not exist, or cannot be read"):
            data.open_source(name, f"{server.url}/nothing", cache_dir=str(tmp_path / "copies"))
    with pytest.raises(
        UserError, match=r"tiny-train-0003.tar does not exist, or cannot be accessed"
    ):
        data.open_source("webdataset", server.url, cache_dir=str(tmp_path / "copies"))
    (directory / "_info.json").unlink()
    for path in directory.glob("*validation*"):
        path.unlink()
    with pytest.raises(UserError, match="holds no validation tar files"):
        data.open_source("webdataset", server.url, "validation", cache_dir=str(tmp_path / "copies"))


def test_a_file_that_vanishes_from_the_url_is_a_bad_record(tmp_path, serve):
    directory = numbered(tmp_path / "set")
    source = data.open_source(
        "webdataset", serve(directory).url, cache_dir=str(tmp_path / "copies")
    )
    (directory / "train-0001.tar").unlink()
    assert source.read_one(5)[1] == 5
    with pytest.raises(UserError, match=r"train-0001.tar cannot be read"):
        source.read_one(6)
    # Its index is known, and somebody has removed its copy.
    (directory / "train-0000.tar").unlink()
    next((tmp_path / "copies").rglob("*train-0000.tar")).unlink()
    with pytest.raises(BadRecord, match=r"train-0000.tar"):
        source.read_one(4)


def test_a_server_without_ranges_sends_a_file_once_for_all_its_parts(tmp_path, serve, monkeypatch):
    server = serve(numbered(tmp_path / "set"), ranges=False)
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 3000)
    directory = opened(server, tmp_path / "copies")
    assert (
        directory.local_path("train-0000.tar").read_bytes()
        == (tmp_path / "set" / "train-0000.tar").read_bytes()
    )
    assert [path for method, path, _ in server.requests() if method == "GET"] == ["/train-0000.tar"]


def read(server, copies):
    """The bytes of a file, as a new start reads them."""
    return opened(server, copies).local_path("train-0000.tar").read_bytes()


def test_an_interrupted_copy_is_completed_at_the_next_start(tmp_path, serve, monkeypatch):
    server, copies = serve(numbered(tmp_path / "set")), tmp_path / "copies"
    whole = (tmp_path / "set" / "train-0000.tar").read_bytes()
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 3000)
    for cut in range(1, len(whole) // 3000):
        directory = opened(server, copies)

        def stopped(path, start, end, cat=directory._file_system.cat_file, cut=cut):
            if start >= 3000 * cut:
                raise KeyboardInterrupt
            return cat(path, start=start, end=end)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(directory._file_system, "cat_file", stopped)
            directory.local_path("train-0000.tar")
        assert read(server, copies) == whole
        next(copies.rglob("*train-0000.tar")).unlink()


def test_copies_on_a_file_system_without_locks_are_whole_and_leave_no_parts(
    tmp_path, serve, monkeypatch
):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    server, copies = serve(numbered(tmp_path / "set")), tmp_path / "copies"
    whole = (tmp_path / "set" / "train-0000.tar").read_bytes()
    monkeypatch.setattr(fcntl, "flock", flock)
    assert read(server, copies) == whole
    assert not list(copies.rglob("*.part"))
    next(copies.rglob("*train-0000.tar")).unlink()

    directory = opened(server, copies)
    monkeypatch.setattr(directory, "_check_unchanged", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        directory.local_path("train-0000.tar")
    assert not list(copies.rglob("*.part"))


def test_a_copy_is_on_the_disk_before_it_gets_its_name(tmp_path, serve, monkeypatch):
    server, order = serve(numbered(tmp_path / "set")), []
    sync, replace = os.fsync, pathlib.Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("sync") or sync(descriptor))
    monkeypatch.setattr(
        pathlib.Path, "replace", lambda *paths: order.append("replace") or replace(*paths)
    )
    read(server, tmp_path / "copies")
    assert order == ["sync", "replace"]


def test_another_version_of_the_same_size_is_copied_and_indexed_again(tmp_path, serve, monkeypatch):
    path, copies = tmp_path / "set" / "train-0000.tar", tmp_path / "copies"
    path.parent.mkdir()
    server = serve(path.parent)
    (tmp_path / "set" / "labels.txt").write_text("0\n1\n2")
    for number, names in enumerate((["0", "1"], ["1", "0"], ["00", "11"])):
        files = [
            (f"{name}.{suffix}", name[:1].encode()) for name in names for suffix in ("jpg", "cls")
        ]
        test_webdataset.tar(path, files)
        os.utime(path, (0, 1000 * number))
        source = data.open_source("webdataset", server.url, cache_dir=str(copies))
        expected = [(name[:1].encode(), int(name[0])) for name in names]
        assert [source.read_one(index) for index in range(2)] == expected
    assert len({copy.stat().st_size for copy in copies.rglob("*.tar")}) == 1


def test_a_file_that_changes_while_it_is_copied_raises(tmp_path, serve):
    server = serve(numbered(tmp_path / "set"))
    directory = opened(server, tmp_path / "copies")
    directory.look_up_sizes(["train-0000.tar"])
    os.utime(tmp_path / "set" / "train-0000.tar", (0, 0))
    with pytest.raises(
        UserError, match=r"train-0000.tar has changed at the URL since this start, .*1970"
    ):
        directory.local_path("train-0000.tar")
    assert not list((tmp_path / "copies").rglob("*.tar"))


def test_an_index_does_not_outlive_its_copy(tmp_path, serve):
    server, copies = serve(numbered(tmp_path / "set")), tmp_path / "copies"
    first = data.open_source("webdataset", server.url, cache_dir=str(copies))
    assert first.read_one(0)[1] == 0
    copy = next(copies.rglob("*train-0000.tar"))
    other = tmp_path / "set" / "train-0001.tar"
    write_index(
        copy.with_name(f"{copy.name}.index.npz"), webdataset.scan_tar(other)
    )  # as of a copy that was wrong
    copy.unlink()
    second = data.open_source("webdataset", server.url, cache_dir=str(copies))
    assert [second.read_one(index)[1] for index in range(6)] == list(range(6))


def test_a_url_that_fails_before_training_ends_all_ranks_with_the_code_of_storage(pools, tmp_path):
    flags = ["--dataset=parquet", f"--data_cache_dir={tmp_path}", "--storage_timeout=0.1"]
    done = program.train_on(pools[2], "http://127.0.0.1:9/set", tmp_path / "run", *flags)
    assert done.returncode == EXIT_STALLED
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "has failed for --storage_timeout=0.1 seconds" in line


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../b.tar"])
def test_a_list_does_not_lead_out_of_the_directory_of_copies(name, tmp_path, serve):
    directory = test_webdataset.write(tmp_path / "set")
    support.write_info(directory, filenames=[name], shard_lengths=[3])
    server = serve(directory)
    with pytest.raises(UserError, match="is outside of the directory"):
        data.open_source(
            "webdataset", server.url, cache_dir=str(tmp_path / "copies"), num_classes=3
        )
    assert not [path for path in (tmp_path / "copies").rglob("*") if path.is_file()]


def test_bad_records_and_the_manifest_hold_no_passwords(tmp_path, serve, caplog):
    directory = tmp_path / "set"
    directory.mkdir()
    good = [("0.jpg", support.jpeg(0)), ("0.cls", b"1")]
    for split in ("train", "validation"):
        test_webdataset.tar(
            directory / f"{split}-0.tar", [*good, ("1.jpg", b"none"), ("1.cls", b"0")]
        )
    url = serve(directory).url.replace("//", "//ann:hunter2@")
    copies, settings = str(tmp_path / "copies"), prepare.PrepareSettings(skip_bad_records=True)
    prepare.prepare_dataset(
        data.DatasetRequest("webdataset", url, cache_dir=copies), tmp_path / "shards", settings
    )
    manifest = (tmp_path / "shards" / "manifest.json").read_text()
    place, _ = data.open_source("webdataset", url, cache_dir=copies).locate(1)
    for text in (manifest, caplog.text, place):
        assert "http://***@127.0.0.1" in text
        assert "hunter2" not in text

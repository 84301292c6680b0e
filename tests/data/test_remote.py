"""Tests datasets at a URL: copies of files, servers that are killed, and damaged copies."""

import collections
import errno
import fcntl
import itertools
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

from hybrid_imagenet.commands.data import prepare
from hybrid_imagenet.data import datasets, pipeline, remote
from hybrid_imagenet.data.sources import webdataset
from hybrid_imagenet.data.sources.source import BadRecord, write_index
from hybrid_imagenet.errors import EXIT_STALLED, UserError
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.order.shard_order import ShardOrder
from tests.data import programs, support, test_webdataset
from tests.data.http_server import Server
from tests.data.test_sources import cache  # noqa: F401
from tests.ranks import ROOT, environment
from tests.support import program
from tests.support.processes import wait_for

# The number of images of the numbered dataset. The label of each image is its number.
COUNT = 60


@pytest.fixture
def serve(tmp_path):
    """Yields a function that starts servers, which are killed at the end."""
    servers = []

    def start(directory, **options):
        servers.append(Server(directory, tmp_path / f"log{len(servers)}", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def write_numbered(directory):
    """Writes COUNT different images into ten tar files, and two for validation."""
    directory.mkdir()
    for split, count in (("train", COUNT), ("validation", 2)):
        pairs = [(support.jpeg(number, 12, 16), number) for number in range(count)]
        support.write_tars(directory, split, pairs, per_file=6)
    support.write_info(directory)
    (directory / "labels.txt").write_text("\n".join(map(str, range(COUNT))))
    return directory


def open_directory(server, copies):
    """Opens the directory of a server, with copies in another directory."""
    return remote.RemoteDirectory(server.url, copies, 120.0)


def downloads(server):
    """Returns how often the beginning of each file was requested."""
    return collections.Counter(
        path for method, path, part in server.requests() if part.startswith("bytes=0-")
    )


@pytest.mark.parametrize(
    ("name", "ranges"), [("webdataset", True), ("webdataset", False), ("parquet", True)]
)
def test_source_at_a_url_equals_the_source_in_the_directory(name, ranges, tmp_path, serve):
    directory = tmp_path / "set"
    if name == "webdataset":
        test_webdataset.write(directory)
    else:
        for split in datasets.SPLITS:
            support.write_parquet(directory / "data", split, support.tiny(split))
    server = serve(directory, ranges=ranges)
    for _ in range(2):
        for split in datasets.SPLITS:
            local = datasets.open_source(name, str(directory), split)
            source = datasets.open_source(
                name, server.url, split, cache_dir=str(tmp_path / "copies")
            )
            images, labels = source.read(range(source.num_examples))
            assert list(zip(images, labels.tolist(), strict=True)) == support.tiny(split)
            assert source.class_names == local.class_names
            assert source.shard_sizes.tolist() == local.shard_sizes.tolist()
            assert source.locate(4) == (
                local.locate(4)[0].replace(str(directory), server.url),
                local.locate(4)[1],
            )
    files = [path for path in directory.rglob("*.*") if path.suffix in (".tar", ".parquet")]
    # Each file is copied once. Both openings also read the footer of a Parquet file, which is the
    # whole file if it is so small.
    if ranges:
        times = {"webdataset": 1, "parquet": 3}[name]
        assert downloads(server) == {f"/{path.relative_to(directory)}": times for path in files}


def test_source_at_a_url_copies_only_files_that_are_needed(tmp_path, serve):
    server = serve(write_numbered(tmp_path / "set"))
    source = datasets.open_source("webdataset", server.url, cache_dir=str(tmp_path / "copies"))
    assert source.num_examples == COUNT
    assert not downloads(server)
    assert source.read_one(20) == (support.jpeg(20, 12, 16), 20)
    assert downloads(server) == {"/train-0003.tar": 1}
    source.prefetch([4, 5])
    wait_for(lambda: set(downloads(server)) == {f"/train-000{n}.tar" for n in (3, 4, 5)})


def batches(source):
    """Returns micro-batches of three images, one shard after another."""
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


def test_batches_from_a_server_that_is_killed_and_returns_are_complete(tmp_path, serve, caplog):
    directory = write_numbered(tmp_path / "set")
    expected = [
        batch["image"].numpy()
        for batch in batches(datasets.open_source("webdataset", str(directory)))
    ]
    server = serve(directory)
    source = datasets.open_source("webdataset", server.url, cache_dir=str(tmp_path / "copies"))
    images = []
    for number, batch in enumerate(batches(source)):
        if number == 3:
            server.kill()
            threading.Timer(1.5, server.start).start()
        images.append(batch["image"].numpy())
    assert np.array_equal(images, expected)
    warnings = [
        record.message
        for record in caplog.records
        if "trying again for 120 seconds" in record.message
    ]
    assert 1 <= len(warnings) <= 3
    assert downloads(server).keys() == {f"/train-{n:04d}.tar" for n in range(10)}


def test_copy_of_a_file_continues_where_the_connection_broke(tmp_path, serve, monkeypatch):
    server = serve(write_numbered(tmp_path / "set"))
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 3000)
    directory = open_directory(server, tmp_path / "copies")
    starts = []

    def break_once(path, start, end, cat=directory._file_system.cat_file):
        starts.append(start)
        content = cat(path, start=start, end=end)
        return content[:100] if starts.count(6000) == 1 and start == 6000 else content

    monkeypatch.setattr(directory._file_system, "cat_file", break_once)
    whole = tmp_path / "set" / "train-0000.tar"
    assert directory.local_path("train-0000.tar").read_bytes() == whole.read_bytes()
    # A request that fails for another reason, as on a busy machine, is repeated at once too.
    repeated = [start for start, group in itertools.groupby(starts) if len(list(group)) > 1]
    assert 6000 in repeated
    assert [start for start, _ in itertools.groupby(starts)] == [
        *range(0, whole.stat().st_size, 3000)
    ]


def test_source_on_the_hugging_face_hub_reads_its_files(tmp_path, serve):
    directory = tmp_path / "set"
    support.write_parquet(directory / "data", "train", support.tiny("train"))
    # The hub's package reads these variables when it is imported.
    hub = {"HF_ENDPOINT": serve(directory).url, "HF_HOME": str(tmp_path / "home")}
    arguments = (
        f"'parquet', 'hf://datasets/me/tiny', cache_dir={str(tmp_path / 'copies')!r},"
        " storage_timeout=10.0"
    )
    code = (
        "from hybrid_imagenet.data import datasets;"
        f" print(datasets.open_source({arguments}).read(range(14))[1].sum())"
    )
    reader = [sys.executable, "-c", code]
    result = subprocess.run(
        reader, cwd=ROOT, env=environment() | hub, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert result.stdout.split()[-1] == str(sum(label for _, label in support.tiny("train")))


def test_ranks_whose_server_dies_resume_with_exactly_the_remaining_examples(pools, tmp_path, serve):
    server = serve(write_numbered(tmp_path / "set"), dies_after=5)
    arguments = server.url, str(tmp_path / "copies")
    ends = pools[2].call(programs.labels_at, *arguments, [0, 0])
    assert all(
        "has failed for --storage_timeout=1 seconds" in error and "\n" not in error
        for _, error in ends
    )
    # A job trains only on steps that all ranks have read.
    steps = min(len(labels) for labels, _ in ends)
    assert 1 <= steps < COUNT // 8
    server.start()
    rest = pools[2].call(programs.labels_at, *arguments, [0, 8 * steps])
    assert [error for _, error in rest] == ["", ""]
    labels_of_ranks = [
        before[:steps] + after for (before, _), (after, _) in zip(ends, rest, strict=True)
    ]
    stream = [
        label
        for step in zip(*labels_of_ranks, strict=True)
        for rank_labels in step
        for label in rank_labels
    ]
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
def test_open_source_with_an_unusable_url_or_cache_raises_one_line(url, options, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        datasets.open_source(
            **{"name": "webdataset", "data_dir": url, "cache_dir": str(tmp_path), **options}
        )
    assert "\n" not in str(error.value)


def test_open_source_at_a_url_without_its_files_raises_their_names(tmp_path, serve):
    directory = test_webdataset.write(tmp_path / "set")
    support.write_info(directory)
    (directory / "tiny-train-0003.tar").unlink()
    server = serve(directory)
    for name in ("webdataset", "parquet"):
        with pytest.raises(UserError, match=r"/nothing does not exist, or cannot be read"):
            datasets.open_source(name, f"{server.url}/nothing", cache_dir=str(tmp_path / "copies"))
    with pytest.raises(
        UserError, match=r"tiny-train-0003.tar does not exist, or cannot be accessed"
    ):
        datasets.open_source("webdataset", server.url, cache_dir=str(tmp_path / "copies"))
    (directory / "_info.json").unlink()
    for path in directory.glob("*validation*"):
        path.unlink()
    with pytest.raises(UserError, match="holds no validation tar files"):
        datasets.open_source(
            "webdataset", server.url, "validation", cache_dir=str(tmp_path / "copies")
        )


def test_file_that_disappears_from_the_url_is_an_error_or_a_bad_record(tmp_path, serve):
    directory = write_numbered(tmp_path / "set")
    source = datasets.open_source(
        "webdataset", serve(directory).url, cache_dir=str(tmp_path / "copies")
    )
    (directory / "train-0001.tar").unlink()
    assert source.read_one(5)[1] == 5
    with pytest.raises(UserError, match=r"train-0001.tar cannot be read"):
        source.read_one(6)
    # The index of this file is known, and its copy has been removed.
    (directory / "train-0000.tar").unlink()
    next((tmp_path / "copies").rglob("*train-0000.tar")).unlink()
    with pytest.raises(BadRecord, match=r"train-0000.tar"):
        source.read_one(4)


def test_copy_from_a_server_without_ranges_requests_a_file_once(tmp_path, serve, monkeypatch):
    server = serve(write_numbered(tmp_path / "set"), ranges=False)
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 3000)
    directory = open_directory(server, tmp_path / "copies")
    assert (
        directory.local_path("train-0000.tar").read_bytes()
        == (tmp_path / "set" / "train-0000.tar").read_bytes()
    )
    assert [path for method, path, _ in server.requests() if method == "GET"] == ["/train-0000.tar"]


def read(server, copies):
    """Returns the bytes of a file as a new start reads them."""
    return open_directory(server, copies).local_path("train-0000.tar").read_bytes()


def test_copy_that_was_interrupted_is_completed_at_the_next_start(tmp_path, serve, monkeypatch):
    server = serve(write_numbered(tmp_path / "set"))
    copies = tmp_path / "copies"
    whole = (tmp_path / "set" / "train-0000.tar").read_bytes()
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 3000)
    for cut in range(1, len(whole) // 3000):
        directory = open_directory(server, copies)

        def interrupt(path, start, end, cat=directory._file_system.cat_file, cut=cut):
            if start >= 3000 * cut:
                raise KeyboardInterrupt
            return cat(path, start=start, end=end)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(directory._file_system, "cat_file", interrupt)
            directory.local_path("train-0000.tar")
        assert read(server, copies) == whole
        next(copies.rglob("*train-0000.tar")).unlink()


def test_copy_on_a_file_system_without_locks_is_complete_and_leaves_no_parts(
    tmp_path, serve, monkeypatch
):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    server = serve(write_numbered(tmp_path / "set"))
    copies = tmp_path / "copies"
    whole = (tmp_path / "set" / "train-0000.tar").read_bytes()
    monkeypatch.setattr(fcntl, "flock", flock)
    assert read(server, copies) == whole
    assert not list(copies.rglob("*.part"))
    next(copies.rglob("*train-0000.tar")).unlink()

    directory = open_directory(server, copies)
    monkeypatch.setattr(directory, "_check_unchanged", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        directory.local_path("train-0000.tar")
    assert not list(copies.rglob("*.part"))


def test_copy_is_synced_before_it_is_renamed(tmp_path, serve, monkeypatch):
    server = serve(write_numbered(tmp_path / "set"))
    order = []
    sync = os.fsync
    replace = pathlib.Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("sync") or sync(descriptor))
    monkeypatch.setattr(
        pathlib.Path, "replace", lambda *paths: order.append("replace") or replace(*paths)
    )
    read(server, tmp_path / "copies")
    assert order == ["sync", "replace"]


def test_file_at_a_url_that_changed_with_the_same_size_is_copied_and_indexed_again(
    tmp_path, serve, monkeypatch
):
    path = tmp_path / "set" / "train-0000.tar"
    copies = tmp_path / "copies"
    path.parent.mkdir()
    server = serve(path.parent)
    (tmp_path / "set" / "labels.txt").write_text("0\n1\n2")
    for number, names in enumerate((["0", "1"], ["1", "0"], ["00", "11"])):
        files = [
            (f"{name}.{suffix}", name[:1].encode()) for name in names for suffix in ("jpg", "cls")
        ]
        test_webdataset.tar(path, files)
        os.utime(path, (0, 1000 * number))
        source = datasets.open_source("webdataset", server.url, cache_dir=str(copies))
        expected = [(name[:1].encode(), int(name[0])) for name in names]
        assert [source.read_one(index) for index in range(2)] == expected
    assert len({copy.stat().st_size for copy in copies.rglob("*.tar")}) == 1


def test_copy_of_a_file_that_changes_meanwhile_raises(tmp_path, serve):
    server = serve(write_numbered(tmp_path / "set"))
    directory = open_directory(server, tmp_path / "copies")
    directory.look_up_sizes(["train-0000.tar"])
    os.utime(tmp_path / "set" / "train-0000.tar", (0, 0))
    with pytest.raises(
        UserError, match=r"train-0000.tar has changed at the URL since this start, .*1970"
    ):
        directory.local_path("train-0000.tar")
    assert not list((tmp_path / "copies").rglob("*.tar"))


def test_index_of_a_copy_is_not_used_after_the_copy_was_removed(tmp_path, serve):
    server = serve(write_numbered(tmp_path / "set"))
    copies = tmp_path / "copies"
    first = datasets.open_source("webdataset", server.url, cache_dir=str(copies))
    assert first.read_one(0)[1] == 0
    copy = next(copies.rglob("*train-0000.tar"))
    other = tmp_path / "set" / "train-0001.tar"
    # This is the index of another file, as for a copy that was wrong.
    write_index(copy.with_name(f"{copy.name}.index.npz"), webdataset.scan_tar(other))
    copy.unlink()
    second = datasets.open_source("webdataset", server.url, cache_dir=str(copies))
    assert [second.read_one(index)[1] for index in range(6)] == list(range(6))


def test_url_that_fails_before_training_ends_all_ranks_with_exit_code_4(pools, tmp_path):
    flags = ["--dataset=parquet", f"--data_cache_dir={tmp_path}", "--storage_timeout=0.1"]
    result = program.train_on(pools[2], "http://127.0.0.1:9/set", tmp_path / "run", *flags)
    assert result.returncode == EXIT_STALLED
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "has failed for --storage_timeout=0.1 seconds" in line


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../b.tar"])
def test_list_of_files_outside_the_directory_raises_and_copies_nothing(name, tmp_path, serve):
    directory = test_webdataset.write(tmp_path / "set")
    support.write_info(directory, filenames=[name], shard_lengths=[3])
    server = serve(directory)
    with pytest.raises(UserError, match="is outside of the directory"):
        datasets.open_source(
            "webdataset", server.url, cache_dir=str(tmp_path / "copies"), num_classes=3
        )
    assert not [path for path in (tmp_path / "copies").rglob("*") if path.is_file()]


def test_bad_records_and_manifest_contain_no_passwords(tmp_path, serve, caplog):
    directory = tmp_path / "set"
    directory.mkdir()
    good = [("0.jpg", support.jpeg(0)), ("0.cls", b"1")]
    for split in ("train", "validation"):
        test_webdataset.tar(
            directory / f"{split}-0.tar", [*good, ("1.jpg", b"none"), ("1.cls", b"0")]
        )
    url = serve(directory).url.replace("//", "//ann:hunter2@")
    copies = str(tmp_path / "copies")
    settings = prepare.PrepareSettings(skip_bad_records=True)
    prepare.prepare_dataset(
        datasets.DatasetRequest("webdataset", url, cache_dir=copies), tmp_path / "shards", settings
    )
    manifest = (tmp_path / "shards" / "manifest.json").read_text()
    location, _ = datasets.open_source("webdataset", url, cache_dir=copies).locate(1)
    for text in (manifest, caplog.text, location):
        assert "http://***@127.0.0.1" in text
        assert "hunter2" not in text

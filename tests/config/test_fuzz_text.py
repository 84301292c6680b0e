"""Tests that malformed flags, flag files and manifests are accepted or rejected, without a crash.

An error must be one line.
"""

import json
import pathlib
import random
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_imagenet import config
from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.source import BadRecord
from hybrid_imagenet.errors import UserError
from tests.data.support import CLASSES, jpeg, write_shards

COMMON = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
DIFFICULT_VALUES = (
    *(
        "",
        " ",
        "\n",
        "\x00",
        "=",
        "--",
        "-",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "-1",
        "0",
        "0x10",
        "1_000",
        "9" * 400,
    ),
    *(
        "٣",
        "½",
        "½,1",
        ",",
        ",,1,,",
        "true",
        "None",
        "null",
        "[]",
        "{}",
        "'",
        '"',
        "$(id)",
        "`id`",
        "; rm -rf x",
        "%s",
    ),
    *(
        "\ud800",
        "💥" * 50,
        "../../..",
        "/dev/null",
        "1x1x1",
        "0x0",
        "-1x-1",
        "2:",
        ":2",
        "1:2:3",
        "a" * 5000,
    ),
)
values = st.one_of(
    st.sampled_from(DIFFICULT_VALUES),
    st.text(max_size=30),
    st.floats().map(str),
    st.integers().map(str),
)
names = st.one_of(
    st.sampled_from(sorted(config.OPTIONS)), st.text(string.ascii_lowercase + "_-=", max_size=12)
)


def attempt(action) -> None:
    """Calls `action`; fails if it raises an error that is not one printable line."""
    try:
        action()
    except (UserError, BadRecord) as error:
        assert str(error).strip()
        assert "\n" not in str(error)
        str(error).encode(errors="backslashreplace")


@settings(COMMON, max_examples=300)
@given(st.lists(st.tuples(names, values), min_size=1, max_size=3))
def test_resolve_of_random_flags_returns_or_raises_one_line(pairs):
    arguments = [f"--{name}={value}" for name, value in pairs]
    attempt(lambda: config.resolve(arguments))


@pytest.mark.parametrize("name", sorted(config.OPTIONS))
def test_resolve_of_a_flag_with_difficult_values_returns_or_raises_one_line(name):
    for value in DIFFICULT_VALUES:
        attempt(lambda value=value: config.resolve([f"--{name}={value}"]))


@settings(COMMON, max_examples=150)
@given(st.one_of(st.binary(max_size=200), st.lists(st.tuples(names, values), max_size=5)))
def test_flagfile_with_random_content_returns_or_raises_one_line(tmp_path, content):
    path = tmp_path / "file.flags"
    if isinstance(content, list):
        content = "\n".join(f"--{name}={value}" for name, value in content).encode(
            errors="surrogatepass"
        )
    path.write_bytes(content)
    attempt(lambda: config.resolve([f"--flagfile={path}"]))


def test_flagfile_that_includes_itself_raises_one_line(tmp_path):
    path = tmp_path / "loop.flags"
    path.write_text(f"--flagfile={path}\n--epochs=3\n")
    attempt(lambda: config.resolve([f"--flagfile={path}"]))
    attempt(lambda: config.resolve([f"--flagfile={tmp_path}"]))


def good_manifest(directory: pathlib.Path) -> dict:
    write_shards(
        directory, "train", [(jpeg(number), number % 3) for number in range(4)], plain=True
    )
    entries = [
        {"file": path.name, "bytes": path.stat().st_size, "crc32c": "00000000", "num_examples": 2}
        for path in tfrecord.find_shards(directory, "train")
    ]
    split = {"num_examples": 4, "shards": entries}
    return {"class_names": list(CLASSES), "splits": {"train": split}}


def altered(value, generator: random.Random):
    """Returns the value with one item removed, or replaced by something of another kind."""
    replacements = [None, -1, 10**30, 1.5, True, "", "x", [], {}, [[]], {"a": None}]
    if isinstance(value, dict) and value and generator.random() < 0.8:
        key = generator.choice(sorted(value))
        if generator.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: altered(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.8:
        position = generator.randrange(len(value))
        if generator.random() < 0.2:
            return value[:position] + value[position + 1 :]
        return [*value[:position], altered(value[position], generator), *value[position + 1 :]]
    return generator.choice(replacements)


def test_manifest_with_random_changes_is_read_or_raises_one_line(tmp_path):
    manifest = good_manifest(tmp_path)
    path = tmp_path / tfrecord.MANIFEST
    good = json.dumps(manifest).encode()
    path.write_bytes(good)
    assert datasets.open_source("tfrecord", str(tmp_path)).num_examples == 4
    generator = random.Random(7)
    for number in range(200):
        if number % 4:
            content = json.dumps(altered(manifest, generator)).encode()
        else:
            position = generator.randrange(len(good))
            content = (
                good[:position]
                + bytes([generator.randrange(256)])
                + good[position + generator.randrange(1, 9) :]
            )
        path.write_bytes(content)
        attempt(lambda: datasets.open_source("tfrecord", str(tmp_path)).read([0, 3]))

"""Tests that docs/logs.md documents the keys and tags of the code."""

import pathlib
import re

from hybrid_imagenet.runlog import summary
from hybrid_imagenet.runlog.jsonl import KEYS
from hybrid_imagenet.runlog.tensorboard import TAGS

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "logs.md").read_text()


def test_every_key_and_tag_is_documented():
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", TEXT.split("## summary.json")[0], re.M))
    assert rows == dict(KEYS)
    tags = dict(
        re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", TEXT.split("## TensorBoard")[1], re.M)
    )
    assert tags == dict(TAGS)


def test_every_key_of_the_summary_is_documented():
    part = TEXT.split("## summary.json")[1].split("## TensorBoard")[0]
    result = summary.summarize([], world_size=1, images_per_epoch=1)
    assert set(result) <= set(re.findall(r"`([a-z_0-9]+)`", part))

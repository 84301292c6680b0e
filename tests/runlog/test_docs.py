"""Tests that docs/records.md documents the keys and tags, and docs/first-run.md the table."""

import pathlib
import re

from hybrid_imagenet.runlog import summary
from hybrid_imagenet.runlog.jsonl import KEYS
from hybrid_imagenet.runlog.progress import EpochTable, RunStatus
from hybrid_imagenet.runlog.tensorboard import TAGS

DOCS = pathlib.Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "records.md").read_text()


def test_records_page_documents_every_key_and_tag():
    part = TEXT.split("## metrics.jsonl")[1].split("## summary.json")[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", part, re.M))
    assert rows == dict(KEYS)
    tags = dict(
        re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", TEXT.split("## TensorBoard")[1], re.M)
    )
    assert tags == dict(TAGS)


def test_records_page_documents_every_key_of_the_summary():
    part = TEXT.split("## summary.json")[1].split("## TensorBoard")[0]
    result = summary.summarize([], world_size=1, images_per_epoch=1)
    assert set(result) <= set(re.findall(r"`([a-z_0-9]+)`", part))


def test_first_run_page_shows_the_columns_of_the_program():
    header = EpochTable(RunStatus({"num_classes": 10}, total_epochs=10)).header()
    assert header in (DOCS / "first-run.md").read_text()

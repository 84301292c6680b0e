import json
from contextlib import closing

import numpy as np
import pytest

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import jsonl


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_read_records_returns_what_was_written_at_once(path):
    writer = jsonl.MetricsWriter(path)
    writer.write({"kind": "step", "epoch": 1, "step": np.int64(20), "train_loss": np.float32(0.5)})
    assert jsonl.read_records(path) == [{"kind": "step", "epoch": 1, "step": 20, "train_loss": 0.5}]
    writer.write({"kind": "epoch", "epoch": 1, "step": 25, "val_top1": 0.25})
    assert [r["kind"] for r in jsonl.read_records(path)] == ["step", "epoch"]
    writer.close()


def test_writer_writes_numbers_that_are_not_finite_as_null(path):
    with closing(jsonl.MetricsWriter(path)) as writer:
        writer.write(
            {
                "kind": "step",
                "step": 1,
                "train_loss": float("nan"),
                "upper_bound": np.float32(np.inf),
            }
        )
        writer.write(
            {
                "kind": "step",
                "step": 2,
                "trust_ratios": {"conv1": np.float64("-inf"), "fc": 0.5},
                "x": (1, 2),
            }
        )
    first, second = (
        json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()
    )
    assert first == {"kind": "step", "step": 1, "train_loss": None, "upper_bound": None}
    assert second == {
        "kind": "step",
        "step": 2,
        "trust_ratios": {"conv1": None, "fc": 0.5},
        "x": [1, 2],
    }


@pytest.mark.parametrize("incomplete", ['{"kind": "step", "step": 2', "{"])
def test_incomplete_last_line_is_skipped_and_removed(path, incomplete):
    path.write_text('{"kind": "step", "step": 1}\n' + incomplete)
    assert jsonl.read_records(path) == [{"kind": "step", "step": 1}]
    with closing(jsonl.MetricsWriter(path)) as writer:
        writer.write({"kind": "step", "step": 2})
    assert path.read_text() == '{"kind": "step", "step": 1}\n{"kind": "step", "step": 2}\n'


def test_writer_keeps_a_last_line_that_only_lacks_its_newline(path):
    path.write_text('{"kind": "step", "step": 1}')
    with closing(jsonl.MetricsWriter(path)) as writer:
        writer.write({"kind": "step", "step": 2})
    assert [r["step"] for r in jsonl.read_records(path)] == [1, 2]


def test_read_records_of_a_broken_line_in_the_middle_names_the_line(path):
    path.write_text('{"kind": "step"}\nnot json\n{"kind": "step"}\n')
    with pytest.raises(UserError, match="line 2"):
        jsonl.read_records(path)
    path.write_text("[1]\n{}\n")
    with pytest.raises(UserError, match="line 1"):
        jsonl.read_records(path)


def test_writer_that_resumes_removes_only_records_of_steps_that_are_repeated(tmp_path, path):
    with closing(jsonl.MetricsWriter(path)) as writer:
        for step in (10, 20, 30):
            writer.write({"kind": "step", "step": step})
        writer.write({"kind": "epoch", "step": 30, "epoch": 1})
    with closing(jsonl.MetricsWriter(path, resume_from=(20, 0))) as writer:
        writer.write({"kind": "step", "step": 30, "second": True})
    assert jsonl.read_records(path) == [
        {"kind": "step", "step": 10},
        {"kind": "step", "step": 20},
        {"kind": "step", "step": 30, "second": True},
    ]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("finished", "kept"), [(0, ["step"]), (1, ["step", "epoch"])])
def test_writer_that_resumes_between_the_last_step_and_the_record_of_an_epoch(path, finished, kept):
    with closing(jsonl.MetricsWriter(path)) as writer:
        writer.write({"kind": "step", "step": 30, "epoch": 1})
        writer.write({"kind": "epoch", "step": 30, "epoch": 1})
    jsonl.MetricsWriter(path, resume_from=(30, finished)).close()
    assert [record["kind"] for record in jsonl.read_records(path)] == kept


def test_file_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        jsonl.read_records(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot be written"):
        jsonl.MetricsWriter(tmp_path / "no" / "folder")


def test_write_to_a_full_disk_raises_user_error():
    writer = jsonl.MetricsWriter("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        writer.write({"kind": "step", "step": 1})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"kind": "step", "step": "abc"}', 'step is "abc", not a whole number'),
        ('{"kind": "step", "step": 1e400}', "step is Infinity, not a whole number"),
        # No float can represent these integers.
        (f'{{"kind": "epoch", "epoch": {10**400}}}', "epoch is 1000*, not a number from 0"),
        (
            f'{{"kind": "epoch", "epoch": 1, "val_top1": -{10**400}}}',
            "val_top1 is -1000*, not a number",
        ),
        (
            f'{{"kind": "epoch", "epoch": 1, "trust_ratios": {{"conv1": {10**400}}}}}',
            "trust_ratios .* not numbers by layer",
        ),
        ('{"kind": "epoch", "epoch": [1]}', r"epoch is \[1\], not a number from 0"),
        ('{"kind": "epoch", "step": 1}', "the record of an epoch without its number"),
        ('{"kind": "epoch", "epoch": 1, "val_top1": "good"}', 'val_top1 is "good", not a number'),
        ('{"kind": "epoch", "epoch": 1, "seconds": NaN}', "seconds is NaN, not a number"),
        (
            '{"kind": "epoch", "epoch": 1, "trust_ratios": {"conv1": "x"}}',
            "trust_ratios .* not numbers by layer",
        ),
        ('{"kind": 5}', "kind is 5, not a text"),
    ],
)
def test_read_records_of_a_value_of_a_wrong_type_names_it(path, line, error):
    path.write_text(f'{{"kind": "step", "step": 1}}\n{line}\n')
    with pytest.raises(UserError, match=f"{path}, line 2: {error}.*. Correct or remove the line"):
        jsonl.read_records(path)
    assert line in path.read_text()


def test_read_records_of_a_foreign_last_line_skips_it_with_a_warning(path, capsys):
    path.write_text('{"kind": "step", "step": 1}\nsomething else\n')
    assert jsonl.read_records(path) == [{"kind": "step", "step": 1}]
    assert capsys.readouterr().err == f"warning: {path}, line 2: not a JSON object; skipped\n"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("something else", "not a JSON object"),
        ('{"kind": "step", "step": "abc"}', 'step is "abc", not a whole number'),
    ],
)
@pytest.mark.parametrize("resume_from", [(1, 0), None])
def test_writer_moves_foreign_lines_aside_and_continues_after_them(
    path, capsys, line, error, resume_from
):
    first, last = '{"kind": "step", "step": 1}\n', '{"kind": "step", "step": 2}\n'
    path.write_text(f"{first}{line}\n")
    with closing(jsonl.MetricsWriter(path, resume_from=resume_from)) as writer:
        writer.write(json.loads(last))
    assert path.read_text() == first + last
    removed = path.with_name("metrics.jsonl.removed")
    assert removed.read_text() == f"{line}\n"
    assert (
        capsys.readouterr().err
        == f"warning: {path}, line 2: {error}; moved to metrics.jsonl.removed\n"
    )


def test_writer_names_a_few_of_many_foreign_lines(path, capsys):
    path.write_text("x\n" * 5)
    jsonl.MetricsWriter(path).close()
    *named, last = capsys.readouterr().err.splitlines()
    assert len(named) == 3
    assert last == f"warning: {path}: 2 more such lines moved"

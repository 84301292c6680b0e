"""Tests `evaluate`: any number of ranks must reproduce the results that training recorded."""

import json
import shutil
from unittest import mock

import pytest

from hybrid_imagenet.commands import evaluate
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import hardware
from tests.support import program


@pytest.fixture(scope="module")
def run(tiny_data, tmp_path_factory):
    """Trains one epoch on one rank; returns the run directory."""
    run_dir = tmp_path_factory.mktemp("evaluate") / "run"
    result = program.train_here(tiny_data, run_dir, "--epochs=1", "--warmup_epochs=0")
    assert result.returncode == 0, result.stderr
    return run_dir


@pytest.fixture
def flags(tiny_data):
    return "--dataset=tfrecord", f"--data_dir={tiny_data}", "--precision=float32", "--json"


def recorded_results(run):
    record = next(r for r in program.records(run) if r["kind"] == "epoch")
    return {name: record[f"val_{name}"] for name in ("loss", "top1", "top5", "count")}


def assert_same(result, expected):
    """Asserts that counts are equal and losses close, because their sums have another order."""
    assert result["count"] == expected["count"] == program.VALIDATION
    assert round(result["top1"] * result["count"]) == round(expected["top1"] * result["count"])
    assert round(result["top5"] * result["count"]) == round(expected["top5"] * result["count"])
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_evaluate_on_one_rank_gives_the_recorded_results(run, flags, capsys):
    latest = max((run / "checkpoints").glob("step-*.npz"))
    for batch in ("8", "5"):
        assert evaluate.main([str(latest), *flags, f"--per_gpu_batch={batch}"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["checkpoint"] == str(latest)
        assert_same(result, recorded_results(run))


def test_evaluate_without_a_dataset_uses_the_dataset_of_the_run(run, capsys):
    assert evaluate.main([str(run), "--precision=float32", "--json"]) == 0
    output, error = capsys.readouterr()
    assert_same(json.loads(output), recorded_results(run))
    assert error.startswith("evaluating on --dataset=tfrecord of the run\n")


@pytest.mark.parametrize(
    ("flags", "split", "text"),
    [
        ({"tuning_split": 0.0, "eval_split": "tuning"}, "validation", ""),
        ({"tuning_split": 200.0, "eval_split": "validation"}, "validation", ""),
        (
            {"tuning_split": 200.0, "eval_split": "tuning"},
            "validation",
            "validated on --tuning_split=200",
        ),
        ({"tuning_split": 0.1, "eval_split": "tuning"}, "train", "held out (--tuning_split=0.1)"),
    ],
)
def test_evaluate_of_a_run_with_held_out_images_names_what_it_counts(flags, split, text, capsys):
    evaluate._print_tuning_split(flags, split)
    error = capsys.readouterr().err
    assert text in error
    assert bool(error) == bool(text)


def test_evaluate_without_a_dataset_names_held_out_images(run, monkeypatch, capsys):
    flags = evaluate._dataset_flags_of_run(run) | {"tuning_split": 5.0, "eval_split": "tuning"}
    monkeypatch.setattr(evaluate, "_dataset_flags_of_run", lambda path: flags)
    evaluate._complete_dataset_flags(evaluate._parser().parse_args([str(run)]))
    assert "the run was validated on --tuning_split=5" in capsys.readouterr().err


def test_evaluate_completes_flags_from_the_run_unless_the_dataset_is_set(run, tmp_path):
    arguments = evaluate._parser().parse_args([str(run), "--data_dir=moved"])
    evaluate._complete_dataset_flags(arguments)
    assert (arguments.dataset, arguments.data_dir) == ("tfrecord", "moved")
    arguments = evaluate._parser().parse_args([str(run), "--dataset=digits"])
    evaluate._complete_dataset_flags(arguments)
    assert (arguments.dataset, arguments.data_dir, arguments.val_fraction) == ("digits", None, 0.0)
    latest = max((run / "checkpoints").glob("step-*.npz"))
    copy = shutil.copy(latest, tmp_path)
    with pytest.raises(UserError, match=r"is not in the directory of a run.*Set --dataset\."):
        evaluate._complete_dataset_flags(evaluate._parser().parse_args([copy]))


def test_evaluate_with_auto_precision_of_a_float32_run_uses_float32(
    run, flags, capsys, monkeypatch
):
    monkeypatch.setattr(hardware, "cpu_features", lambda: {"amx_bf16"})
    automatic = [word for word in flags if "precision" not in word]
    assert evaluate.main([str(run), *automatic]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["precision"] == "float32"
    assert_same(result, recorded_results(run))


def mock_source(monkeypatch, *class_names):
    """Lets `evaluate` open a source with these classes, and returns it."""
    source = mock.Mock(num_classes=len(class_names), class_names=class_names, notes=())
    monkeypatch.setattr(
        evaluate,
        "DatasetRequest",
        mock.Mock(**{"from_flags.return_value.open.return_value": source}),
    )
    return source


def test_evaluate_compares_class_names_without_their_unicode_form(monkeypatch):
    network = mock.Mock(class_names=("caf\u00e9", "tea"), origin="run")
    source = mock_source(monkeypatch, "cafe\u0301", "tea")
    evaluate._open_source(mock.Mock(), network)
    assert source.notes == ()
    mock_source(monkeypatch, "tea", "cafe\u0301")
    with pytest.raises(UserError, match="has the classes of run in another order"):
        evaluate._open_source(mock.Mock(), network)


def test_evaluate_with_other_class_names_prints_a_note(monkeypatch):
    source = mock_source(monkeypatch, "tench")
    evaluate._open_source(mock.Mock(), mock.Mock(class_names=("n01",), origin="run"))
    text = "run has other class names (class 0 is 'n01' and 'tench'): labels are compared by number"
    assert [str(note) for note in source.notes] == [text]


def test_evaluate_that_skips_bad_records_counts_and_logs_them(run, tmp_path, capsys, caplog):
    data = program.make_data(tmp_path / "data")
    locations = program.damage(data)[2:]
    arguments = [str(run), "--dataset=tfrecord", f"--data_dir={data}", "--precision=float32"]
    assert evaluate.main(arguments) == 2
    assert f"{locations[0]}the checksum of the data does not match" in capsys.readouterr().err
    assert evaluate.main([*arguments, "--bad_records=skip", "--max_bad_records=1"]) == 2
    assert "more than --max_bad_records=1 bad records" in capsys.readouterr().err
    assert evaluate.main([*arguments, "--bad_records=skip", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["count"], result["dropped"]) == (program.VALIDATION - 2, 2)
    assert all(place in caplog.text for place in locations)
    assert evaluate.main([*arguments, "--bad_records=skip"]) == 0
    assert f": {program.VALIDATION - 2} images (2 dropped), top-1" in capsys.readouterr().out


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluate_on_several_ranks_gives_the_recorded_results(pools, run, flags, size):
    result = program.run_on(pools[size], evaluate.__name__, str(run), *flags, "--per_gpu_batch=2")
    assert result.returncode == 0, result.stderr
    assert_same(json.loads(result.stdout), recorded_results(run))


def test_evaluate_with_an_error_on_all_ranks_prints_one_line(pools, run, flags):
    result = program.run_on(pools[2], evaluate.__name__, str(run / "none"), *flags)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "none does not exist" in errors[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset=digits"], "--dataset=digits has 10 classes, but"),
        (["--dataset=tfrecord"], "--dataset=tfrecord needs the dataset's directory"),
        (
            ["--dataset=digits", "--crop=2"],
            "--crop=2 is not valid. Use a number above 0 and at most 1",
        ),
    ],
)
def test_evaluate_with_invalid_arguments_prints_one_line(run, tmp_path, capsys, arguments, message):
    assert evaluate.main([str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error

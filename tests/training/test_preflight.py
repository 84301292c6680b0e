"""Preflight finds errors once, before TensorFlow is loaded, and also with --check_only."""

import json

import numpy as np
import pytest

from hybrid_imagenet import config, run_plan
from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.config import stored
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import preflight
from tests.checkpoints import support
from tests.support import fresh

DIGITS = ("--dataset=digits", "--augmentation=digits", "--model=resnet8", "--per_gpu_batch=500")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Changes to an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(preflight.CHECKED_VARIABLE, raising=False)
    return tmp_path


def make_run(path, **meta):
    """Writes a run with a checkpoint half-way through its sixth epoch."""
    (path / "checkpoints").mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps(
            {
                "format": stored.FORMAT,
                "flags": {
                    "epochs": 10,
                    "optimizer": "sgd",
                    "ema_decay": 0.0,
                    "init_from": None,
                    "freeze": [],
                },
                "origins": {},
            }
        )
    )
    meta_ = support.meta(
        20,
        model="resnet8",
        optimizer="sgd",
        num_classes=10,
        class_names=None,
        width=64,
        stem="imagenet",
        data={"training": {"images": 1500}},
    )
    meta_["state"]["cursor"] = {"epoch": 5, "offset": 750}
    described = {name: value for name, value in (meta_ | meta).items() if value is not None}
    archive.write(path / "checkpoints" / "step-000000020.npz", {"x": np.zeros(1)}, described)


def test_check_of_flags_unsupported_by_a_keras_network_is_rejected(here):
    (here / "resnet.safetensors").touch()
    make_run(here / "other", model="keras:VGG16", width=8)
    flags = ["--dataset=digits", "--augmentation=digits", "--model=keras:MobileNet"]
    for flag, message in {
        "--image_size=28": "--image_size=28: keras:MobileNet needs at least 32 pixels",
        "--init_from=resnet.safetensors": "hold ResNets of this program, not --model=keras:Mob",
        "--init_from=other": "was written with --model=keras:VGG16, not keras:MobileNet",
    }.items():
        with pytest.raises(UserError, match=message):
            preflight.check(config.resolve([*flags, flag], 1))
    same = [*flags, "--model=keras:VGG16", "--init_from=other"]
    assert "model: keras:VGG16" in preflight.check(config.resolve(same, 1)).check_lines


@pytest.mark.parametrize(
    ("flags", "ranks", "text"),
    [
        (["--per_gpu_batch=501"], 3, "on 3 GPUs make a batch of 1503"),
        (["--per_gpu_batch=1401", "--tuning_split=100"], 1, "1400 training images"),
    ],
)
def test_check_of_a_batch_larger_than_the_dataset_is_rejected(flags, ranks, text):
    with pytest.raises(UserError, match=text):
        preflight.check(config.resolve([*DIGITS, *flags], ranks))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--dataset=imagenet2012"], "--dataset=imagenet2012 was not found in"),
        (["--dataset=tfrecord", "--data_dir=."], "holds no train shards"),
        (["--num_classes=7"], "--num_classes=7 is wrong, because digits has 10 classes"),
        (
            ["--dataset=synthetic", "--num_classes=1"],
            "--dataset=synthetic has one class, but training needs at least two",
        ),
        (["--dataset=webdataset", "--data_dir=https://host/x"], "--data_cache_dir"),
        (
            ["--dataset=webdataset", "--data_dir=/x", "--data_cache_dir=/y"],
            "--data_cache_dir=/y is for copies",
        ),
        (["--model=no_such_module:net"], "--model=no_such_module:net: there is no such module"),
        (["--run_dir=taken"], "--run_dir=taken contains a run. Add --resume"),
        (["--num_examples=9"], "--num_examples=9 is for synthetic datasets, not digits"),
        (["--run_dir=other"], r"--run_dir=other contains other files \(x\)"),
        (
            ["--run_dir=taken", "--resume", "--model=resnet18"],
            "--model=resnet18: .*was written with --model=resnet8",
        ),
        (
            ["--run_dir=taken", "--resume", "--blurpool", "--optimizer=sgd"],
            "--blurpool=true: .*--blurpool=false",
        ),
        (
            ["--run_dir=taken", "--resume", "--optimizer=sgd", "--ema_decay=.9"],
            "the run has no averaged weights. Resume with --ema_decay=0",
        ),
        (["--init_from=/nope"], "--init_from=/nope does not exist"),
        (
            ["--init_from=taken", "--model_width=32"],
            "--init_from=taken: .*--model_width=64, not 32",
        ),
    ],
)
def test_check_of_missing_or_conflicting_files_is_rejected(here, flags, text):
    make_run(here / "taken", blurpool=False)
    (here / "file").write_text("hello")
    (here / "other").mkdir()
    (here / "other" / "x").touch()
    with pytest.raises(UserError, match=text):
        preflight.check(config.resolve([*DIGITS, *flags]))


def test_check_of_a_resume_with_other_classes_is_rejected(here):
    make_run(here / "run", num_classes=7)
    with pytest.raises(UserError, match=r"has 10 classes, but .* has 7"):
        preflight.check(config.resolve([*DIGITS, "--optimizer=sgd", "--run_dir=run", "--resume"]))
    # With --init_from the last layer is new, so other classes are accepted.
    preflight.check(config.resolve([*DIGITS, "--init_from=run"]))


def test_check_of_a_resume_with_another_validation_split_is_rejected(here):
    make_run(here / "run", val_split="tuning")
    words = [*DIGITS, "--optimizer=sgd", "--run_dir=run", "--resume"]
    with pytest.raises(
        UserError, match="was validated on the tuning images, not on the validation images"
    ):
        preflight.check(config.resolve(words))
    preflight.check(config.resolve([*words, "--tuning_split=500"]))


def test_check_of_a_warmup_without_effect_warns_once(here):
    words = [*DIGITS, "--optimizer=sgd", "--epochs=9", "--warmup_epochs=5"]
    (line,) = preflight.check(config.resolve(words)).warnings
    assert "--warmup_epochs=5: the learning rate is 0.1 from the start" in line
    assert not preflight.check(config.resolve([*words, "--warmup_start_lr=0"])).warnings


def test_check_of_schedules_after_the_last_epoch_warns_for_each(here):
    words = [
        "--optimizer=sgd",
        "--lr_schedule=step",
        "--lr_steps=3,6",
        "--image_size_schedule=0:8,6:16",
    ]
    lines = preflight.check(config.resolve([*DIGITS, *words, "--epochs=6"])).warnings
    assert [line.partition(" is ")[0] for line in lines] == [
        "--warmup_epochs (default): its epoch 10",
        "--lr_steps: its epoch 6",
        "--image_size_schedule: its epoch 6",
    ]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--recipe=gradual_warmup", "--epochs=20"], ["--lr_steps (default): its epoch 80"]),
        (
            ["--recipe=gradual_warmup", "--epochs=3"],
            ["--warmup_epochs (recipe): its epoch 5", "--lr_steps (default): its epoch 80"],
        ),
        (["--recipe=short", "--epochs=16"], ["--image_size_schedule (recipe): its epoch 23"]),
        (["--batch_schedule=0:8,100:16", "--epochs=20"], ["--batch_schedule: its epoch 100"]),
        (["--recipe=gradual_warmup"], []),
        (["--warmup_epochs=3", "--epochs=20"], []),
    ],
)
def test_check_of_a_run_that_is_shorter_than_its_schedules_warns(here, words, lines):
    found = preflight.check(config.resolve([*DIGITS, "--per_gpu_batch=8", *words])).warnings
    assert [line.partition(" is not reached")[0] for line in found if "reached" in line] == lines


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--init_from=weights", "--init_from=weights: the run continues with the weights of"),
        ("--freeze=stem", "--freeze=stem: the run was started without --freeze. Resume it so"),
    ],
)
def test_check_of_a_resume_with_a_flag_that_only_a_start_can_have_is_rejected(here, flag, text):
    make_run(here / "run")
    make_run(here / "weights")
    words = [*DIGITS, "--optimizer=sgd", "--run_dir=run", "--resume"]
    preflight.check(config.resolve(words))
    with pytest.raises(UserError, match=text):
        preflight.check(config.resolve([*words, flag]))


def test_check_of_a_resume_with_the_same_weights_by_another_path_is_accepted(here):
    make_run(here / "weights")
    make_run(here / "run")
    begun = config.resolve([*DIGITS, "--init_from=weights"]).stored()["flags"]["init_from"]
    assert begun == str(here / "weights")
    content = json.loads((here / "run" / "config.json").read_text())
    content["flags"]["init_from"] = begun
    (here / "run" / "config.json").write_text(json.dumps(content))
    words = [*DIGITS, "--optimizer=sgd", "--run_dir=run", "--resume"]
    preflight.check(config.resolve([*words, "--init_from=./weights"]))
    with pytest.raises(UserError, match="continues with the weights"):
        preflight.check(config.resolve([*words, "--init_from=."]))


def test_check_of_a_resume_names_the_checkpoint(here):
    make_run(here / "run")
    findings = preflight.check(
        config.resolve([*DIGITS, "--optimizer=sgd", "--epochs=12", "--run_dir=run", "--resume"])
    )
    assert "step-000000020.npz" in findings.check_lines[-1]
    assert not findings.warnings


def test_check_of_a_resume_without_a_run_warns_once(here):
    findings = preflight.check(config.resolve([*DIGITS, "--run_dir=new", "--resume"]))
    assert (
        [line for line in findings.warnings if "starts from the beginning" in line]
        == findings.warnings
        != []
    )


def begin(path, *words, ranks=2):
    """Writes a run with a checkpoint in its sixth epoch, begun with these flags."""
    make_run(path)
    begun = config.resolve([*DIGITS, "--optimizer=sgd", *words], ranks)
    content = {"format": stored.FORMAT, "world_size": ranks, **begun.stored()}
    (path / "config.json").write_text(json.dumps(content))
    return run_plan.make(begun)


def resume(*words, ranks=2):
    return config.resolve([*DIGITS, *words, "--run_dir=run", "--resume"], ranks)


def test_check_of_a_resume_with_the_same_plan_has_no_note(here):
    begin(here / "run", "--lr_schedule=cosine", "--warmup_epochs=1")
    assert preflight.check(resume()).notes == []


def test_check_of_a_resume_with_other_epochs_notes_the_difference_of_the_plans(here):
    words = ["--lr_schedule=cosine", "--warmup_epochs=1"]
    before = begin(here / "run", *words, "--epochs=10")
    findings = preflight.check(resume("--epochs=20"))
    old = before.values_at(5.5)["learning_rate"]
    new = findings.plan.values_at(5.5)["learning_rate"]
    assert findings.notes == [
        "The plan differs from that of the run so far:",
        "  epochs: 10 -> 20",
        "  schedule.end_epoch: 10 -> 20",
        f"  learning rate at epoch 5.5: {old:.4g} -> {new:.4g}",
    ]


def test_check_of_a_resume_with_the_same_learning_rate_does_not_note_it(here):
    begin(here / "run", "--lr_schedule=constant", "--warmup_epochs=1", "--epochs=10")
    notes = preflight.check(resume("--epochs=20")).notes
    assert "  epochs: 10 -> 20" in notes
    assert not [note for note in notes if "learning rate at" in note]


def test_check_of_a_resume_on_more_ranks_notes_what_follows_from_their_number(here):
    begin(here / "run", "--lr_schedule=constant", "--warmup_epochs=1", "--per_gpu_batch=9")
    assert preflight.check(resume("--per_gpu_batch=9", ranks=4)).notes == [
        "The plan differs from that of the run so far:",
        "  workers: 2 -> 4",
        "  optimizer.options.learning_rate: 0.2 -> 0.4",
        "  learning rate at epoch 5.5: 0.2 -> 0.4",
    ]


def test_check_of_a_resume_whose_first_plan_cannot_be_made_says_so(here):
    begin(here / "run")
    path = here / "run" / "config.json"
    path.write_text(path.read_text().replace('"bad_records": "fail"', '"bad_records": "gone"'))
    (note,) = preflight.check(resume("--bad_records=skip")).notes
    assert note.startswith("The plan of the run so far is not known: --bad_records=gone is not")


def test_check_looks_at_the_disk_once_per_job(here, monkeypatch):
    wrong = config.resolve(["--dataset=digts"], 2)
    monkeypatch.setattr(preflight, "read_placement", lambda: Placement(1, 2, 1, 2))
    # Only rank 0 checks, and this is rank 1.
    preflight.check(wrong)
    monkeypatch.undo()
    monkeypatch.setenv(preflight.CHECKED_VARIABLE, "1")
    # The launcher has checked already.
    preflight.check(wrong)
    monkeypatch.undo()
    monkeypatch.setenv("HYBRID_IMAGENET_RANKS_ELSEWHERE", "1")
    assert "not checked" in preflight.check(wrong).check_lines[-1]


def test_check_only_prints_one_line_per_check(here, capsys):
    preflight.run(config.resolve([*DIGITS, "--check_only"], 2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "flags",
        "dataset",
        "model",
        "run directory",
    ]
    flags = [*DIGITS, "--model=tests.training.own_networks:small", "--freeze=first"]
    checked = preflight.check(config.resolve(flags, 2)).check_lines
    assert "not called yet" in checked[2] and checked[3].startswith("not checked: ")
    assert "10 classes" in lines[1]


def test_commands_reject_wrong_files_without_loading_tensorflow(here, monkeypatch):
    monkeypatch.delenv("HYBRID_IMAGENET_RANKS_ELSEWHERE", raising=False)
    make_run(here / "run")
    (here / "notes.txt").write_text("no image")
    run = str(here / "run")
    notes = str(here / "notes.txt")
    wrong = ["--dataset=digits", f"--run_dir={run}"]
    codes, loaded, errors = fresh.run(
        ("hybrid_imagenet.main", wrong),
        ("hybrid_imagenet.main", [*wrong, "--check_only"]),
        ("hybrid_imagenet.commands.run", ["-np", "2", "--", *wrong]),
        ("hybrid_imagenet.commands.predict", [run, notes]),
        ("hybrid_imagenet.commands.evaluate", [run, "--dataset=digts"]),
        ("hybrid_imagenet.commands.evaluate", [notes, "--dataset=digits"]),
        ("hybrid_imagenet.commands.export", [run, f"--to={here}/x.onx"]),
        ("hybrid_imagenet.commands.export", [notes, f"--to={here}/x.onnx"]),
    )
    assert codes == [2] * 8
    assert not loaded & fresh.FRAMEWORKS
    lines = errors.splitlines()
    assert len(lines) == 8
    for line, word in zip(
        lines,
        (
            "contains a run",
            "contains a run",
            "contains a run",
            "JPEG",
            "digits",
            "checkpoint",
            ".onnx",
            "checkpoint",
        ),
        strict=True,
    ):
        assert word in line

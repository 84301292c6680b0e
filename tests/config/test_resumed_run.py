"""Tests with which settings a run continues: the rule in `config.resumed_run`."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from hybrid_imagenet import config, recipes, run_plan
from hybrid_imagenet.config import Origin, defaults, resumed_run, stored
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import preflight

MLPERF = ("--recipe=mlperf_lars", "--per_gpu_batch=256", "--dataset=synthetic")
AT_A_URL = ("--dataset=webdataset", "--data_dir=https://host/set", "--data_cache_dir=/local")
IN_A_DIRECTORY = ("--dataset=webdataset", "--data_dir=/data")


def begin(folder, *words, ranks=2, **changes):
    """Writes the config.json of a run that starts with these flags; returns its configuration.

    Args:
      changes: Flags with other values than the flags on the command line have.
    """
    begun = config.resolve([*words, f"--run_dir={folder}"], ranks)
    write(folder, begun, **changes)
    return begun


def write(folder, begun, **changes):
    """Writes the config.json of a configuration."""
    content = {
        "format": stored.FORMAT,
        "flags": begun.as_masked_dict() | changes,
        "origins": {name: origin.value for name, origin in begun.origins.items()},
    }
    (folder / "config.json").write_text(json.dumps(content))


def resume(folder, *words, ranks=2):
    """Returns the configuration of a command that resumes the run."""
    return config.resolve([*words, f"--run_dir={folder}", "--resume"], ranks)


def settings(resolved):
    """Returns the settings of a run, without the flags of one start."""
    values = {
        name: value
        for name, value in resolved.as_dict().items()
        if name not in resumed_run.FLAGS_OF_ONE_START
    }
    # Without a URL, None and 0 both mix all images.
    return values | {"shuffle_window": values["shuffle_window"] or 0}


def stored_plan(folder):
    """Returns the plan of a run, made from its config.json alone."""
    return run_plan.make(config.from_stored(stored.read(folder), 2))


@pytest.mark.parametrize("recipe", recipes.names())
def test_resume_on_the_same_ranks_keeps_every_setting_of_the_run(recipe, tmp_path):
    begun = begin(tmp_path, f"--recipe={recipe}", "--seed=7")
    for _ in range(3):
        again = resume(tmp_path)
        assert settings(again) == settings(begun)
        assert again.kept_notes == ()
        assert run_plan.differences(stored_plan(tmp_path), run_plan.make(again)) == []
        write(tmp_path, again)


def test_plan_of_a_stored_run_is_for_its_ranks_and_derives_nothing(tmp_path):
    begun = begin(tmp_path, "--recipe=hybrid", "--virtual_gpus=2", lars_eta=0.5)
    content = stored.read(tmp_path)
    plan = run_plan.make(config.from_stored(content | {"world_size": 3}, 2))
    assert (plan.ranks, plan.workers) == (3, 6)
    assert plan.optimizer.options.trust_coefficient == 0.5
    assert plan.recording.settings["origins"] == run_plan.make(begun).recording.settings["origins"]


def test_plan_of_a_stored_run_with_a_value_that_is_not_possible_is_an_error(tmp_path):
    begin(tmp_path, bad_records="gone")
    with pytest.raises(UserError, match="--bad_records=gone is not valid"):
        stored_plan(tmp_path)


# For each case: flags of the first start, values that defaults and recipes had then, flags of the
# second start, and values of the resumed run.
RULE: dict[str, tuple[Sequence[str], dict[str, Any], Sequence[str], dict[str, Any]]] = {
    "asked before": (["--weight_decay=.5"], {}, [], {"weight_decay": 0.5}),
    "asked again": (["--lr=7"], {}, ["--lr=8"], {"lr": 8.0}),
    "flag of one start": (["--max_steps=3"], {}, [], {"max_steps": None}),
    "other epochs": ([], {}, ["--epochs=30"], {"epochs": 30}),
    "other epochs of MLPerf": (MLPERF, {}, ["--epochs=30"], {"epochs": 30, "warmup_epochs": 2.0}),
    "changed default": ([], {"momentum": 0.8}, [], {"momentum": 0.8}),
    "changed value of the recipe": (
        ["--recipe=flash_a"],
        {"label_smoothing": 0.3},
        ["--recipe=flash_a"],
        {"label_smoothing": 0.3},
    ),
    "other recipe": (
        ["--recipe=flash_a", "--seed=7", "--epochs=5"],
        {"eval_every_epochs": 7, "image_size": 192},
        ["--recipe=hal"],
        {
            # Set by the new recipe.
            "optimizer": "sgd",
            "augmentation": "inception",
            # Set by the old recipe only.
            "eval_every_epochs": 1,
            # Set by neither recipe, and by the user.
            "image_size": 192,
            "seed": 7,
        },
    ),
    "other schedule": (
        ["--optimizer=lars", "--lr_schedule=poly", "--lr_power=3"],
        {},
        ["--lr_schedule=cosine"],
        {"lr_schedule": "cosine", "optimizer": "lars"},
    ),
    "data were at a URL": (AT_A_URL, {}, IN_A_DIRECTORY, {"shuffle_window": 16}),
    "data are at a URL now": (IN_A_DIRECTORY, {}, AT_A_URL, {"shuffle_window": 0}),
    "data stay at a URL": (AT_A_URL, {}, [], {"shuffle_window": 16}),
    "augmentation of the data": (
        ["--dataset=digits"],
        {},
        ["--dataset=cifar10"],
        {"augmentation": "shift"},
    ),
    "augmentation that was asked for": (
        ["--dataset=digits", "--augmentation=none"],
        {},
        ["--dataset=cifar10"],
        {"augmentation": "none"},
    ),
}


@pytest.mark.parametrize("case", RULE)
def test_resume_follows_the_rule_of_each_value(case, tmp_path):
    first, former, second, expected = RULE[case]
    begin(tmp_path, *first, **former)
    values = resume(tmp_path, *second).as_dict()
    assert {name: values[name] for name in expected} == expected


def test_resume_of_hybrid_on_more_ranks_derives_the_trust_coefficient_again(tmp_path):
    begun = begin(tmp_path, "--recipe=hybrid", ranks=2)
    again = resume(tmp_path, ranks=3)
    assert (
        again.get("lars_eta")
        == config.resolve(["--recipe=hybrid"], 3).get("lars_eta")
        != begun.get("lars_eta")
    )
    assert settings(again) == settings(begun) | {"lars_eta": again.get("lars_eta")}


def test_resume_of_hybrid_on_more_ranks_keeps_a_trust_coefficient_that_was_set(tmp_path):
    begin(tmp_path, "--recipe=hybrid", "--lars_eta=0.02")
    assert resume(tmp_path, ranks=3).get("lars_eta") == 0.02


def test_resume_of_mlperf_lars_on_fewer_ranks_derives_only_the_learning_rate_again(tmp_path):
    begun = begin(tmp_path, *MLPERF, ranks=32)
    new = config.resolve(MLPERF, 24)
    assert (new.run.epochs, new.get("weight_decay")) != (
        begun.run.epochs,
        begun.get("weight_decay"),
    )
    # The relative step follows from the new batch, with the momentum of the run.
    rate = new.optimization.lr * (1 - begun.get("momentum")) / (1 - new.get("momentum"))
    # The second resume derives the same values as the first.
    for _ in range(2):
        again = resume(tmp_path, ranks=24)
        assert again.optimization.lr == pytest.approx(rate)
        derived = {"lr": again.optimization.lr, "bn_group": new.network.bn_group}
        assert settings(again) == settings(begun) | derived
        assert again.kept_notes == ()
        lines = run_plan.differences(run_plan.make(begun), run_plan.make(again))
        assert f"schedule.learning_rate: {begun.optimization.lr:.6g} -> {rate:.6g}" in lines
        write(tmp_path, again, lr=begun.optimization.lr, bn_group=begun.network.bn_group)


def test_resume_of_mlperf_lars_on_fewer_ranks_keeps_a_learning_rate_that_was_set(tmp_path):
    begin(tmp_path, *MLPERF, "--lr=3", "--momentum=.8", ranks=32)
    again = resume(tmp_path, ranks=24)
    assert (again.optimization.lr, again.get("momentum")) == (3.0, 0.8)


def test_resume_notes_a_default_that_has_changed_since(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(preflight.CHECKED_VARIABLE, raising=False)
    begin(tmp_path, "--recipe=flash_a", "--dataset=synthetic", eval_every_epochs=3)
    again = resume(tmp_path, "--check_only")
    preflight.run(again, disk=False)
    line = "warning: --eval_every_epochs=3 is kept from the run. A new run would have 4.\n"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("number", [None, stored.FORMAT - 1])
def test_resume_of_a_run_of_an_earlier_version_is_one_error(number, tmp_path):
    begun = begin(tmp_path)
    content = {"flags": begun.as_masked_dict() | {"decoder": "dali"}, "version": "0.1.0"}
    if number is not None:
        content["format"] = number
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"config\.json was saved by an earlier version of hybrid"):
        resume(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"warp_factor": 9},
            "config.json has the flag warp_factor=9, which does not exist. Remove it from the file"
            " to continue the run without it.",
        ),
        ({"bad_records": "gone"}, "config.json: --bad_records=gone is not valid. Choose one of"),
        (
            {"dataset": "webdataset", "data_dir": "https://***@host/set"},
            "--data_dir=https://***@host/set cannot be used again, because passwords are not",
        ),
    ],
)
def test_resume_with_a_value_that_cannot_be_used_is_an_error(changes, message, tmp_path):
    begin(tmp_path, **changes)
    with pytest.raises(UserError, match=re.escape(message)):
        resume(tmp_path)


def test_resume_with_a_new_value_ignores_the_one_that_cannot_be_used(tmp_path):
    begin(tmp_path, bad_records="gone")
    assert resume(tmp_path, "--bad_records=skip").data.bad_records == "skip"


@pytest.mark.parametrize("content", ["", "{}", '{"flags": {"seed": 7'])
def test_resume_with_an_empty_or_cut_config_json_is_an_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'config.json'}")):
        resume(tmp_path)


def test_resume_without_a_run_starts_one(tmp_path):
    again = resume(tmp_path)
    assert settings(again) == settings(config.resolve([], 2))
    assert Origin.RUN not in again.origins.values()


@pytest.fixture
def as_rank_1(monkeypatch):
    """Returns a function that makes this process look like rank 1."""

    def set_variables():
        for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)

    return set_variables


def test_shared_gives_a_rank_that_does_not_see_the_run_the_settings_of_rank_0(tmp_path, as_rank_1):
    begin(tmp_path, "--recipe=hal", "--seed=7", "--compression=fp16", momentum=0.8)
    first = resume(tmp_path, "--lr=3")
    (tmp_path / "config.json").unlink()
    as_rank_1()
    other = resume(tmp_path, "--lr=3")
    assert other.run.recipe == "hybrid"
    sent = []
    assert defaults.shared(first, lambda value: sent.append(json.dumps(value)) or value) == first
    same = defaults.shared(other, lambda value: json.loads(sent[0]))
    assert (same, same.origins) == (first, first.origins)


def test_shared_on_a_rank_with_other_settings_of_communication_is_an_error(tmp_path, as_rank_1):
    begin(tmp_path, "--compression=none")
    first = resume(tmp_path)
    (tmp_path / "config.json").unlink()
    as_rank_1()
    other = resume(tmp_path)
    sent = []
    defaults.shared(first, lambda value: sent.append(json.dumps(value)) or value)
    message = (
        "--compression is fp16 on this host, which does not see the directory of the run. Add"
        " --compression=none to the command."
    )
    with pytest.raises(UserError, match=re.escape(message)):
        defaults.shared(other, lambda value: json.loads(sent[0]))


def test_resume_on_a_rank_other_than_0_ignores_a_damaged_config_json(tmp_path, as_rank_1):
    (tmp_path / "config.json").write_text("{")
    as_rank_1()
    assert settings(resume(tmp_path)) == settings(config.resolve([], 2))

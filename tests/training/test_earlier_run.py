"""A resumed run keeps its method when defaults have changed since it began."""

import json
import re

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import Origin, defaults
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.training import preflight


def resumed(tmp_path, flags, origins, *arguments):
    """The configuration of `arguments --resume`, over a config.json with these flags."""
    (tmp_path / "config.json").write_text(json.dumps({"flags": flags, "origins": origins}))
    return config.resolve([f"--run_dir={tmp_path}", "--resume", *arguments], 24)


OLD = {
    "recipe": "hybrid",
    "optimizer": "hybrid",
    "lars_eta": 0.001,
    "hybrid_handover": "rescale",
    "momentum": 0.8,
    "lr": 7.0,
}


def test_options_that_nobody_sets_are_those_of_the_run(tmp_path):
    found = resumed(tmp_path, OLD, dict.fromkeys(OLD, "default"))
    assert (found.lars_eta, found.hybrid_handover, found.momentum) == (0.001, "rescale", 0.8)
    assert found.lr == 7.0
    assert found.origins["lars_eta"] is Origin.RUN  # and the batch does not change it


def test_what_is_given_again_wins(tmp_path):
    found = resumed(tmp_path, OLD, {}, "--lars_eta=0.02", "--momentum=0.9")
    assert (found.lars_eta, found.momentum, found.hybrid_handover) == (0.02, 0.9, "rescale")


def test_the_order_of_images_is_that_of_the_run(tmp_path):
    flags = {"optimizer": "sgd", "shuffle_window": 16}
    assert resumed(tmp_path, flags, {}).shuffle_window == 16
    assert resumed(tmp_path, flags, {}, "--shuffle_window=0").shuffle_window == 0
    assert resumed(tmp_path, {"optimizer": "hybrid"}, {}).shuffle_window is None
    assert resumed(tmp_path, {"optimizer": "sgd", "seed": 7}, {}).seed == 7
    assert resumed(tmp_path, {"optimizer": "sgd", "seed": 7}, {}, "--seed=0").seed == 0
    at_url = "--dataset=webdataset", "--data_dir=https://host/set", "--data_cache_dir=/local"
    kept = resumed(
        tmp_path, {"optimizer": "sgd", "shuffle_window": None}, {}, *at_url
    )  # it lay in a directory then
    assert kept.shuffle_window == 0
    for before, origin in ((None, "default"), (0, "the run's config.json")):
        flags = {"recipe": "hybrid", "shuffle_window": before}
        same = resumed(tmp_path, flags, {"shuffle_window": origin})
        assert (same.shuffle_window, same.dropped) == (0, {})


def test_a_recipe_that_has_changed_since_does_not_act(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(
        preflight.CHECKED_VARIABLE, raising=False
    )  # another test of this process has checked
    old = {
        "recipe": "flash_a",
        "eval_every_epochs": 1,
        "label_smoothing": 0.3,
        "weight_decay": 0.5,
        "epochs": 7,
    }
    origins = dict.fromkeys(old, "recipe") | {
        "recipe": "command line",
        "weight_decay": "command line",
    }
    given = ["--recipe=flash_a", "--epochs=8", "--dataset=synthetic", "--check_only"]
    found = resumed(tmp_path, old, origins, *given)
    new = config.resolve(["--recipe=flash_a"])
    assert (found.eval_every_epochs, found.label_smoothing, found.epochs) == (1, 0.3, 8)
    assert found.weight_decay == new.weight_decay  # it was a flag of that start only
    assert (
        found.dropped["label_smoothing"]
        == "the default has 0.0 in this version, but the run began with 0.3"
    )
    preflight.run(found, disk=False)
    assert "--eval_every_epochs: the recipe has" in capsys.readouterr().err
    assert (
        resumed(tmp_path, old, origins, "--recipe=flash_b").label_smoothing == new.label_smoothing
    )
    with pytest.raises(UserError, match="--lr_schedule=cosine, and the recipe is sony_a now: give"):
        resumed(
            tmp_path,
            old | {"lr_schedule": "cosine"},
            origins | {"lr_schedule": "recipe"},
            "--recipe=flash_a",
        )
    with pytest.raises(UserError, match="--decoder=gone: choose one of"):
        resumed(
            tmp_path,
            old | {"decoder": "gone"},
            origins | {"decoder": "default"},
            "--recipe=flash_a",
        )


def test_what_followed_from_the_batch_does_so_again(tmp_path):
    found = resumed(tmp_path, OLD, {"lars_eta": Origin.BATCH.value})
    assert (
        found.lars_eta
        == config.resolve(["--hybrid_handover=rescale", "--momentum=0.8"], 24).lars_eta
    )


def test_a_schedule_of_mlperfs_table_stays_that_of_the_run_on_fewer_ranks(tmp_path, capsys):
    given = ["--recipe=mlperf_lars", "--per_gpu_batch=256", "--dataset=synthetic"]
    begun, fewer = config.resolve(given, 32), config.resolve(given, 24)
    origins = {name: origin.value for name, origin in begun.origins.items()}
    assert (fewer.epochs, fewer.weight_decay, fewer.momentum) != (
        begun.epochs,
        begun.weight_decay,
        begun.momentum,
    )
    for _ in range(2):  # what a resume has taken over, the next one does too
        found = resumed(tmp_path, begun.shown(), origins, *given)
        for name in ("epochs", "warmup_epochs", "momentum", "weight_decay", "eval_offset_epochs"):
            assert getattr(found, name) == getattr(begun, name)
        rate = (
            fewer.lr * (1 - begun.momentum) / (1 - fewer.momentum)
        )  # the relative step is that of this batch
        assert (found.lr, found.dropped) == (pytest.approx(rate), {})
        line = f"--lr: {rate:.4g} at this batch, {begun.lr:.4g} in the run so far"
        assert preflight._moved_by_batch(found, defaults.description(found))[-1] == line
        origins |= {
            name: origin.value for name, origin in found.origins.items() if origin is Origin.RUN
        }


def test_a_value_of_a_recipe_that_has_changed_stays_over_several_resumes(tmp_path):
    flags = config.resolve(["--recipe=four_minutes_resnet"], 24).shown() | {"epochs": 85}
    for origin in (Origin.RECIPE, Origin.RUN):
        assert (
            resumed(
                tmp_path, flags, {"epochs": origin.value}, "--recipe=four_minutes_resnet"
            ).epochs
            == 85
        )


def test_another_or_no_description_changes_nothing(tmp_path):
    begun = config.resolve([f"--run_dir={tmp_path}", "--resume"], 24)
    assert Origin.RUN not in begun.origins.values()
    assert resumed(tmp_path, {"optimizer": "sgd", "momentum": 0.5}, {}) == begun
    fresh = config.resolve([f"--run_dir={tmp_path}"], 24)
    assert fresh.lars_eta == begun.lars_eta


def test_all_ranks_have_what_rank_0_has_taken_over(tmp_path, monkeypatch):
    first = resumed(tmp_path, OLD | {"seed": 7}, dict.fromkeys(OLD, "default"))
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    other = config.resolve([f"--run_dir={tmp_path}", "--resume"], 24)
    assert Origin.RUN not in other.origins.values()
    sent = []
    assert defaults.shared(first, lambda own: sent.append(json.dumps(own)) or own) == first
    same = defaults.shared(other, lambda own: json.loads(sent[0]))
    assert (same, same.origins) == (first, first.origins)


@pytest.mark.parametrize("content", ["", "{}", '{"flags": {"seed": 7'])
def test_an_empty_or_cut_description_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(f"{tmp_path / 'config.json'}")):
        config.resolve([f"--run_dir={tmp_path}", "--resume"])

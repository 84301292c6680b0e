"""Tests the defaults that follow from the hardware and from the dataset.

A run that is resumed keeps its own.
"""

import json

import pytest

from hybrid_imagenet import config, main
from hybrid_imagenet.comm import gpus
from hybrid_imagenet.config import Origin, defaults, stored
from hybrid_imagenet.training import preflight

# The sources of these recipes do not fix the number of images per GPU.
FREE_BATCH = ("mlperf_lars", "gradual_warmup")
NOTE = (
    "No --recipe was set: using gradual_warmup, because the dataset is a folder of images. "
    "Set --recipe=hybrid for the method of Lu et al."
)


@pytest.fixture
def on_gpus(monkeypatch):
    """Makes this process behave as if it trained on GPUs."""
    monkeypatch.setattr(gpus, "in_use", lambda: True)


def write_run(folder, recipe, flags=(), origin="default", **more):
    """Writes the config.json of a run of `recipe`.

    Unless `origin` is set, the run has this recipe by default.
    """
    resolved = config.resolve([f"--recipe={recipe}", *flags])
    origins = {name: flag_origin.value for name, flag_origin in resolved.origins.items()}
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": stored.FORMAT,
        "flags": resolved.shown() | more,
        "origins": origins | {"recipe": origin},
    }
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("recipe", FREE_BATCH)
def test_batch_without_gpus_is_32(recipe):
    resolved = config.resolve([f"--recipe={recipe}"])
    assert (resolved.optimization.per_gpu_batch, resolved.origins["per_gpu_batch"]) == (
        32,
        Origin.DEFAULT,
    )


@pytest.mark.parametrize("recipe", FREE_BATCH)
def test_batch_on_gpus_is_256(recipe, on_gpus):
    resolved = config.resolve([f"--recipe={recipe}"], 8)
    assert (resolved.optimization.per_gpu_batch, resolved.origins["per_gpu_batch"]) == (
        256,
        Origin.HARDWARE,
    )
    assert (
        config.resolve([f"--recipe={recipe}", "--per_gpu_batch=48"], 8).optimization.per_gpu_batch
        == 48
    )


@pytest.mark.parametrize("recipe", FREE_BATCH)
@pytest.mark.parametrize("answer", ["--print_config", "--check_only"])
def test_batch_with_an_assumed_number_of_gpus_is_256(recipe, answer):
    resolved = config.resolve([f"--recipe={recipe}", answer, "--print_config_gpus=8"])
    assert resolved.optimization.per_gpu_batch == 256


def test_batch_that_a_paper_fixes_does_not_follow_the_hardware(monkeypatch):
    for in_use in (True, False):
        monkeypatch.setattr(gpus, "in_use", lambda in_use=in_use: in_use)
        batches = {
            name: config.resolve([f"--recipe={name}"]).optimization.per_gpu_batch
            for name in ("hybrid", "hal", "flash_a")
        }
        assert batches == {"hybrid": 256, "hal": 208, "flash_a": 32}


def test_resolve_does_not_count_gpus_if_no_default_depends_on_them(monkeypatch):
    monkeypatch.setattr(gpus, "in_use", lambda: pytest.fail("the GPUs were counted"))
    config.resolve(["--recipe=mlperf_lars", "--per_gpu_batch=64"], 2)
    config.resolve(["--recipe=hybrid"], 2)
    config.resolve(["--recipe=hybrid", "--nojit_compile"])


@pytest.mark.parametrize(
    ("flags", "ranks", "compiled"),
    [
        ([], 1, True),
        (["--nojit_compile"], 1, False),
        ([], 2, False),
        (["--sync_batch_norm"], 2, False),
        (["--bn_group=2"], 2, False),
        (["--deterministic"], 1, False),
        (["--batch_schedule=2:*2"], 1, False),
        (["--image_size_schedule=0:128,18:224"], 1, False),
        (["--random_batch=8", "--sync_batch_norm"], 1, False),
        (["--model=keras:MobileNetV2"], 1, False),
        (["--model=alexnet_bn"], 1, False),
    ],
)
def test_jit_compile_by_default_is_set_only_on_one_gpu(flags, ranks, compiled, on_gpus):
    assert config.resolve(flags, ranks).network.jit_compile is compiled


def test_jit_compile_by_default_without_gpus_is_not_set():
    assert not config.resolve([]).network.jit_compile


def test_resumed_run_keeps_its_step_without_xla(tmp_path, on_gpus):
    write_run(tmp_path, "hybrid", ["--per_gpu_batch=64"], jit_compile=False)
    content = json.loads((tmp_path / "config.json").read_text())
    content["origins"]["jit_compile"] = "default"
    (tmp_path / "config.json").write_text(json.dumps(content))
    again = config.resolve(["--recipe=hybrid", f"--run_dir={tmp_path}", "--resume"])
    assert not again.network.jit_compile


def test_resumed_run_keeps_its_batch_on_other_hardware(tmp_path, on_gpus):
    write_run(tmp_path, "gradual_warmup", origin="command line", per_gpu_batch=32)
    again = config.resolve(["--recipe=gradual_warmup", f"--run_dir={tmp_path}", "--resume"])
    assert again.optimization.per_gpu_batch == 32
    assert again.kept_notes == (
        "--per_gpu_batch=32 is kept from the run. A new run would have 256.",
    )


def test_resumed_run_keeps_the_batch_that_its_recipe_had(tmp_path, on_gpus):
    write_run(tmp_path, "mlperf_lars", origin="command line", per_gpu_batch=32)
    content = json.loads((tmp_path / "config.json").read_text())
    content["origins"]["per_gpu_batch"] = "recipe"
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert (
        config.resolve(
            ["--recipe=mlperf_lars", f"--run_dir={tmp_path}", "--resume"], 8
        ).optimization.per_gpu_batch
        == 32
    )


def test_shared_gives_all_ranks_the_batch_of_rank_0(monkeypatch):
    plain = config.resolve(["--recipe=mlperf_lars"], 8)
    monkeypatch.setattr(gpus, "in_use", lambda: True)
    first = config.resolve(["--recipe=mlperf_lars"], 8)
    sent = []
    assert defaults.shared(first, lambda value: sent.append(value) or value) == first
    assert defaults.shared(plain, lambda value: sent[0]) == first


def test_recipe_of_a_folder_is_gradual_warmup():
    resolved = config.resolve(["--dataset=folder"])
    assert (resolved.run.recipe, resolved.origins["recipe"]) == ("gradual_warmup", Origin.DATA)
    assert resolved.optimization.optimizer == "sgd"


@pytest.mark.parametrize(
    "dataset", ["imagenet2012", "tfrecord", "webdataset", "parquet", "digits", "cifar10"]
)
def test_recipe_of_other_datasets_is_hybrid(dataset):
    assert config.resolve([f"--dataset={dataset}"]).run.recipe == "hybrid"


def test_recipe_that_is_set_replaces_the_default_of_a_folder(tmp_path):
    flagfile = tmp_path / "some.flags"
    flagfile.write_text("--seed=1\n")
    assert config.resolve(["--dataset=folder", "--recipe=hybrid"]).run.recipe == "hybrid"
    assert config.resolve(["--dataset=folder", f"--flagfile={flagfile}"]).run.recipe == "hybrid"


def notes(arguments, capsys):
    """Returns what the check before a run prints to standard error."""
    preflight.run(config.resolve(arguments))
    return capsys.readouterr().err


def test_recipe_of_a_folder_is_announced_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv(preflight.CHECKED_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.png").write_bytes(b"x")
    arguments = ["--dataset=folder", f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}"]
    assert notes(arguments, capsys) == NOTE + "\n"
    assert notes([*arguments, "--recipe=gradual_warmup"], capsys) == ""


@pytest.mark.parametrize(("classes", "is_noted"), [(37, True), (1000, False), (None, False)])
def test_recipe_note_for_files_without_the_classes_of_imagenet_suggests_gradual_warmup(
    classes, is_noted
):
    line = defaults.recipe_note(config.resolve(["--dataset=tfrecord"]), classes)
    assert (line is not None) == is_noted
    if is_noted:
        assert "This dataset has 37 classes. Try --recipe=gradual_warmup." in line
    assert (
        defaults.recipe_note(config.resolve(["--dataset=tfrecord", "--recipe=hybrid"]), classes)
        is None
    )
    assert defaults.recipe_note(config.resolve(["--dataset=digits"]), 10) is None


@pytest.mark.parametrize("origin", ["default", "command line"])
def test_resumed_run_on_a_folder_keeps_its_recipe(origin, tmp_path):
    write_run(tmp_path, "hybrid", origin=origin)
    again = config.resolve(["--dataset=folder", "--resume", f"--run_dir={tmp_path}"])
    assert (again.run.recipe, again.origins["recipe"]) == ("hybrid", Origin.RUN)
    assert defaults.recipe_note(again, 2) is None


def test_print_config_of_a_folder_prints_that_the_dataset_set_the_recipe(capsys, monkeypatch):
    monkeypatch.setattr(preflight, "training_images", lambda resolved: 1000)
    assert main.main(["--dataset=folder", "--data_dir=photos", "--print_config"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("recipe "))
    assert row.split(maxsplit=2) == ["recipe", "gradual_warmup", "default for the dataset"]

"""Defaults that follow from the hardware and from the dataset, and how a run that is resumed keeps
its own.
"""

import json

import pytest

from hybrid_imagenet import config, main
from hybrid_imagenet.comm import gpus
from hybrid_imagenet.config import Origin, defaults
from hybrid_imagenet.training import preflight

FREE_BATCH = (
    "mlperf_lars",
    "gradual_warmup",
)  # recipes whose source does not fix the images of a GPU
NOTE = (
    "No --recipe was set: using gradual_warmup, because the dataset is a folder of images. "
    "Set --recipe=hybrid for the method of Lu et al."
)


@pytest.fixture
def on_gpus(monkeypatch):
    """Makes this process look as if it would train on GPUs."""
    monkeypatch.setattr(gpus, "in_use", lambda: True)


def write_run(folder, recipe, flags=(), origin="default", **more):
    """Writes the config.json of a run of `recipe`, in which nobody has set the recipe unless
    `origin` says so.
    """
    resolved = config.resolve([f"--recipe={recipe}", *flags])
    origins = {name: each.value for name, each in resolved.origins.items()}
    folder.mkdir(parents=True, exist_ok=True)
    content = {"flags": resolved.shown() | more, "origins": origins | {"recipe": origin}}
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
        found = {
            name: config.resolve([f"--recipe={name}"]).optimization.per_gpu_batch
            for name in ("hybrid", "hal", "flash_a")
        }
        assert found == {"hybrid": 256, "hal": 208, "flash_a": 32}


def test_gpus_are_not_looked_for_where_their_defaults_are_set(monkeypatch):
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
def test_xla_compiles_the_step_by_default_on_one_gpu_only(flags, ranks, compiled, on_gpus):
    assert config.resolve(flags, ranks).network.jit_compile is compiled


def test_xla_compiles_no_step_by_default_without_gpus():
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


def test_all_ranks_take_the_batch_of_rank_0(monkeypatch):
    plain = config.resolve(["--recipe=mlperf_lars"], 8)
    monkeypatch.setattr(gpus, "in_use", lambda: True)
    first = config.resolve(["--recipe=mlperf_lars"], 8)
    sent = []
    assert defaults.shared(first, lambda own: sent.append(own) or own) == first
    assert defaults.shared(plain, lambda own: sent[0]) == first


def test_recipe_of_a_folder_is_gradual_warmup():
    resolved = config.resolve(["--dataset=folder"])
    assert (resolved.run.recipe, resolved.origins["recipe"]) == ("gradual_warmup", Origin.DATA)
    assert resolved.optimization.optimizer == "sgd"


@pytest.mark.parametrize(
    "dataset", ["imagenet2012", "tfrecord", "webdataset", "parquet", "digits", "cifar10"]
)
def test_recipe_of_other_datasets_is_hybrid(dataset):
    assert config.resolve([f"--dataset={dataset}"]).run.recipe == "hybrid"


def test_recipe_that_is_set_wins_over_that_of_a_folder(tmp_path):
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


@pytest.mark.parametrize(("classes", "speaks"), [(37, True), (1000, False), (None, False)])
def test_hybrid_by_default_is_questioned_for_files_of_other_classes_than_imagenet(classes, speaks):
    line = defaults.recipe_note(config.resolve(["--dataset=tfrecord"]), classes)
    assert (line is not None) == speaks
    if speaks:
        assert "This dataset has 37 classes. Try --recipe=gradual_warmup." in line
    assert (
        defaults.recipe_note(config.resolve(["--dataset=tfrecord", "--recipe=hybrid"]), classes)
        is None
    )
    assert defaults.recipe_note(config.resolve(["--dataset=digits"]), 10) is None


@pytest.mark.parametrize("where", [None, "elsewhere"])
@pytest.mark.parametrize("origin", ["default", "command line"])
def test_resumed_run_on_a_folder_keeps_its_recipe(where, origin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / (where or "runs/hybrid-folder"), "hybrid", origin=origin)
    place = [f"--run_dir={where}"] if where else []
    again = config.resolve(["--dataset=folder", "--resume", *place])
    assert (again.run.recipe, again.origins["recipe"]) == ("hybrid", Origin.RUN)
    assert defaults.recipe_note(again, 2) is None


def test_print_config_of_a_folder_names_what_chose_the_recipe(capsys, monkeypatch):
    monkeypatch.setattr(preflight, "training_images", lambda resolved: 1000)
    assert main.main(["--dataset=folder", "--data_dir=photos", "--print_config"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("recipe "))
    assert row.split(maxsplit=2) == ["recipe", "gradual_warmup", "default for the dataset"]

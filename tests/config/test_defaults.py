"""Tests the defaults that follow from the hardware and from the dataset.

A run that is resumed keeps its own.
"""

import json
import pathlib
import re

import pytest

from hybrid_imagenet import config, main
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.config import Origin, defaults, stored
from hybrid_imagenet.training import preflight

IMAGENET = 1_281_167
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
    monkeypatch.setattr(gpus, "compute_capability", lambda: (9, 0))


def decided(flags, ranks=1, images=IMAGENET, precision=None):
    """Returns the configuration of a run with what XLA compiles."""
    return defaults.decide_xla(config.resolve(flags, ranks), images, precision)


def write_run(folder, recipe, flags=(), origin="default", **more):
    """Writes the config.json of a run of `recipe`.

    Unless `origin` is set, the run has this recipe by default.
    """
    resolved = config.resolve([f"--recipe={recipe}", *flags])
    origins = {name: flag_origin.value for name, flag_origin in resolved.origins.items()}
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": stored.FORMAT,
        "flags": resolved.as_masked_dict() | more,
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
        (["--jit_compile"], 2, True),
        (["--nojit_compile"], 1, False),
        ([], 2, False),
        (["--virtual_gpus=2"], 1, False),
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
    assert decided(flags, ranks).network.jit_compile is compiled


def test_xla_without_gpus_is_not_decided():
    resolved = config.resolve([])
    assert not resolved.network.jit_compile
    assert defaults.decide_xla(resolved, IMAGENET) is resolved


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("virtual_gpus", [1, 2])
@pytest.mark.parametrize("precision", ["auto", "float32", "mixed_float16"])
@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (8, 0), (9, 0), None])
def test_xla_is_the_default_only_where_it_was_timed(
    capability, precision, virtual_gpus, is_long, is_deterministic, on_gpus, monkeypatch
):
    monkeypatch.setattr(gpus, "compute_capability", lambda: capability)
    has_tensor_cores = capability in ((7, 0), (8, 0), (9, 0))
    is_fp16 = precision == "mixed_float16" or (precision == "auto" and has_tensor_cores)
    is_timed_gpu = capability in ((8, 0), (9, 0))
    flags = [f"--precision={precision}", f"--virtual_gpus={virtual_gpus}"]
    flags += ["--epochs=12"]
    if is_deterministic:
        flags += ["--deterministic"]
    run = decided(flags, images=IMAGENET if is_long else 100_000)
    is_default = is_fp16 and is_timed_gpu and virtual_gpus == 1 and is_long
    assert run.network.jit_compile is (is_default and not is_deterministic)
    assert run.network.jit_stem is (is_fp16 and not is_deterministic)
    assert {run.origins[name] for name in ("jit_compile", "jit_stem")} == {Origin.HARDWARE}


@pytest.mark.parametrize(
    ("flags", "images", "is_long"),
    [
        # 600 s at 6,956 images/s are 4,173,600 images.
        (["--epochs=1", "--warmup_epochs=0"], 4_173_000, False),
        (["--epochs=1", "--warmup_epochs=0"], 4_174_000, True),
        (["--epochs=90"], 46_000, False),
        (["--epochs=90"], 47_000, True),
        (["--epochs=90", "--image_size=32"], IMAGENET, False),
    ],
)
def test_xla_compiles_by_default_a_run_of_more_than_ten_minutes(flags, images, is_long, on_gpus):
    assert decided(flags, images=images).network.jit_compile is is_long


def test_flags_for_xla_are_not_decided(on_gpus):
    flags = ["--jit_compile", "--jit_stem", "--deterministic", "--precision=float32"]
    run = decided(flags)
    assert run.network.jit_compile
    assert run.network.jit_stem
    assert not decided(["--nojit_stem"]).network.jit_stem


@pytest.mark.parametrize(("was_long", "now_long"), [(False, True), (True, False)])
def test_resumed_run_keeps_what_xla_compiles(was_long, now_long, tmp_path, on_gpus, monkeypatch):
    images = {True: IMAGENET, False: 1000}
    begun = decided(["--recipe=hybrid"], images=images[was_long])
    origins = {name: origin.value for name, origin in begun.origins.items()}
    content = {"format": stored.FORMAT, "flags": begun.as_masked_dict(), "origins": origins}
    (tmp_path / "config.json").write_text(json.dumps(content))
    again = ["--recipe=hybrid", f"--run_dir={tmp_path}", "--resume"]
    # On a P40 a new run would compile nothing.
    monkeypatch.setattr(gpus, "compute_capability", lambda: (6, 1))
    resumed = decided(again, images=images[now_long])
    assert resumed.network.jit_compile is was_long
    assert resumed.network.jit_stem
    assert resumed.kept_notes == ()
    assert not decided([*again, "--nojit_compile"]).network.jit_compile
    assert not decided(again, ranks=2).network.jit_compile
    assert not decided([*again, "--random_batch=8", "--sync_batch_norm"]).network.jit_compile


def test_run_that_began_without_a_gpu_is_decided_on_the_first_gpu(tmp_path, on_gpus):
    write_run(tmp_path, "hybrid", ["--per_gpu_batch=64"], jit_compile=False)
    content = json.loads((tmp_path / "config.json").read_text())
    content["origins"]["jit_compile"] = "default"
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert decided(["--recipe=hybrid", f"--run_dir={tmp_path}", "--resume"]).network.jit_compile


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


def test_recipe_note_for_files_without_the_classes_of_imagenet_suggests_gradual_warmup():
    line = defaults.recipe_note(config.resolve(["--dataset=tfrecord"]), 37)
    assert "This dataset has 37 classes. Try --recipe=gradual_warmup." in line


@pytest.mark.parametrize(
    ("ranks", "classes", "flags", "batch", "recommended"),
    [
        (1, 10, ["--dataset=digits", "--per_gpu_batch=32"], "32", "gradual_warmup"),
        (7, 1000, ["--dataset=tfrecord"], "1,792", "gradual_warmup"),
        (8, 1000, ["--dataset=tfrecord"], "2,048", "mlperf_lars"),
        (24, None, ["--dataset=imagenet2012"], "6,144", "mlperf_lars"),
        (4, None, ["--gradient_accumulation_steps=2"], "2,048", "mlperf_lars"),
    ],
)
def test_recipe_note_names_the_recipe_and_the_recommended_one_at_this_batch(
    ranks, classes, flags, batch, recommended
):
    assert defaults.recipe_note(config.resolve(flags, ranks), classes) == (
        "No --recipe was set: using hybrid, the method of Lu et al. At a global batch of"
        f" {batch}, README recommends --recipe={recommended}."
    )


def test_recipe_note_at_a_batch_beyond_the_table_of_mlperf_recommends_none():
    assert defaults.recipe_note(config.resolve(["--dataset=imagenet2012"], 256), None).endswith(
        "At a global batch of 65,536, README recommends --recipe=mlperf_lars."
    )
    assert defaults.recipe_note(config.resolve(["--dataset=imagenet2012"], 512), None) == (
        "No --recipe was set: using hybrid, the method of Lu et al. README recommends no recipe for"
        " a global batch of 131,072."
    )


@pytest.mark.parametrize("dataset", ["tfrecord", "digits", "imagenet2012"])
def test_recipe_note_of_a_recipe_that_is_set_is_none(dataset):
    flags = [f"--dataset={dataset}", "--recipe=hybrid"]
    assert defaults.recipe_note(config.resolve(flags, 64), 37) is None


def test_recommended_recipe_is_that_of_the_table_of_recipes():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    row = r"^\| [\d to]+ \| ([\d,]+) to ([\d,]+) \| `--recipe=(gradual_warmup|mlperf_lars)`"
    rows = re.findall(row, text, re.M)
    assert len(rows) == 2
    for first, last, recipe in rows:
        for batch in (first, last):
            assert defaults.recommended_recipe(int(batch.replace(",", ""))) == recipe


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

"""Tests which source of a value has priority, and the errors of wrong command lines."""

import dataclasses

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import Origin
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import options_of
from tests.support import fresh


def test_resolve_uses_the_value_of_the_later_source(tmp_path):
    inner = tmp_path / "inner.flags"
    inner.write_text("# a comment\n--seed=4\n--epochs=20\n")
    outer = tmp_path / "outer.flags"
    outer.write_text(f"--flagfile={inner}\n--recipe=hal\n--momentum=0.8\n")
    resolved = config.resolve(["--flagfile", str(outer), "--epochs=30", "--nozero_last_gamma"])
    assert (resolved.run.epochs, resolved.origins["epochs"]) == (30, Origin.COMMAND_LINE)
    assert (resolved.run.seed, resolved.origins["seed"]) == (4, Origin.FLAGFILE)
    assert (resolved.get("momentum"), resolved.origins["momentum"]) == (
        0.8,
        Origin.FLAGFILE,
    )
    assert (resolved.optimization.per_gpu_batch, resolved.origins["per_gpu_batch"]) == (
        208,
        Origin.RECIPE,
    )
    assert resolved.origins["image_size"] is Origin.DEFAULT
    assert resolved.network.zero_last_gamma is False


def test_resolve_accepts_dashes_as_underscores(tmp_path):
    flagfile = tmp_path / "some.flags"
    flagfile.write_text("--warmup-epochs=3\n")
    arguments = [f"--flagfile={flagfile}", "--lars-eta=0.5", "--run-dir=a-b", "--nozero-last-gamma"]
    resolved = config.resolve([*arguments, "--torus-grid=1x1", "--allreduce=torus"])
    assert (
        resolved.optimization.warmup_epochs,
        resolved.get("lars_eta"),
        resolved.run.run_dir,
    ) == (
        3.0,
        0.5,
        "a-b",
    )
    assert (resolved.network.zero_last_gamma, resolved.get("torus_grid")) == (
        False,
        "1x1",
    )


@pytest.mark.parametrize(
    "word", ["--nozero_last_gamma", "--no-zero-last-gamma", "--no_zero_last_gamma"]
)
def test_resolve_negates_a_boolean_flag_with_and_without_a_dash(word):
    assert config.resolve([word]).network.zero_last_gamma is False


def test_resolve_converts_values_to_the_types_of_flags():
    resolved = config.resolve(
        ["--target_top1=.5,0.6", "--eval_batch=", "--stop_at_top1=0.7", "--resume=true"]
    )
    assert resolved.evaluation.target_top1 == (0.5, 0.6)
    assert resolved.evaluation.eval_batch is None
    assert resolved.run.stop_at_top1 == 0.7
    assert resolved.run.resume is True


SYNC = "cannot be combined with --sync_batch_norm"
RANDOM = ("--random_batch=8", "--sync_batch_norm")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epoch=3"], ["There is no flag --epoch (did", "did you mean --epochs"]),
        (["--batch_size=3"], ["There is no flag --batch_size (did you mean --per_gpu_batch?)"]),
        (["--amp"], ["There is no flag --amp (did you mean --precision?)"]),
        (["--nonsense"], ["There is no flag --nonsense. See --help."]),
        (["--jit_compile=maybe"], ["--jit_compile=maybe is not valid. Use true or false."]),
        (["--epochs=three"], ["--epochs=three", "a number"]),
        (["--epochs=0"], ["--epochs=0", "above 0"]),
        (["--momentum=2"], ["--momentum=2", "at most"]),
        (["--lr=nan"], ["--lr=nan"]),
        (["--image_size=1000000"], ["--image_size=1000000", "at most 8192."]),
        (["--eval_image_size=8193"], ["--eval_image_size=8193", "at most 8192."]),
        (["--image_size_schedule=0:99999"], ["--image_size_schedule: '0:99999'", "8192 pixels"]),
        (["--model_width=1025"], ["--model_width=1025", "at most 1024."]),
        (["--data_threads=4097"], ["--data_threads=4097", "at most 4096."]),
        (["--virtual_gpus=4097"], ["--virtual_gpus=4097", "at most 4096."]),
        (["--per_gpu_batch=65537"], ["--per_gpu_batch=65537", "at most 65536."]),
        (["--eval_batch=65537"], ["--eval_batch=65537", "at most 65536."]),
        (["--gradient_accumulation_steps=65537"], ["_steps=65537", "at most 65536."]),
        (["--batch_schedule=3:65537"], ["--batch_schedule: '3:65537'", "65536 images"]),
        (["--batch_schedule=3:8x65537"], ["'3:8x65537'", "65536 micro-batches"]),
        (["--batch_schedule=3:*99999999"], ["'3:*99999999'", "65536 images"]),
        (
            ["--batch_schedule=3:*99999999", "--batch_growth=accumulation"],
            ["'3:*99999999'", "65536 micro-batches"],
        ),
        (["--run_dir="], ["--run_dir has no value. Write --run_dir=PATH, or omit the flag."]),
        (["--data-dir="], ["--data_dir has no value."]),
        (["--data_cache_dir="], ["--data_cache_dir has no value."]),
        (["--init_from="], ["--init_from has no value."]),
        (["--model=resnet5"], ["--model=resnet5", "did you mean resnet50"]),
        (["--resume=perhaps"], ["--resume=perhaps"]),
        (["words"], ["Unexpected argument: words.", "--name=value"]),
        (["--recipe=hybird"], ["no recipe hybird", "did you mean hybrid"]),
        (["--flagfile=/nonexistent.flags"], ["/nonexistent.flags"]),
        (["--flagfile"], ["--flagfile has no value. Write --flagfile=FILE."]),
        (["--warmup_epochs=5", "--epochs=3"], ["--warmup_epochs=5", "--epochs=3"]),
        (["--profile_steps=20,10"], ["--profile_steps=20,10", "as in 10,20"]),
        (["--profile_steps=10"], ["--profile_steps=10", "first and the last"]),
        (["--bad_records=stop"], ["--bad_records=stop", "fail, skip"]),
        (["--target_top1=1.5"], ["--target_top1=1.5", "at most 1"]),
        (["--lr_schedule=flash_b"], ["--lr_schedule=flash_b"]),
        (["--lr_schedule=mlperf", "--optimizer=adabound"], ["--lr_schedule=mlperf"]),
        (["--recipe=mlperf_lars", "--optimizer=sgd"], ["--optimizer=sgd", "Set --lr"]),
        (["--lr_schedule=step", "--lr_steps=30,20"], ["--lr_steps=30,20"]),
        (["--batch_schedule=flash_exp9"], ["--batch_schedule: 'flash_exp9'"]),
        (
            ["--sync_batch_norm", "--gradient_accumulation_steps=2"],
            ["--gradient_accumulation_steps above 1", SYNC],
        ),
        (["--sync_batch_norm", "--batch_schedule=3:16x2"], ["--sync_batch_norm"]),
        (["--momentum=1"], ["--momentum=1"]),
        (["--ema_decay=1"], ["--ema_decay=1"]),
        (["--image_size_schedule=5:128,5:160"], ["--image_size_schedule: epoch 5 follows 5"]),
        (["--image_size_schedule=0:128", "--recipe=four_minutes_alexnet"], ["--model=alexnet_bn"]),
        (["--bn_group=2", "--sync_batch_norm"], ["--bn_group=2", SYNC]),
        (
            ["--bn_group=4", "--virtual_gpus=6"],
            ["--bn_group=4 cannot be combined with --virtual_gpus=6"],
        ),
        (["--random_batch=8"], ["--random_batch=8 needs --sync_batch_norm"]),
        ([*RANDOM, "--jit_compile"], ["--random_batch=8 cannot be combined with --jit_compile"]),
        (
            [*RANDOM, "--model_width=24"],
            ["--model_width=24, because", "Set --model_width to a multiple of 16."],
        ),
        (
            [*RANDOM, "--mixup_alpha=0.2"],
            ["--mixup_alpha=0.2 cannot be combined with --random_batch"],
        ),
        (
            ["--cutmix_alpha=1", "--per_gpu_batch=1"],
            ["--cutmix_alpha=1 mixes", "Set --per_gpu_batch to 2"],
        ),
        (["--mixup=0.2"], ["There is no flag --mixup (did you mean --mixup_alpha?)"]),
        (
            ["--loss_scale=high"],
            ["--loss_scale=high is invalid. Set auto, dynamic or a positive number"],
        ),
        (["--loss_scale=inf"], ["--loss_scale=inf is invalid"]),
        (
            ["--recipe=flash_a", "--lr=1"],
            ["--lr cannot be combined with --lr_schedule=flash_a", "--lars_eta"],
        ),
        (
            ["--recipe=flash_b", "--momentum=.9"],
            ["--momentum cannot be combined with --momentum_rule=noise_scale"],
        ),
        (["--lr-final=0.1"], ["--lr_final was removed. ", "final=..."]),
        (["--decoder=dali"], ["--decoder was removed. TensorFlow decodes all images. Omit"]),
        (["--xla_programs=stem,norm"], ["--xla_programs was removed. Use --jit_stem"]),
        (["--nojit_update"], ["--nojit_update was removed.", "Omit the flag."]),
        (["--adabound_beta1", "0.8"], ["--adabound_beta1 was removed. It is 0.9."]),
        (["--print_config_gpus=8"], ["--print_config_gpus needs --print_config or --check_only"]),
        (
            [*RANDOM, "--per_gpu_batch=16", "--batch_schedule=0:16,3:4"],
            ["a GPU has a batch of 4 images"],
        ),
    ],
)
def test_resolve_of_an_invalid_command_line_raises_one_line_with_a_remedy(arguments, words):
    with pytest.raises(UserError) as error:
        config.resolve(arguments)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert error.value.exit_code == 2


def test_resolve_with_a_batch_schedule_uses_its_first_batch():
    first = ["--per_gpu_batch=256", "--batch_schedule=0:32x2,5:64"]
    second = ["--per_gpu_batch=32", "--gradient_accumulation_steps=2"]
    schedule = config.resolve(["--recipe=mlperf_lars", *first], 64)
    plain = config.resolve(["--recipe=mlperf_lars", *second], 64)
    assert (
        schedule.optimization.per_gpu_batch,
        schedule.optimization.gradient_accumulation_steps,
    ) == (32, 2)
    assert schedule.network.bn_group == plain.network.bn_group > 1
    assert (
        schedule.dropped["per_gpu_batch"]
        == "command line has 256, but --batch_schedule begins with 32"
    )


def test_main_answers_questions_about_flags_without_tensorflow(monkeypatch):
    # The disk of this host may be full, and a run elsewhere does not need it.
    monkeypatch.setenv("HYBRID_IMAGENET_RANKS_ELSEWHERE", "1")
    lines = (
        ["--help"],
        ["--help=all"],
        ["--check_only", "--recipe=hybrid"],
        ["--recipe=list"],
        ["--recipe", "list"],
        ["--lr=x"],
        ["--print_config", "--print_config_gpus=24"],
    )
    codes, loaded, errors = fresh.run(*(("hybrid_imagenet.main", line) for line in lines))
    assert codes == [0, 0, 0, 0, 0, 2, 0]
    assert not loaded & fresh.FRAMEWORKS
    assert errors.strip() == "error: --lr=x is not valid. Use a number."


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("True", True), ("0", False), ("no", False)]
)
def test_resolve_accepts_words_for_true_and_false(text, value):
    assert config.resolve([f"--jit_compile={text}"]).network.jit_compile is value


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["--dataset=digits"], "digits"),
        (["--dataset=fashion_mnist"], "shift"),
        (["--dataset=cifar10:3.0.2"], "shift"),
        (["--dataset=idx"], "digits"),
        (["--dataset=folder"], "inception"),
        (["--dataset=folder", "--recipe=hybrid"], "alexnet"),
        ([], "alexnet"),
        (["--dataset=digits", "--augmentation=none"], "none"),
        (["--recipe=mlperf_lars", "--dataset=digits"], "inception"),
        (["--recipe=mlperf_lars", "--dataset=digits", "--augmentation=auto"], "digits"),
    ],
)
def test_augmentation_follows_from_the_dataset_unless_it_is_set(arguments, kind):
    assert config.resolve(arguments).data.augmentation == kind


def test_origin_of_the_augmentation_is_the_dataset():
    assert config.resolve(["--dataset=digits"]).origins["augmentation"] is Origin.DATA


def test_flag_names_are_unique_over_groups_and_differ_from_the_names_of_groups():
    names = [name for group in config.GROUPS.values() for name in options_of(group)]
    assert len(names) == len(set(names)) == len(config.COMMON)
    assert not set(names) & {field.name for field in dataclasses.fields(config.RunConfig)}


def test_replace_changes_flags_of_several_groups_and_their_origins():
    resolved = config.resolve(["--optimizer=sgd"])
    changed = resolved.replace(Origin.DATA, epochs=3, dataset="digits", momentum=0.5)
    assert (changed.run.epochs, changed.data.dataset) == (3, "digits")
    assert changed.get("momentum") == 0.5
    assert changed.origins["dataset"] is Origin.DATA
    assert changed.network == resolved.network


def test_value_returns_flags_and_options_of_the_choice_by_name():
    resolved = config.resolve(["--optimizer=sgd", "--momentum=0.8", "--epochs=30"])
    assert resolved.get("epochs") == 30
    assert resolved.get("momentum") == 0.8


def test_value_of_an_option_of_another_choice_raises_key_error():
    with pytest.raises(KeyError, match="lars_eta"):
        config.resolve(["--optimizer=sgd"]).get("lars_eta")


def test_replace_of_an_option_of_another_choice_raises_value_error():
    with pytest.raises(ValueError, match="has no lars_eta"):
        config.resolve(["--optimizer=sgd"]).replace(Origin.COMMAND_LINE, lars_eta=0.01)

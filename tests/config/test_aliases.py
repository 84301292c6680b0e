"""Flags of other programs are answered with ours, and unknown ones with the nearest."""

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import aliases
from hybrid_imagenet.errors import UserError


def test_every_answer_is_a_flag_that_exists_and_no_foreign_name_hides_one_of_ours():
    for name, ours in aliases.FOREIGN.items():
        assert ours.partition("=")[0] in config.OPTIONS, name
    plain = {flag.replace("_", "") for flag in config.OPTIONS}
    assert not plain & set(aliases.FOREIGN)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--batch_size=64"], "--batch_size=64: this program calls it --per_gpu_batch: write --per_gpu_batch=64"),
        (["--batch-size", "64"], "--batch_size: this program calls it --per_gpu_batch: write --per_gpu_batch"),
        (["--validation_split=0.2"], "write --val_fraction=0.2"),
        (["--data-path=/d"], "write --data_dir=/d"),
        (["-b=32"], "write --per_gpu_batch=32"),
        (["--amp"], "--amp: this program calls it --precision: write --precision=mixed_float16"),
        (["--epoch=3"], "--epoch=3: no such flag; did you mean --epochs? --help lists all"),
        (["--nonsense"], "--nonsense: no such flag; --help lists all"),
        (["--xla=maybe"], "--xla=maybe: give true or false"),
    ],
)
def test_an_unknown_flag_is_answered_with_what_to_write(arguments, text):
    with pytest.raises(UserError) as caught:
        config.resolve(arguments)
    assert str(caught.value).endswith(text)


@pytest.mark.parametrize(("text", "value"), [("yes", True), ("True", True), ("0", False), ("no", False)])
def test_words_for_true_and_false(text, value):
    assert config.resolve([f"--xla={text}"]).xla is value


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["--dataset=digits"], "digits"),
        (["--dataset=fashion_mnist"], "shift"),
        (["--dataset=cifar10:3.0.2"], "shift"),
        (["--dataset=folder"], "alexnet"),
        ([], "alexnet"),
        (["--dataset=digits", "--augmentation=none"], "none"),
        (["--recipe=mlperf_lars", "--dataset=digits"], "inception"),
        (["--recipe=mlperf_lars", "--dataset=digits", "--augmentation=auto"], "digits"),
    ],
)
def test_the_augmentation_follows_the_data_set_unless_it_is_given(arguments, kind):
    assert config.resolve(arguments).augmentation == kind


def test_the_origin_of_the_augmentation_names_the_data_set():
    assert config.resolve(["--dataset=digits"]).origins["augmentation"] == "default for digits"

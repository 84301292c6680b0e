"""The advice on flags after memory ran out."""

import pytest

from hybrid_imagenet import config as configuration
from hybrid_imagenet.config import smaller_batch_advice


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--per_gpu_batch=64"], "Try --per_gpu_batch=32 --gradient_accumulation_steps=2, and"),
        (
            ["--per_gpu_batch=64", "--gradient_accumulation_steps=3"],
            "Try --per_gpu_batch=32 --gradient_accumulation_steps=6, and",
        ),
        (["--per_gpu_batch=64", "--sync_batch_norm"], "Try --per_gpu_batch=32, and"),
        (["--per_gpu_batch=65"], "Try --per_gpu_batch=32, and"),
        (["--per_gpu_batch=65", "--eval_batch=500"], "Try --per_gpu_batch=32 --eval_batch=32, and"),
        (["--per_gpu_batch=1"], "smaller --image_size"),
        (["--batch_schedule=0:8,3:16"], "smaller batches in --batch_schedule"),
    ],
)
def test_advice_halves_the_batch_and_keeps_the_images_of_an_update(flags, text):
    words = ["--dataset=synthetic", "--recipe=mlperf_lars", *flags]
    assert text in smaller_batch_advice.advice(configuration.resolve(words, 1))

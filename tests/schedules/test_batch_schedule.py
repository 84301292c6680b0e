"""Schedules of the batch and of the image size."""

import pytest

from hybrid_imagenet.schedules import batch_schedule
from hybrid_imagenet.schedules.batch_schedule import BatchSchedule, BatchStage
from hybrid_imagenet.schedules.batch_schedule import parse_batches as parse


def batches(name, workers, per_gpu_batch, **arguments):
    return [
        (s.epoch, s.global_batch(workers))
        for s in parse((name,), per_gpu_batch, **arguments).stages
    ]


# Mikami et al., Table 3: exact products of images per worker and workers.
TABLE_3 = [
    ("flash_exp1", 2176, 16, [(0, 34816), (30, 69632)]),
    ("flash_exp2", 3456, 16, [(0, 55296)]),
    ("flash_exp3", 2048, 27, [(0, 55296), (30, 65536)]),
    ("flash_exp4", 2176, 16, [(0, 34816), (30, 69632), (45, 87040), (75, 121856)]),
]


@pytest.mark.parametrize("growth", ["per_gpu", "accumulation"])
@pytest.mark.parametrize(("name", "workers", "images", "expected"), TABLE_3)
def test_parse_presets_gives_the_batches_of_the_four_experiments(
    name, workers, images, expected, growth
):
    assert batches(name, workers, images, growth=growth) == expected


def test_parse_growth_by_accumulation_keeps_micro_batches_small():
    stages = parse(("30:*2", "45:*2.5", "75:*3.5"), 16, growth="accumulation").stages
    assert [(s.per_gpu_batch, s.accumulation) for s in stages] == [
        (16, 1),
        (16, 2),
        (10, 4),
        (14, 4),
    ]


def test_parse_flash_exp4_by_accumulation_has_at_most_32_images_at_a_time():
    stages = parse(("flash_exp4",), 16, growth="accumulation").stages
    assert [(s.per_gpu_batch, s.accumulation) for s in stages] == [
        (16, 1),
        (16, 2),
        (20, 2),
        (28, 2),
    ]
    doubled = parse(("flash_exp4",), 8, accumulation=2, growth="accumulation").stages
    assert [(s.per_gpu_batch, s.accumulation) for s in doubled] == [
        (8, 2),
        (8, 4),
        (10, 4),
        (14, 4),
    ]


def test_parse_accepts_all_forms_of_entries():
    schedule = parse(
        ("2:16", "4:8x6", "6:*2", "7:*0.5", "8:*1.5"), 8, accumulation=2, growth="per_gpu"
    )
    assert schedule.stages == (
        BatchStage(0, 8, 2),
        BatchStage(2, 16, 2),
        BatchStage(4, 8, 6),
        BatchStage(6, 16, 2),
        BatchStage(7, 4, 2),
        BatchStage(8, 12, 2),
    )


def test_parse_factors_multiply_the_first_batch_of_the_schedule():
    assert [stage.images for stage in parse(["0:64", "30:*2", "45:*2.5"], 32).stages] == [
        64,
        128,
        160,
    ]


def test_stage_at_an_epoch_changes_exactly_at_its_boundaries():
    schedule = parse(("flash_exp4",), 16)
    images = [schedule.at(epoch).images for epoch in (0, 29, 30, 44, 45, 74, 75, 89)]
    assert images == [16, 16, 32, 32, 40, 40, 56, 56]


def test_parse_without_entries_returns_one_stage():
    assert parse((), 32, 4) == BatchSchedule((BatchStage(0, 32, 4),))


def test_parse_ignores_stages_after_the_end_of_the_run():
    assert len(parse(("flash_exp4",), 16, epochs=45).stages) == 2


@pytest.mark.parametrize(
    ("entries", "images", "words"),
    [
        (("flash_exp5",), 16, "flash_exp5"),
        (("30:",), 16, "30:"),
        (("30:0",), 16, "at least one image"),
        (("30:4x0",), 16, "at least one image"),
        (("5:8", "5:16"), 16, "ascending"),
        (("0:8", "9:16", "3:4"), 16, "ascending"),
        (("flash_exp4",), 1, "multiple of 2"),
        (("flash_exp3",), 16, "multiple of 27"),
        (("3:*0",), 16, "whole number"),
    ],
)
def test_parse_of_invalid_entries_is_rejected(entries, images, words):
    with pytest.raises(ValueError, match=words) as caught:
        parse(entries, images)
    assert "\n" not in str(caught.value)


def test_parse_of_a_batch_that_micro_batches_do_not_divide_is_rejected():
    with pytest.raises(ValueError, match="cannot be split into 2"):
        parse(("1:*0.5",), 3, accumulation=2)


def test_parse_sizes_gives_the_image_size_of_each_epoch():
    sizes = batch_schedule.parse_sizes(["0:128", "18:160", "28:224"], 224)
    assert [sizes.at(e) for e in (0, 17, 18, 27, 28, 89)] == [128, 128, 160, 160, 224, 224]
    assert [batch_schedule.parse_sizes(["3:32"], 48).at(e) for e in (0, 2, 3)] == [48, 48, 32]
    assert batch_schedule.parse_sizes([], 224).at(7) == 224


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["0:128", "0:160"], "epoch 0 follows 0"),
        (["5:128", "3:160"], "epoch 3 follows 5"),
        (["0:0"], "at least 8"),
        (["0:-5"], "EPOCH:PIXELS"),
        (["128"], "EPOCH:PIXELS"),
        (["1.5:128"], "EPOCH:PIXELS"),
    ],
)
def test_parse_sizes_of_invalid_entries_is_rejected(entries, words):
    with pytest.raises(ValueError, match=words) as caught:
        batch_schedule.parse_sizes(entries, 224)
    assert "\n" not in str(caught.value)

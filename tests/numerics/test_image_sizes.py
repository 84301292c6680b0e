import pytest

from hybrid_imagenet.numerics import image_sizes


def test_sizes_by_epoch():
    sizes = image_sizes.parse(["0:128", "18:160", "28:224"], 224)
    assert [sizes.at(e) for e in (0, 17, 18, 27, 28, 89)] == [128, 128, 160, 160, 224, 224]
    assert [image_sizes.parse(["3:32"], 48).at(e) for e in (0, 2, 3)] == [48, 48, 32]
    assert image_sizes.parse([], 224).at(7) == 224


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
def test_mistakes_are_named(entries, words):
    with pytest.raises(ValueError, match=words) as caught:
        image_sizes.parse(entries, 224)
    assert "\n" not in str(caught.value)

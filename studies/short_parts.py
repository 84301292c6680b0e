"""Defines the ablation of the short recipe: all of its parts, and all but one.

It has the images, the network and the epochs of `questions`. The batch of 256 is as large a part of
the 12,500 images as 1,024 is of 50,000, and makes as many updates.
"""

from __future__ import annotations

from studies.base import Arm, Claim, Study
from studies.questions import BASE, GPU_IMAGES, GRADUAL

BATCH = 256
PARTS = {
    "softmax": ("binary loss", ("--loss=sigmoid",), ()),
    "sharp": ("BlurPool", ("--blurpool",), ()),
    "last_weights": ("averaged weights", ("--ema_decay=0.95", "--ema_every=5"), ()),
    "coupled": (
        "decoupled decay",
        ("--decoupled_decay", "--weight_decay=1e-3"),
        ("--weight_decay=5e-4",),
    ),
    "one_size": ("growing images", ("--image_size_schedule=0:20,8:24,12:28",), ()),
}
"""Name, flags and replacing flags of each part, by the arm that omits the part.

With momentum 0.9 and a rate of 0.2, a decay of 5e-4 in the gradient shrinks the weights in a step
as much as a decoupled decay of 1e-3.
"""


def _without(*absent: str) -> tuple[str, ...]:
    return tuple(
        flag for arm, (_, own, other) in PARTS.items() for flag in (other if arm in absent else own)
    )


SHORT_PARTS = Study(
    name="short-parts",
    title="The parts of the short recipe",
    source="",
    statement=(
        "Which parts of the short recipe are worth something? All of them, all but one, none; and"
        " all with mirrored images in validation."
    ),
    arms=(
        Arm("short", "all parts", _without()),
        *(Arm(arm, f"without {part}", _without(arm)) for arm, (part, _, _) in PARTS.items()),
        Arm("plain", "no part", _without(*PARTS)),
        Arm("mirrored", "all, mirrored images in validation", (*_without(), "--eval_flip")),
    ),
    claims=(
        *(Claim("short", arm, by_paper=False) for arm in PARTS if arm != "one_size"),
        Claim("short", "one_size", "equal", by_paper=False),  # it is there for the time
        Claim("short", "plain", by_paper=False),
        Claim("mirrored", "short", by_paper=False),
    ),
    notes=(
        (
            "No arm is tuned: all have the rate of 0.2 (effective 2), set before any run: that of "
            "flags/fashion_mnist.flags, scaled to the batch. A part may need another."
        ),
        (
            "A size of validation above that of training is left out: it makes up for random crops,"
            " which show objects larger than validation does; here training shows whole images."
        ),
        (
            "The average reaches back over some 20 of 781 updates, the size grows after 8 and 12 of"
            " 16 epochs."
        ),
    ),
    base=(
        *BASE,
        "--eval_split=validation",
        f"--virtual_gpus={BATCH // GPU_IMAGES}",
        "--optimizer=sgd",
        *GRADUAL,
        "--lr_schedule=poly",
        "--lr_power=1",
        "--warmup_epochs=2",
        "--lr=0.2",
    ),
)

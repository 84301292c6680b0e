"""Flags for the network, its initialization, normalization and precision."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option
from hybrid_imagenet.numerics.depths import DEPTHS, STEMS, WIDTH


@dataclasses.dataclass(frozen=True)
class Model:
    """Model and precision."""

    model: str = option(
        "resnet50",
        "Network; or MODULE:FUNCTION, called with num_classes and image_size, which returns a Keras model that gives "
        "logits.",
        choices=(*DEPTHS, "alexnet_bn"),
        function=True,
        basic=True,
    )
    init_from: str | None = option(
        None,
        "Start with the weights of a checkpoint, a run, or a file of torchvision or keras.applications; where the "
        "number of classes differs, the last layer starts with random weights.",
        basic=True,
    )
    freeze: tuple[str, ...] = option(
        (), "Do not train layers whose names start with one of these; their statistics stay too."
    )
    model_width: int = option(
        WIDTH, "Channels of a ResNet's first stage; each later stage has twice as many.", unit="channels", minimum=1
    )
    stem: str = option(
        "imagenet",
        "First layer of a ResNet: 7x7 with stride 2 and a pooling, or for small images 3x3, also with stride 2.",
        choices=STEMS,
    )
    blurpool: bool = option(
        False, "Blur the features of a ResNet before each stride (Zhang 2019): less aliasing for some time."
    )
    image_size: int = option(224, "Side of the square network input.", unit="pixels", minimum=8, basic=True)
    image_size_schedule: tuple[str, ...] = option(
        (),
        "Size of training images by epoch: entries EPOCH:PIXELS, epochs counted from 0, as in 0:128,18:160,28:224; "
        "validation is at --image_size, or --eval_image_size, throughout.",
    )
    initializer: str = option(
        "kaiming", "Convolution weights (Lu et al. §2.2.3, Table 3.5).", choices=("kaiming", "xavier", "gaussian")
    )
    zero_last_gamma: bool = option(True, "Start the last BN scale of each residual block at 0 (Lu et al., Table 3.6).")
    batch_norm: str = option(
        "last",
        "Statistics used for inference: of the last iteration, averaged over all GPUs (Lu et al.), a moving "
        "average, or precise ones from frozen weights.",
        choices=("last", "moving", "precise"),
    )
    sync_batch_norm: bool = option(False, "Training statistics over all GPUs in every step (Lu et al., Table 3.4).")
    bn_group: int = option(
        1,
        "Training statistics over this many neighbouring GPUs: 1 is each by itself, all of them is --sync_batch_norm.",
        unit="GPUs",
        minimum=1,
    )
    batch_norm_momentum: float = option(0.9, "Decay of the moving average.", minimum=0, maximum=1)
    batch_norm_epsilon: float = option(1e-5, "Added to the variance.", minimum=0)
    persistent_batch_norm: bool = option(
        True,
        "On GPUs, normalize in the layout of the convolutions with cuDNN's kernels of one pass, whose sums vary in "
        "order; never with --deterministic.",
    )
    fuse_relu_gradients: bool = option(
        False,
        "On GPUs in FP16, have TensorFlow fuse the gradients of ReLU and normalization; not seen on a GPU yet, so "
        "`bench gpu` tries it beside the step without.",
    )
    precise_batch_norm_batches: int = option(16, "Batches per GPU behind precise statistics.", minimum=1)
    precision: str = option(
        "auto",
        "Compute type; auto is mixed_float16 on a GPU, mixed_bfloat16 on a CPU with BF16 instructions, else float32.",
        choices=("auto", "float32", "mixed_float16", "mixed_bfloat16"),
        basic=True,
    )
    loss_scale: str = option(
        "auto", "dynamic, a number, or auto: dynamic under mixed_float16, else 1 (dynamic begins at 2**15)."
    )
    max_skipped_steps: int = option(
        50, "Stop after this many skipped steps in a row (non-finite gradients).", unit="steps", minimum=1
    )
    jit_compile: bool = option(
        False, "Compile forward and backward with XLA; gradients are then reduced after them, not beside them."
    )
    recompute: bool = option(
        False, "Compute activations inside residual blocks again in the backward pass: less memory, a slower step."
    )

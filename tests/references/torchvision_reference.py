"""Oracle for torchvision's ResNets: state dictionaries, and the forward pass by their names.

Names and layouts are as in `torchvision.models.resnet`: kernels [out, in, k, k], classifier
[classes, features].
"""

import numpy as np

from tests.references import resnet_reference
from tests.references.resnet_reference import BLOCKS


def state_dict(name, classes, seed=0):
    """Returns random weights under torchvision's names.

    They are scaled so that activations neither vanish nor grow.
    """
    rng = np.random.default_rng(seed)
    tensors = {}

    def conv(key, outputs, inputs, size):
        deviation = (2 / (inputs * size * size)) ** 0.5
        tensors[f"{key}.weight"] = rng.normal(0, deviation, (outputs, inputs, size, size)).astype(
            np.float32
        )

    def norm(key, channels):
        tensors[f"{key}.weight"] = rng.uniform(0.5, 1.0, channels).astype(np.float32)
        tensors[f"{key}.bias"] = rng.normal(0, 0.2, channels).astype(np.float32)
        tensors[f"{key}.running_mean"] = rng.normal(0, 0.2, channels).astype(np.float32)
        tensors[f"{key}.running_var"] = rng.uniform(0.7, 1.5, channels).astype(np.float32)
        tensors[f"{key}.num_batches_tracked"] = np.array(17, np.int64)

    per_block, counts = BLOCKS[name]
    conv("conv1", 64, 3, 7)
    norm("bn1", 64)
    inputs = 64
    for stage, count in enumerate(counts):
        width = 64 * 2**stage
        outputs = width * (4 if per_block == 3 else 1)
        for block in range(count):
            prefix = f"layer{stage + 1}.{block}"
            shapes = [(width, inputs, 3), (width, width, 3)]
            if per_block == 3:
                shapes = [(width, inputs, 1), (width, width, 3), (outputs, width, 1)]
            for number, shape in enumerate(shapes, start=1):
                conv(f"{prefix}.conv{number}", *shape)
                norm(f"{prefix}.bn{number}", shape[0])
            if block == 0 and inputs != outputs:
                conv(f"{prefix}.downsample.0", outputs, inputs, 1)
                norm(f"{prefix}.downsample.1", outputs)
            inputs = outputs
    tensors["fc.weight"] = rng.normal(0, 0.05, (classes, inputs)).astype(np.float32)
    tensors["fc.bias"] = rng.normal(0, 0.5, classes).astype(np.float32)
    return tensors


def logits(name, tensors, images):
    """Returns class scores of normalized images [b, h, w, 3] in float64, as in ResNet v1.5."""
    per_block, counts = BLOCKS[name]

    def unit(conv, norm):
        kernel = tensors[f"{conv}.weight"].astype(np.float64).transpose(2, 3, 1, 0)
        parameters = (
            tensors[f"{norm}.{key}"] for key in ("weight", "bias", "running_mean", "running_var")
        )
        return (kernel, *(value.astype(np.float64) for value in parameters))

    units = [unit("conv1", "bn1")]
    for stage, count in enumerate(counts, start=1):
        for block in range(count):
            prefix = f"layer{stage}.{block}"
            if f"{prefix}.downsample.0.weight" in tensors:
                units.append(unit(f"{prefix}.downsample.0", f"{prefix}.downsample.1"))
            units += [unit(f"{prefix}.conv{n}", f"{prefix}.bn{n}") for n in range(1, per_block + 1)]
    classifier = tensors["fc.weight"].T.astype(np.float64), tensors["fc.bias"]
    return resnet_reference.logits(name, images, units, classifier)

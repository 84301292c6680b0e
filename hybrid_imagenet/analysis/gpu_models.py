"""The GPUs whose training speed is published: what their makers say of them, and how they are recognized."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
      title: its name.
      capability: compute capability.
      flops: largest floating-point operations per second of a matrix product, by precision (`fp16`, also BF16 where
        the GPU has it; `tf32`; `fp32`), without sparsity.
      bandwidth: bytes per second of its memory.
    """

    title: str
    capability: tuple[int, int]
    flops: dict[str, float]
    bandwidth: float

    @property
    def has_bf16(self) -> bool:
        """Whether its matrix units take BF16."""
        return self.capability >= (8, 0)

    @property
    def memory_limit(self) -> float:
        """Images per second at which ResNet-50 in FP16, 224 pixels, would move its bytes at 90 % of the bandwidth."""
        return 0.9 * self.bandwidth / _BYTES_PER_IMAGE


_T, _G = 1e12, 1e9
_BYTES_PER_IMAGE = 98e9 / 256  # counted in the traced step, with normalization and ReLU in one pass
# NVIDIA's data sheets of the Tesla V100 and P40, the A100, H100, H200 and L40S. A P40 computes FP16 at 1/64 of FP32, so
# cuDNN computes in FP32 there.
GPUS = {
    "p40": Gpu("Tesla P40", (6, 1), {"fp32": 11.76 * _T}, 346 * _G),
    "v100": Gpu("V100 SXM2", (7, 0), {"fp16": 125 * _T, "fp32": 15.7 * _T}, 900 * _G),
    "a100": Gpu("A100 SXM 40 GB", (8, 0), {"fp16": 312 * _T, "tf32": 156 * _T, "fp32": 19.5 * _T}, 1555 * _G),
    "a100-80": Gpu("A100 SXM 80 GB", (8, 0), {"fp16": 312 * _T, "tf32": 156 * _T, "fp32": 19.5 * _T}, 2039 * _G),
    "h100": Gpu("H100 SXM", (9, 0), {"fp16": 989.4 * _T, "tf32": 494.7 * _T, "fp32": 66.9 * _T}, 3350 * _G),
    "l40s": Gpu("L40S", (8, 9), {"fp16": 362 * _T, "tf32": 183 * _T, "fp32": 91.6 * _T}, 864 * _G),
    "h200": Gpu("H200 SXM", (9, 0), {"fp16": 989.4 * _T, "tf32": 494.7 * _T, "fp32": 66.9 * _T}, 4800 * _G),
}


def recognize(name: str, memory_mib: float) -> str | None:
    """Returns the key in GPUS of a device by its name in nvidia-smi and its memory; None for one that is not there.

    Variants with a slower bus, such as `NVIDIA A100-PCIE-40GB`, count as the GPU, whose speed they come near.
    """
    for key in ("p40", "v100", "h200", "h100", "l40s"):
        if re.search(rf"\b{key.upper()}\b", name):
            return key
    if re.search(r"\bA100\b", name):
        return "a100-80" if memory_mib > 50_000 else "a100"
    return None


def arithmetic(gpu: Gpu, precision: str) -> str:
    """Returns the kind of arithmetic (a key of `Gpu.flops`) in which a GPU computes a precision of the program.

    TensorFlow computes FP32 convolutions as TF32 where the GPU can.

    Raises:
      ValueError: for mixed_bfloat16 on a GPU without it.
    """
    if precision == "mixed_bfloat16" and not gpu.has_bf16:
        raise ValueError(f"{gpu.title} has no BF16: take mixed_float16, or float32 on a P40")
    for kind in ("fp16",) if precision != "float32" else ("tf32",):
        if kind in gpu.flops:
            return kind
    return "fp32"

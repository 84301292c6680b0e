"""Predicts images per second of one GPU from the traced training step, beside what is published for it."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from hybrid_imagenet.analysis import gpu_models, gpu_roofline
from hybrid_imagenet.analysis.gpu_roofline import Prediction
from hybrid_imagenet.errors import UserError

_PRECISIONS = {"fp16": "mixed_float16", "bf16": "mixed_bfloat16", "fp32": "float32"}


@dataclasses.dataclass(frozen=True)
class Single:
    """A predicted step of one GPU.

    Attributes:
      gpu: a key of `gpu_models.GPUS`.
      model: the network.
      arithmetic: of convolutions, a key of `Gpu.flops`.
      batch: images per step.
      now: the step as it is.
      each: with an update of each variable by itself.
      first: the same with normalization transposed to NCHW, as the program first was; in FP16 only.
    """

    gpu: str
    model: str
    arithmetic: str
    batch: int
    now: Prediction
    each: Prediction
    first: Prediction | None

    @property
    def images_per_second(self) -> float:
        """Of the step as it is."""
        return self.batch / self.now.step_seconds


def predict(gpu: str, model: str, batch: int, precision: str | None, image_size: int = 224) -> Single:
    """Traces the step of a network and predicts its time on a GPU.

    Args:
      gpu: a key of `gpu_models.GPUS`.
      model: a network.
      batch: images per step.
      precision: fp16, bf16 or fp32; None for fp16, or fp32 on a GPU without fast FP16.
      image_size: pixels.

    Raises:
      UserError: for a precision that the GPU does not have.
    """
    facts = gpu_models.GPUS[gpu]
    asked = _PRECISIONS[precision or ("fp16" if "fp16" in facts.flops else "fp32")]
    try:
        arithmetic = gpu_models.arithmetic(facts, asked)
    except ValueError as error:
        raise UserError(f"--precision={precision}: {error}") from None
    if "tensorflow" not in sys.modules:  # a plan takes no GPU from those who train
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from hybrid_imagenet import config as configuration
    from hybrid_imagenet.tools.plan import training_graph

    flags = [
        "--dataset=synthetic_tensors",
        f"--model={model}",
        f"--per_gpu_batch={batch}",
        f"--image_size={image_size}",
    ]
    config = configuration.resolve(flags)
    graphs = training_graph.trace(config, asked)
    half = asked == "mixed_float16"

    def work(graph: Any, fuses: bool) -> list[gpu_roofline.Work]:
        return training_graph.works(graph, config.optimizer, fuses=fuses, transposes=half and not fuses)

    step, each = work(graphs.step, half), work(graphs.each, half)
    without_update = [w for w in step if w.kind != gpu_roofline.UPDATE]
    unfused = [w for w in work(graphs.step, False) if w.kind != gpu_roofline.UPDATE] if half else []
    return Single(
        gpu=gpu,
        model=model,
        arithmetic=arithmetic,
        batch=batch,
        now=gpu_roofline.predict(step, facts, arithmetic),
        each=gpu_roofline.predict([*without_update, *each], facts, arithmetic),
        first=gpu_roofline.predict([*unfused, *each], facts, arithmetic) if half else None,
    )


def lines(single: Single) -> list[str]:
    """The prediction as text, with what is published."""
    gpu, now = gpu_models.GPUS[single.gpu], single.now
    text = [
        f"{single.model}, batch {single.batch}, {single.arithmetic.upper()} on one {gpu.title}: "
        f"{single.images_per_second:,.0f} images/s predicted, bound by {now.bound}",
        f"{'':22}{'kernels':>8}{'GFLOP':>9}{'GB':>8}{'ms':>9}",
    ]
    for kind, row in now.rows.items():
        if row.launches:
            text.append(
                f"{kind:22}{row.launches:8.0f}{row.flops / 1e9:9.1f}{row.bytes / 1e9:8.2f}{1e3 * row.seconds:9.2f}"
            )
    text.append(f"{'step':22}{sum(r.launches for r in now.rows.values()):8.0f}{'':17}{1e3 * now.step_seconds:9.2f}")
    text.append(
        f"after the last all-reduce: {now.late_launches:.0f} kernels, {1e3 * now.late_seconds:.2f} ms; with an update "
        f"of each variable {single.each.late_launches:.0f} kernels, {1e3 * single.each.late_seconds:.2f} ms, "
        f"{single.batch / single.each.step_seconds:,.0f} images/s"
    )
    if single.first is not None:
        text.append(
            f"the same with normalization in NCHW: {single.batch / single.first.step_seconds:,.0f} images/s, "
            f"{1e3 * single.first.rows[gpu_roofline.LAYOUT].seconds:.1f} ms of it transpositions"
        )
    if single.model == "resnet50":
        for speed in gpu_roofline.published(single.gpu, single.arithmetic):
            place = "alone" if speed.gpus == 1 else f"of {speed.gpus}"
            text.append(
                f"published: {speed.images_per_second:,.0f} images/s {place}, batch {speed.batch}: {speed.source}"
            )
    return text


def as_json(single: Single) -> dict[str, Any]:
    """The prediction for a JSON file."""
    return dataclasses.asdict(single) | {"images_per_second": single.images_per_second}

"""Trains ResNet v1.5 of torchvision's layout with PyTorch, channels_last and autocast."""

from __future__ import annotations

import sys

from benchmarks._step_protocol import send, serve, settings
from hybrid_imagenet.models.depths import BASIC, DEPTHS

try:
    import torch
    from torch import nn
except ImportError:
    send(
        skipped=(
            f"PyTorch is not installed for {sys.executable}. Pass a Python that has it, with"
            " --torch_python=PYTHON for `step` or --python=PYTHON for `peer`."
        )
    )
    sys.exit(0)


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias and its batch normalization."""
    return [
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Block(nn.Module):
    """A residual block: 3x3 and 3x3, or 1x1, 3x3 and 1x1, each with batch normalization.

    There is a projection if the shape changes.
    """

    def __init__(self, inputs: int, width: int, stride: int, basic: bool) -> None:
        """`inputs` channels in; `width` out or, if not `basic`, four times as many."""
        super().__init__()
        outputs = width if basic else 4 * width
        if basic:
            layers = [
                *conv_norm(inputs, width, 3, stride),
                nn.ReLU(inplace=True),
                *conv_norm(width, width, 3),
            ]
        else:
            layers = [*conv_norm(inputs, width, 1), nn.ReLU(inplace=True)]
            layers += [
                *conv_norm(width, width, 3, stride),
                nn.ReLU(inplace=True),
                *conv_norm(width, outputs, 1),
            ]
        self.layers = nn.Sequential(*layers)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Sequential(*conv_norm(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, inputs, h, w] to [b, outputs, h / stride, w / stride]."""
        y = self.layers(x)
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


def resnet(name: str, width: int, stem: str, num_classes: int) -> nn.Module:
    """ResNet v1.5 whose first stage has `width` channels."""
    layers = conv_norm(3, width, 7 if stem == "imagenet" else 3, 1 if stem == "3x3" else 2)
    layers += [nn.ReLU(inplace=True)] + ([nn.MaxPool2d(3, 2, 1)] if stem == "imagenet" else [])
    inputs, basic = width, name in BASIC
    for stage, count in enumerate(DEPTHS[name]):
        channels = width * 2**stage
        for index in range(count):
            layers.append(Block(inputs, channels, 2 if stage > 0 and index == 0 else 1, basic))
            inputs = channels if basic else 4 * channels
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)
    )


def main() -> None:
    """Builds the model and serves steps, on a GPU where PyTorch sees one."""
    options = settings()
    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # TensorFlow also tries several of cuDNN's kernels, and uses TF32 by default.
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    shape = (options["model"], options["width"], options["stem"], options["num_classes"])
    model = resnet(*shape).to(device, memory_format=torch.channels_last).train()
    if options.get("compiled"):
        model.compile()
    size = options["image_size"]
    images = torch.randn(options["batch"], 3, size, size).to(
        device, memory_format=torch.channels_last
    )
    labels = torch.randint(0, options["num_classes"], (options["batch"],), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    kinds = {
        "float32": torch.float32,
        "mixed_bfloat16": torch.bfloat16,
        "mixed_float16": torch.float16,
    }
    kind = kinds[options["precision"]]
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda" and kind == torch.float16)

    def run(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, dtype=kind, enabled=kind != torch.float32):
                logits = model(images)
            loss = nn.functional.cross_entropy(logits.float(), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if device == "cuda":
            torch.cuda.synchronize()
        return loss.item()

    serve(run, name="torch", version=f"torch {torch.__version__}")


main()

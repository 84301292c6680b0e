"""Contestant: PyTorch, ResNet-50 v1.5 laid out as in torchvision, channels_last, eager, autocast for BF16."""

from __future__ import annotations

import sys

from step_protocol import say, serve, settings

try:
    import torch
    from torch import nn
except ImportError:
    say(skipped="PyTorch is not installed here; name an interpreter that has it with --torch_python=PATH")
    sys.exit(0)


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, 1x1, each with batch normalization; projection where the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        """`inputs` channels in, four times `width` out."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, inputs, h, w] to [b, 4 width, h / stride, w / stride]."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


def resnet50() -> nn.Module:
    """ResNet-50 with 1000 classes."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for index in range(count):
            layers.append(Bottleneck(inputs, width, 2 if stage > 0 and index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def main() -> None:
    """Builds the model and serves steps."""
    options = settings()
    torch.set_num_threads(options["threads"])
    torch.manual_seed(0)
    model = resnet50().to(memory_format=torch.channels_last).train()
    size = options["image_size"]
    images = torch.randn(options["batch"], 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (options["batch"],))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    kinds = {"float32": torch.float32, "mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}
    kind = kinds[options["precision"]]

    def run(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=kind, enabled=kind != torch.float32):
                logits = model(images)
            loss = nn.functional.cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()
        return loss.item()

    serve(run, name="torch", version=f"torch {torch.__version__}")


main()

"""Networks for 32x32 images.

The paper's WRN-16-4 and VGG16-BN, and a ResNet with a norm behind every convolution.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class PreActivationBlock(nn.Module):
    """Two convolutions, each behind BN-ReLU; the shortcut starts from the activated input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, outputs, stride=stride)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = conv(outputs, outputs)
        changes = stride != 1 or inputs != outputs
        self.shortcut = conv(inputs, outputs, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        activated = functional.relu(self.bn1(x))
        residual = self.conv2(functional.relu(self.bn2(self.conv1(activated))))
        return residual + (x if self.shortcut is None else self.shortcut(activated))


class Block(nn.Module):
    """The usual residual block: every convolution is followed by a batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(inputs, outputs, stride=stride), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(conv(outputs, outputs), nn.BatchNorm2d(outputs))
        changes = stride != 1 or inputs != outputs
        self.shortcut = (
            nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
            if changes
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        residual = self.second(functional.relu(self.first(x)))
        return functional.relu(residual + (x if self.shortcut is None else self.shortcut(x)))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3))


def wide_resnet(depth: int, width: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [conv(3, 16)]
    channels = 16
    for stage, base in enumerate((16, 32, 64)):
        for index in range((depth - 4) // 6):
            layers.append(
                PreActivationBlock(channels, base * width, 2 if stage and not index else 1)
            )
            channels = base * width
    return nn.Sequential(
        *layers, nn.BatchNorm2d(channels), nn.ReLU(), Mean(), nn.Linear(channels, classes)
    )


def resnet(width: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for factor, stride in ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1)):
        layers.append(Block(channels, factor * width, stride))
        channels = factor * width
    return nn.Sequential(*layers, Mean(), nn.Linear(channels, classes))


def resnet18(classes: int) -> nn.Sequential:
    """ResNet-18 with the stem that is usual for 32x32 images."""
    layers: list[nn.Module] = [conv(3, 64), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for outputs in (64, 128, 256, 512):
        layers += [Block(channels, outputs, 1 if outputs == 64 else 2), Block(outputs, outputs, 1)]
        channels = outputs
    return nn.Sequential(*layers, Mean(), nn.Linear(channels, classes))


def vgg16_bn(classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for outputs in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if outputs:
            layers += [conv(channels, outputs), nn.BatchNorm2d(outputs), nn.ReLU()]
            channels = outputs
        else:
            layers.append(nn.MaxPool2d(2))
    head = [
        nn.Flatten(),
        nn.Linear(512, 512, bias=False),
        nn.BatchNorm1d(512),
        nn.ReLU(),
        nn.Linear(512, classes),
    ]
    return nn.Sequential(*layers, *head)


def build(name: str, classes: int) -> nn.Module:
    """``vgg16bn``, ``resnet18``, ``wrnD_K`` (depth, width) or ``resnetW`` (first width)."""
    if name in {"vgg16bn", "resnet18"}:
        network = vgg16_bn(classes) if name == "vgg16bn" else resnet18(classes)
    elif found := re.fullmatch(r"wrn(\d+)_(\d+)", name):
        network = wide_resnet(int(found[1]), int(found[2]), classes)
    elif found := re.fullmatch(r"resnet(\d+)", name):
        network = resnet(int(found[1]), classes)
    else:
        raise ValueError(
            "model must be vgg16bn, resnet18, wrnD_K such as wrn16_4, or resnetW such as "
            f"resnet64, got {name!r}"
        )
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return network

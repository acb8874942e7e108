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
    """Two convolutions, each behind BN-ReLU.

    A shortcut of the activated input where the shape changes.
    """

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


class Attention(nn.Module):
    """Attention with separate maps for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """On patches of four by four."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, 4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class GPT(nn.Module):
    """A causal transformer on bytes."""

    def __init__(self, width: int = 256, depth: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(0.02 * torch.randn(1, length, width))
        blocks = (TransformerBlock(width, 4, causal=True) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.place[:, : x.shape[1]])))


def wide_head(classes: int) -> list[nn.Module]:
    """The head of VGG16 for ImageNet."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (512, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(), nn.Dropout(0.5)]
    return [*layers, nn.Linear(4096, classes)]


def build(name: str, classes: int) -> nn.Module:
    """A network by name.

    ``vgg16bn`` (``vgg16bn_4096`` with the head of VGG16 for ImageNet), ``resnet18``, ``wrnD_K``
    (depth, width), ``resnetW`` (width of the first stage, 14 layers) or ``vitW_D`` (width, depth).
    """
    if found := re.fullmatch(r"vit(\d+)_(\d+)", name):
        return VisionTransformer(int(found[1]), int(found[2]), classes)
    if name == "vgg16bn_4096":
        layers = list(vgg16_bn(classes))
        network = nn.Sequential(*layers[:-5], *wide_head(classes))
    elif name in {"vgg16bn", "resnet18"}:
        network = vgg16_bn(classes) if name == "vgg16bn" else resnet18(classes)
    elif found := re.fullmatch(r"wrn(\d+)_(\d+)", name):
        network = wide_resnet(int(found[1]), int(found[2]), classes)
    elif found := re.fullmatch(r"resnet(\d+)", name):
        network = resnet(int(found[1]), classes)
    else:
        raise ValueError(
            "model must be vgg16bn, vgg16bn_4096, resnet18, wrnD_K such as wrn16_4, resnetW such "
            f"as resnet64, or vitW_D such as vit256_6, got {name!r}"
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

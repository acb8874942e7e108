"""The two convolutional networks of the paper's deep-learning experiments, in plain PyTorch.

``wide_resnet`` is the pre-activation wide residual network (2.75 M parameters for depth 16 and width 4); ``vgg16_bn``
is VGG16 with batch normalisation and the head Linear(512, 512)-BN-ReLU-Linear(512, classes) (15.0 M parameters).
Both take images of 3×32×32. Dropout is where others have it: between the two convolutions of a residual block
(Zagoruyko and Komodakis), and behind the poolings of VGG (Cho and Lee).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

NetworkType = TypeVar("NetworkType", bound=nn.Module)


class PreActivationBlock(nn.Module):
    """Two 3×3 convolutions, each behind BN-ReLU, and a shortcut of the activated input where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """The block's output.

        Args:
            x: feature maps.

        Returns:
            Feature maps of ``outputs`` channels.
        """
        activated = functional.relu(self.bn1(x))
        residual = self.conv2(self.dropout(functional.relu(self.bn2(self.conv1(activated)))))
        return residual + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """A pre-activation wide residual network for 32×32 images."""

    def __init__(self, depth: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        layers: list[nn.Module] = []
        channels = 16
        for stage, base in enumerate((16, 32, 64)):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(PreActivationBlock(channels, base * width, stride, dropout))
                channels = base * width
        self.blocks = nn.Sequential(*layers)
        self.bn = nn.BatchNorm2d(channels)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images.

        Args:
            x: images of shape (N, 3, H, W).

        Returns:
            Logits of shape (N, classes).
        """
        x = functional.relu(self.bn(self.blocks(self.conv(x))))
        return self.classifier(x.mean(dim=(2, 3)))


def wide_resnet(depth: int = 16, width: int = 4, *, classes: int = 10, dropout: float = 0.0) -> WideResNet:
    """Build a pre-activation wide residual network.

    Args:
        depth: 6k + 4 for k blocks in each of the three stages.
        width: the factor on the channels 16, 32 and 64.
        classes: the number of logits.
        dropout: the probability with which an activation between the convolutions of a block is dropped.

    Returns:
        A freshly initialised network.

    Raises:
        ValueError: if the depth is not of that form, the width or the number of classes is not positive, or the
            probability is none.

    Example:
        >>> net = wide_resnet(16, 4)
        >>> round(sum(p.numel() for p in net.parameters()) / 1e6, 2)
        2.75
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6k + 4 with k ≥ 1, such as 16 or 28, got {depth}")
    if width < 1 or classes < 1:
        raise ValueError(f"width and classes must be positive, got {width} and {classes}")
    return _initialise(WideResNet(depth, width, classes, _probability(dropout)))


VGG16_CHANNELS = (64, 64, None, 128, 128, None, 256, 256, 256, None, 512, 512, 512, None, 512, 512, 512, None)


def vgg16_bn(*, classes: int = 10, dropout: float = 0.0) -> nn.Sequential:
    """Build VGG16 with batch normalisation and the paper's head, for 32×32 images.

    Args:
        classes: the number of logits.
        dropout: the probability with which an activation behind a pooling is dropped.

    Returns:
        A freshly initialised network.

    Raises:
        ValueError: if the number of classes is not positive, or the probability is none.

    Example:
        >>> net = vgg16_bn()
        >>> round(sum(p.numel() for p in net.parameters()) / 1e6, 1)
        15.0
    """
    if classes < 1:
        raise ValueError(f"classes must be positive, got {classes}")
    layers: list[nn.Module] = []
    channels, probability = 3, _probability(dropout)
    for width in VGG16_CHANNELS:
        if width is None:
            layers += [nn.MaxPool2d(2), nn.Dropout(probability)] if probability else [nn.MaxPool2d(2)]
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    head = [nn.Flatten(), nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, classes)]
    return _initialise(nn.Sequential(nn.Sequential(*layers), nn.Sequential(*head)))


def _probability(dropout: float) -> float:
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be a probability below 1, got {dropout}")
    return dropout


def _initialise(network: NetworkType) -> NetworkType:
    """Normal weights of variance 2/fan_out for convolutions, 1/fan_in for matrices, zero biases."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    return network

"""Pairs of images made into one, by weight (mixup) or by a patch of the other (cutmix).

A batch x is mixed with itself in reverse order x', and its loss L with that of the labels y' in reverse order,

    x ← m x + (1 - m) x',        L ← s L(y) + (1 - s) L(y').

Of mixup, m = s ~ Beta(α, α) (Zhang, Cissé, Dauphin and Lopez-Paz, arXiv 1710.09412). Of cutmix, m is 0 in a box of the
image and 1 elsewhere, and s is the share of the image outside (Yun, Han, Oh, Chun, Choe and Yoo, arXiv 1905.04899):
with a probability p, a box of sides √(1 - u) of the image's, u uniform, around a uniform pixel, cut off at the border.
There is one draw per batch, all those of an epoch from seed and epoch alone; the last epochs may be left unmixed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fisherfold.training.options import Settings


class Mixing:
    """How the batches of an epoch are mixed; filled anew for every epoch, in the same memory.

    Args:
        settings: ``mixup`` is α, ``cutmix`` is p; with neither, or after ``mixed_until``, images stay as they are.
        steps: batches per epoch.
        side: of an image, in pixels.
        seed: of the run.
        device: of the images.

    Attributes:
        shares: of a batch in what it is mixed with, per step.
        boxes: per step, the rows and columns (first, end, first, end) that are taken from the other images.
    """

    def __init__(self, settings: Settings, *, steps: int, side: int, seed: int, device: torch.device) -> None:
        self.settings, self.seed = settings, seed
        self.shares = torch.ones(steps, device=device)
        self.boxes = torch.zeros(steps, 4, dtype=torch.int64, device=device)
        self.pixels = torch.arange(side, device=device)

    def __bool__(self) -> bool:
        """Whether anything is mixed."""
        return bool(self.settings.mixup or self.settings.cutmix)

    def draw(self, epoch: int) -> None:
        """Draw what the batches of an epoch are mixed by.

        Args:
            epoch: its number.
        """
        if not self.settings.mixes_at(epoch):
            self.shares.fill_(1)
            self.boxes.zero_()
            return
        draws = np.random.default_rng([abs(self.seed), epoch, self.seed < 0])
        steps, side = len(self.shares), len(self.pixels)
        if self.settings.mixup:
            shares = draws.beta(self.settings.mixup, self.settings.mixup, size=steps)
            self.shares.copy_(torch.from_numpy(shares))
        if self.settings.cutmix:
            boxes = draw_boxes(draws, steps, side, self.settings.cutmix)
            inside = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
            self.boxes.copy_(torch.from_numpy(boxes))
            self.shares.copy_(torch.from_numpy(1 - inside / side**2))

    def share(self, step: Tensor) -> Tensor:
        """The share s of a step.

        Args:
            step: its number, on the device.

        Returns:
            A number there; 1 where nothing is mixed.
        """
        return torch.take(self.shares, step)

    def mixed(self, images: Tensor, step: Tensor) -> Tensor:
        """The images of a step, or of a part of it, mixed among themselves.

        Args:
            images: (n, channels, side, side).
            step: its number, on the device.

        Returns:
            Images of the same shape.
        """
        if self.settings.mixup:
            return torch.lerp(images.flip(0), images, self.share(step))
        if self.settings.cutmix:
            top, bottom, left, right = self.boxes.index_select(0, step.reshape(1)).unbind(dim=1)
            rows = (self.pixels >= top) & (self.pixels < bottom)
            columns = (self.pixels >= left) & (self.pixels < right)
            return torch.where(rows[:, None] & columns, images.flip(0), images)
        return images


def draw_boxes(draws: np.random.Generator, count: int, side: int, probability: float) -> np.ndarray:
    """Boxes of cutmix.

    Args:
        draws: where chance comes from.
        count: how many.
        side: of an image, in pixels.
        probability: with which there is a box.

    Returns:
        int64 (count, 4): first row, end of the rows, first column, end of the columns; all equal where there is none.
    """
    half = (side * np.sqrt(1 - draws.uniform(size=count)) / 2).astype(np.int64)
    centre = draws.integers(side, size=(2, count))
    half[draws.uniform(size=count) >= probability] = 0
    first, end = np.clip(centre - half, 0, side), np.clip(centre + half, 0, side)
    return np.stack([first[0], end[0], first[1], end[1]], axis=1)

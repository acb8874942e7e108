"""CIFAR on the device: all images resident as bytes, a whole epoch permuted, cropped and flipped at once.

All randomness of an epoch comes from (seed, epoch) on the CPU, so that a run resumes at any epoch and sees the same
images on every device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fisherfold import datasets

PADDING = 4
SPLIT_SEED = 20_260
MEANS = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
DEVIATIONS = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}


@cache
def images_of(dataset: str) -> Any:
    """The images of a data set, read once per process and its children."""
    return datasets.load_images(dataset)


class Pool:
    """Training images and those that judge: the test images, or a tenth of the training images left out."""

    def __init__(self, dataset: str, *, device: str, split: str = "validation", images: int | None = None) -> None:
        data = images_of(dataset)
        pixels, labels, judged, judged_labels = data.train_images, data.train_labels, data.test_images, data.test_labels
        if split == "validation":
            order = np.random.default_rng(SPLIT_SEED).permutation(len(pixels))
            out, kept = order[: len(pixels) // 10], np.sort(order[len(pixels) // 10 :])
            judged, judged_labels, pixels, labels = pixels[out], labels[out], pixels[kept], labels[kept]
        if images is not None:
            pixels, labels = pixels[:images], labels[:images]
            judged, judged_labels = judged[: max(1, images // 5)], judged_labels[: max(1, images // 5)]
        border = ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0))
        self.padded = torch.from_numpy(np.pad(pixels, border)).to(device)
        self.labels = torch.from_numpy(labels.astype(np.int64)).to(device)
        self.judged = torch.from_numpy(np.ascontiguousarray(judged)).to(device)
        self.judged_labels = torch.from_numpy(judged_labels.astype(np.int64)).to(device)
        self.mean = 255 * torch.tensor(MEANS[dataset], device=device)
        self.deviation = 255 * torch.tensor(DEVIATIONS[dataset], device=device)
        self.classes = 100 if dataset == "cifar100" else 10

    def __len__(self) -> int:
        return len(self.padded)

    def epoch(self, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        generator, n = torch.Generator().manual_seed(1_000_003 * seed + epoch), len(self)
        order = torch.randperm(n, generator=generator)
        corners = torch.randint(2 * PADDING + 1, (n, 2), generator=generator)
        flips = torch.randint(2, (n, 1), generator=generator)
        order, corners, flips = (t.to(self.padded.device, non_blocking=True) for t in (order, corners, flips))
        steps = torch.arange(32, device=self.padded.device)
        columns = torch.where(flips == 1, 31 - steps, steps) + corners[:, 1:]
        rows = steps + corners[:, :1]
        return self.padded[order[:, None, None], rows[:, :, None], columns[:, None, :]], self.labels[order]

    def normalised(self, images: Tensor) -> Tensor:
        return ((images.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)

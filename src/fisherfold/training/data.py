"""CIFAR on the device: all images resident as bytes, a whole epoch augmented at once.

An epoch is a permutation of the images, each cropped from its zero-padded copy at a random offset and flipped with
probability one half; all three are drawn from (seed, epoch) on the CPU, so that a run can be resumed at any epoch and
sees the same images on every device.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fisherfold.datasets import Images, load_images

PADDING = 4
SPLIT_SEED = 20_260
MEANS = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
DEVIATIONS = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}


@dataclass(frozen=True)
class ImagePool:
    """Images to train on and to judge by, on one device; runs side by side share it.

    Attributes:
        dataset: cifar10 or cifar100.
        split: ``"test"`` (all training images; judged on the test images) or ``"validation"`` (judged on training
            images that are left out).
        padded: uint8 (n, 40, 40, 3), the training images with a black border.
        labels: int64 (n,).
        judged: uint8 (m, 32, 32, 3).
        judged_labels: int64 (m,).
        mean: per channel, in units of a byte.
        deviation: per channel, in units of a byte.
    """

    dataset: str
    split: str
    padded: Tensor
    labels: Tensor
    judged: Tensor
    judged_labels: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def load(
        cls,
        dataset: str,
        *,
        device: str | torch.device = "cpu",
        split: str = "test",
        images: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> ImagePool:
        """Read a data set and put it on a device.

        Args:
            dataset: cifar10 or cifar100.
            device: where to.
            split: ``"test"`` or ``"validation"``.
            images: only so many training images, and a fifth as many to judge by; all if not given.
            folder: where the data are, if not where ``fisherfold datasets`` finds them.

        Returns:
            The pool.

        Raises:
            ValueError: if the data set, the split or the number of images is not one of those.
        """
        if dataset not in MEANS:
            raise ValueError(f"dataset must be one of {', '.join(MEANS)}, got {dataset!r}")
        data = load_images(dataset, folder=folder, checked=True)
        return cls.of(data, dataset, device=device, split=split, images=images)

    @classmethod
    def of(
        cls, data: Images, dataset: str, *, device: str | torch.device = "cpu", split: str = "test",
        images: int | None = None,
    ) -> ImagePool:  # fmt: skip
        """Put images on a device.

        Args:
            data: images with labels.
            dataset: whose mean and deviation normalise them.
            device: where to.
            split: ``"test"`` or ``"validation"``.
            images: only so many training images, and a fifth as many to judge by; all if not given.

        Returns:
            The pool.

        Raises:
            ValueError: if the split or the number of images is not possible.
        """
        pixels, labels = data.train_images, data.train_labels
        if split == "test":
            judged, judged_labels = data.test_images, data.test_labels
        elif split == "validation":
            order = np.random.default_rng(SPLIT_SEED).permutation(len(pixels))
            out, kept = order[: len(pixels) // 10], np.sort(order[len(pixels) // 10 :])
            judged, judged_labels, pixels, labels = pixels[out], labels[out], pixels[kept], labels[kept]
        else:
            raise ValueError(f"split must be 'test' or 'validation', got {split!r}")
        if images is not None:
            if not 1 <= images <= len(pixels):
                raise ValueError(f"images must be between 1 and {len(pixels)}, got {images}")
            pixels, labels = pixels[:images], labels[:images]
            judged, judged_labels = judged[: max(1, images // 5)], judged_labels[: max(1, images // 5)]
        border = ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0))
        arrays = (np.pad(pixels, border), labels.astype(np.int64), judged, judged_labels.astype(np.int64))
        scales = (255 * np.array(MEANS[dataset]), 255 * np.array(DEVIATIONS[dataset]))
        tensors = [torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays]
        return cls(dataset, split, *tensors, *(torch.tensor(s, dtype=torch.float32, device=device) for s in scales))

    def __len__(self) -> int:
        """The number of training images."""
        return len(self.padded)

    @property
    def classes(self) -> int:
        """The number of classes of the data set."""
        return 100 if self.dataset == "cifar100" else 10

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.padded.device

    def epoch(self, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """All training images, permuted, cropped and flipped.

        Args:
            seed: of the run.
            epoch: its number.

        Returns:
            uint8 images (n, 32, 32, 3) and their labels.
        """
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        n, side = len(self), self.padded.shape[1] - 2 * PADDING
        order = torch.randperm(n, generator=generator)
        corners = torch.randint(2 * PADDING + 1, (n, 2), generator=generator)
        flips = torch.randint(2, (n, 1), generator=generator)
        # the draws are made on the host, the same for every device; what follows from them is computed on the device
        order, corners, flips = (t.to(self.device, non_blocking=True) for t in (order, corners, flips))
        steps = torch.arange(side, device=self.device)
        columns = torch.where(flips == 1, side - 1 - steps, steps) + corners[:, 1:]
        rows = steps + corners[:, :1]
        return self.padded[order[:, None, None], rows[:, :, None], columns[:, None, :]], self.labels[order]

    def normalised(self, images: Tensor) -> Tensor:
        """Bytes as network inputs.

        Args:
            images: uint8 (n, 32, 32, 3).

        Returns:
            float32 (n, 3, 32, 32) in channels-last memory.
        """
        return ((images.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)

"""CIFAR on the device, a whole epoch permuted, cropped and flipped at once.

All randomness of an epoch comes from (seed, epoch) on the CPU, so that a run resumes at any epoch
and sees the same images on every device.
"""

from __future__ import annotations

import io
import os
import tarfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

PADDING = 4
SPLIT_SEED = 20_260
MEANS = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
DEVIATIONS = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}


OFFICIAL = "https://www.cs.toronto.edu/~kriz/{}-binary.tar.gz"
MD5 = {
    "cifar10": "c32a1d4ab5d03f1284b67883e8d87530",
    "cifar100": "03b5dce01913d631647c71ecec9e9cb8",
}


class Images(NamedTuple):
    """RGB pixels, uint8 (n, 32, 32, 3), and labels, int64, in the official order and split."""

    train_images: Any
    train_labels: Any
    test_images: Any
    test_labels: Any


@cache
def load_images(name: str, *, test: bool = True) -> Images:
    """CIFAR-10 or CIFAR-100, from the folder of FISHERFOLD_DATA or its official address.

    Once per process. Without ``test`` the file of test images may be missing; one training image
    stands for them.
    """
    try:
        parts = [_strips(folder() / f"{name}_train_{i}.npz") for i in range(5)]
        parts.append(_strips(folder() / f"{name}_test.npz") if test else _first(parts[0]))
    except FileNotFoundError:
        parts = _download(name)
    pixels, labels = zip(*parts, strict=True)
    train = np.concatenate(pixels[:-1]), np.concatenate(labels[:-1]).astype(np.int64)
    return Images(*train, pixels[-1], labels[-1].astype(np.int64))


def folder() -> Path:
    """That of FISHERFOLD_DATA."""
    if "FISHERFOLD_DATA" in os.environ:
        return Path(os.environ["FISHERFOLD_DATA"])
    from fisherfold.datasets import data_folder

    return data_folder()


def _first(part: tuple[Any, Any]) -> tuple[Any, Any]:
    return part[0][:1], part[1][:1]


def _strips(path: Path) -> tuple[Any, Any]:
    """Images kept as lossless WebP strips with one image below the other."""
    from PIL import Image

    with np.load(path, allow_pickle=False) as stored:
        buffer = stored["webp"].tobytes()
        offsets = stored["offsets"]
        labels = stored["labels"]
    strips = [
        np.asarray(Image.open(io.BytesIO(buffer[a:b])).convert("RGB")) for a, b in pairwise(offsets)
    ]
    return np.concatenate(strips).reshape(-1, 32, 32, 3), labels


def _download(name: str) -> list[tuple[Any, Any]]:
    """The official binary version.

    Records of one or two labels and the red, green and blue planes.
    """
    import pooch

    folder = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[name]
    files = (
        [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        if name == "cifar10"
        else ["train", "test"]
    )
    parts = []
    archive = OFFICIAL.format(name.replace("cifar", "cifar-"))
    with tarfile.open(pooch.retrieve(archive, known_hash=f"md5:{MD5[name]}")) as packed:
        for file in files:
            content: Any = packed.extractfile(f"{folder}/{file}.bin")
            rows = np.frombuffer(content.read(), np.uint8).reshape(
                -1, 3073 if name == "cifar10" else 3074
            )
            planes = rows[:, -3072:].reshape(-1, 3, 32, 32)
            parts.append((np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), rows[:, -3073]))
    return parts


class Pool:
    """Training images and those that judge.

    The test images, or a tenth of the training images left out.
    """

    def __init__(
        self, dataset: str, *, device: str, split: str = "validation", images: int | None = None
    ) -> None:
        data = load_images(dataset, test=split == "test")
        pixels = data.train_images
        labels = data.train_labels
        judged = data.test_images
        judged_labels = data.test_labels
        if split == "validation":
            order = np.random.default_rng(SPLIT_SEED).permutation(len(pixels))
            out = order[: len(pixels) // 10]
            kept = np.sort(order[len(pixels) // 10 :])
            judged = pixels[out]
            judged_labels = labels[out]
            pixels = pixels[kept]
            labels = labels[kept]
        if images is not None:
            pixels = pixels[:images]
            labels = labels[:images]
            judged = judged[: max(1, images // 5)]
            judged_labels = judged_labels[: max(1, images // 5)]
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
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
        n = len(self)
        order = torch.randperm(n, generator=generator)
        corners = torch.randint(2 * PADDING + 1, (n, 2), generator=generator)
        flips = torch.randint(2, (n, 1), generator=generator)
        order, corners, flips = (
            t.to(self.padded.device, non_blocking=True) for t in (order, corners, flips)
        )
        steps = torch.arange(32, device=self.padded.device)
        columns = torch.where(flips == 1, 31 - steps, steps) + corners[:, 1:]
        rows = steps + corners[:, :1]
        return self.padded[
            order[:, None, None], rows[:, :, None], columns[:, None, :]
        ], self.labels[order]

    def normalised(self, images: Tensor) -> Tensor:
        return ((images.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)

"""Images on the device: what an epoch may do to them, and what it depends on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fisherfold.datasets import Images
from fisherfold.training import ImagePool
from fisherfold.training.data import DEVIATIONS, MEANS, PADDING


def numbered(count: int = 60) -> Images:
    """Images whose pixels all say which image, row and column they are."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(1, 256, (count, 32, 32, 3), dtype=np.uint8)
    return Images(pixels, np.arange(count) % 10, pixels[:12], np.arange(12) % 10)


def test_an_epoch_is_a_permutation_of_crops_and_flips_of_the_padded_images() -> None:
    data = numbered()
    pool = ImagePool.of(data, "cifar10")
    images, labels = pool.epoch(3, 5)
    padded = np.pad(data.train_images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    origins, flipped = [], 0
    for image, label in zip(images.numpy(), labels.tolist(), strict=True):
        for index in np.flatnonzero(data.train_labels == label):
            windows = np.lib.stride_tricks.sliding_window_view(padded[index], (32, 32, 3))[:, :, 0]
            plain = (windows == image).all(axis=(2, 3, 4))
            mirrored = (windows == image[:, ::-1]).all(axis=(2, 3, 4))
            if plain.any() or mirrored.any():
                origins.append(index)
                flipped += int(mirrored.any())
    assert sorted(origins) == list(range(60))
    assert 15 < flipped < 45


def test_an_epoch_depends_on_seed_and_number_alone() -> None:
    pool = ImagePool.of(numbered(), "cifar10")
    torch.manual_seed(1)
    first = pool.epoch(0, 0)[0]
    torch.manual_seed(2)
    torch.testing.assert_close(pool.epoch(0, 0)[0], first, rtol=0, atol=0)
    assert not torch.equal(pool.epoch(0, 1)[0], first)
    assert not torch.equal(pool.epoch(1, 0)[0], first)


def test_normalised_images_are_what_the_usual_transform_gives() -> None:
    data = numbered()
    pool = ImagePool.of(data, "cifar100")
    scaled = data.test_images.astype(np.float64) / 255
    expected = ((scaled - MEANS["cifar100"]) / DEVIATIONS["cifar100"]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(pool.normalised(pool.judged).numpy(), expected, rtol=0, atol=2e-6)
    assert pool.normalised(pool.judged).is_contiguous(memory_format=torch.channels_last)


def test_validation_images_are_left_out_of_training_and_never_the_test_images() -> None:
    data = numbered()
    pool = ImagePool.of(data, "cifar10", split="validation")
    inner = pool.padded[:, PADDING:-PADDING, PADDING:-PADDING].numpy()
    kept = {image.tobytes() for image in inner}
    held_out = {image.tobytes() for image in pool.judged.numpy()}
    assert len(kept) == 54 and len(held_out) == 6 and not kept & held_out
    assert kept | held_out == {image.tobytes() for image in data.train_images}


def test_wrong_requests_are_named() -> None:
    with pytest.raises(ValueError, match="split must be 'test' or 'validation', got 'train'"):
        ImagePool.of(numbered(), "cifar10", split="train")
    with pytest.raises(ValueError, match="images must be between 1 and 60, got 61"):
        ImagePool.of(numbered(), "cifar10", images=61)
    with pytest.raises(ValueError, match="dataset must be one of cifar10, cifar100, got 'mnist'"):
        ImagePool.load("mnist")

"""Mixed images against the definition, pixel by pixel, and the draws against their distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fisherfold.training import settings
from fisherfold.training.mixing import Mixing, draw_boxes


def mixing(steps: int = 40, seed: int = 3, **changes: float) -> Mixing:
    chosen = settings("sgd", "cifar10", "wrn10_1", **changes)
    made = Mixing(chosen, steps=steps, side=32, seed=seed, device=torch.device("cpu"))
    made.draw(7)
    return made


def test_a_patch_is_the_other_image_and_the_share_is_what_is_left() -> None:
    made, images = mixing(cutmix=0.5), torch.randn(6, 3, 32, 32, dtype=torch.float64)
    assert made
    for step in range(40):
        expected, taken = images.clone(), 0
        top, bottom, left, right = made.boxes[step].tolist()
        for row in range(top, bottom):
            for column in range(left, right):
                expected[:, :, row, column] = images[5 - torch.arange(6), :, row, column]
                taken += 1
        assert torch.equal(made.mixed(images, torch.tensor(step)), expected)
        torch.testing.assert_close(made.share(torch.tensor(step)), torch.tensor(1 - taken / 1024))


def test_images_are_mixed_by_weight_in_the_share_of_their_losses() -> None:
    made, images = mixing(mixup=0.4), torch.randn(6, 3, 32, 32)
    for step in range(3):
        share = made.shares[step]
        assert 0 < share < 1
        assert made.share(torch.tensor(step)) == share
        expected = share * images + (1 - share) * images.flip(0)
        torch.testing.assert_close(made.mixed(images, torch.tensor(step)), expected)


def test_nothing_is_mixed_where_nothing_is_asked_for() -> None:
    made, images = mixing(), torch.randn(4, 3, 32, 32)
    assert not made
    assert made.mixed(images, torch.tensor(0)) is images
    assert made.share(torch.tensor(0)) == 1


def test_boxes_have_the_probability_the_places_and_the_sizes_of_the_definition() -> None:
    boxes = draw_boxes(np.random.default_rng(0), 100_000, 32, 0.5)
    rows, columns = boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2]
    assert boxes.min() >= 0
    assert boxes.max() <= 32
    # a whole half side is 0 where 16 √(1 - u) < 1
    assert (rows * columns > 0).mean() == pytest.approx(0.5 * (1 - 1 / 256), abs=0.01)
    # E of the area: boxes of half sides h = ⌊16 √(1 - u)⌋ around a uniform pixel, cut off at the border
    half = (16 * np.sqrt(1 - (np.arange(100_000) + 0.5) / 100_000)).astype(int)
    centre = np.arange(32)
    lengths = [np.mean(np.minimum(centre + h, 32) - np.maximum(centre - h, 0)) for h in range(17)]
    expected = 0.5 * np.mean(np.array(lengths)[half] ** 2)
    assert (rows * columns).mean() == pytest.approx(expected, rel=0.02)


def test_draws_depend_on_seed_and_epoch_alone() -> None:
    first, again, other = mixing(cutmix=0.5), mixing(cutmix=0.5), mixing(cutmix=0.5, seed=4)
    again.draw(8)
    assert not torch.equal(first.boxes, again.boxes)
    again.draw(7)
    assert torch.equal(first.boxes, again.boxes)
    assert torch.equal(first.shares, again.shares)
    assert not torch.equal(first.boxes, other.boxes)


def test_the_last_epochs_may_be_left_unmixed() -> None:
    images = torch.randn(4, 3, 32, 32)
    for changes in ({"cutmix": 1.0}, {"mixup": 0.5}):
        made = mixing(mixed_until=0.5, **changes)
        assert not torch.equal(made.mixed(images, torch.tensor(0)), images)
        made.draw(50)
        assert torch.equal(made.mixed(images, torch.tensor(0)), images)
        assert made.share(torch.tensor(0)) == 1
        made.draw(49)
        assert not torch.equal(made.mixed(images, torch.tensor(0)), images)

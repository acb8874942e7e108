"""Weighted losses of PyTorch as weighted likelihoods: a term of weight m is m terms.

    L = (1/D) Σ_i m_i ℓ_i,        F = (1/D) Σ_i m_i J_iᵀ E[∇ℓ_i ∇ℓ_iᵀ] J_i,

with ℓ_i the plain negative log-likelihood of term i. The weights belong to the targets of the data and stay with their
terms when other targets are drawn; F is then the Gauss-Newton matrix of the loss, and for whole weights the Fisher
matrix of data in which samples are repeated. Gradients of L itself would have squares of the weights in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WEIGHTED_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCEWithLogitsLoss)


@dataclass(frozen=True)
class WeightedTerms:
    """The terms of a weighted loss on one batch.

    Attributes:
        plain: ℓ of outputs and targets, one number per term.
        targets: the targets of the data for ``plain``.
        weights: m, one number per term, the first axis over samples.
        counted: which terms are not ignored.
        total: D.
    """

    plain: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor
    weights: Tensor
    counted: Tensor
    total: float

    def of_samples(self) -> Tensor:
        """The mean weight of every sample's terms; that of all terms for a sample whose terms are all ignored.

        Returns:
            A tensor of one dimension.
        """
        counts = self.counted.flatten(1).sum(1) if self.counted.ndim > 1 else self.counted.long()
        sums = self.weights.flatten(1).sum(1) if self.weights.ndim > 1 else self.weights
        return torch.where(counts > 0, sums / counts.clamp(min=1), sums.sum() / counts.sum().clamp(min=1))


def weighted_terms(loss_fn: Any, targets: Any) -> WeightedTerms | None:
    """What the weights of a loss make of a batch.

    Args:
        loss_fn: the loss; weights are known of the modules of cross entropy, negative log-likelihood and binary cross
            entropy with logits.
        targets: the targets of the data.

    Returns:
        None for a loss without weights.
    """
    known = next((kind for kind in WEIGHTED_LOSSES if isinstance(loss_fn, kind)), None)
    if known is None or type(loss_fn).forward is not known.forward:  # a loss of its own has weights of its own
        return None
    if not isinstance(targets, Tensor) or targets.ndim == 0:
        return None
    if isinstance(loss_fn, nn.BCEWithLogitsLoss):
        return _binary(loss_fn, targets)
    if loss_fn.weight is None:
        return None
    return _soft(loss_fn, targets) if targets.is_floating_point() else _classes(loss_fn, targets)


def _classes(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> WeightedTerms:
    assert loss_fn.weight is not None
    counted = targets != loss_fn.ignore_index
    classes = torch.where(counted, targets, 0)
    weights = loss_fn.weight[classes] * counted
    total = float(weights.sum())
    if isinstance(loss_fn, nn.NLLLoss):
        plain = partial(functional.nll_loss, ignore_index=loss_fn.ignore_index, reduction="none")
        return WeightedTerms(plain, targets, weights, counted, total)
    plain = partial(_cross_entropy, ignored=loss_fn.ignore_index)
    if not loss_fn.label_smoothing:
        return WeightedTerms(plain, targets, weights, counted, total)
    one_hot = functional.one_hot(classes, len(loss_fn.weight)).movedim(-1, 1).to(weights)
    shares, weights = _weighted_shares(loss_fn, one_hot)
    return WeightedTerms(plain, shares, weights * counted, counted, total)


def _soft(loss_fn: nn.CrossEntropyLoss | nn.NLLLoss, targets: Tensor) -> WeightedTerms | None:
    if targets.ndim == 1 or isinstance(loss_fn, nn.NLLLoss):
        return None
    shares, weights = _weighted_shares(loss_fn, targets)
    # PyTorch divides by the number of terms here, not by their weights
    return WeightedTerms(_cross_entropy, shares, weights, torch.ones_like(weights, dtype=torch.bool), weights.numel())


def _cross_entropy(outputs: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    if targets.is_floating_point():
        return functional.cross_entropy(outputs, targets.to(outputs.dtype), reduction="none")
    return functional.cross_entropy(outputs, targets, ignore_index=ignored, reduction="none")


def _weighted_shares(loss_fn: nn.CrossEntropyLoss, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_c w_c q_c (-log p_c) as a weight times a cross entropy with shares that add up to 1."""
    assert loss_fn.weight is not None
    smoothing = loss_fn.label_smoothing
    shares = (1 - smoothing) * shares + smoothing / shares.shape[1]
    shares = shares * loss_fn.weight.view(-1, *[1] * (shares.ndim - 2))
    weights = shares.sum(1)
    return shares / torch.where(weights > 0, weights, 1).unsqueeze(1), weights


def _binary(loss_fn: nn.BCEWithLogitsLoss, targets: Tensor) -> WeightedTerms | None:
    if loss_fn.weight is None and loss_fn.pos_weight is None:
        return None
    positive = targets if loss_fn.pos_weight is None else targets * loss_fn.pos_weight
    both = positive + (1 - targets)
    shares = positive / torch.where(both > 0, both, 1)
    weights = both if loss_fn.weight is None else both * loss_fn.weight
    plain = partial(functional.binary_cross_entropy_with_logits, reduction="none")
    return WeightedTerms(plain, shares, weights, torch.ones_like(weights, dtype=torch.bool), weights.numel())

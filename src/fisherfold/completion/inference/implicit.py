r"""Factors of pairs that were observed or not: weighted least squares over all cells, every row solved exactly.

    Σ_{(i,j) ∈ Ω} w_ij (x_ij - p_ij)² + α Σ_{all (i,j)} t_j p_ij² + λ Σ_i |u_i - m_i|² + λ Σ_j |v_j - m_j|²,
    p_ij = ⟨u_i, v_j⟩,     α = ratio · Σ w / (n m),     t_j ∝ (Σ_i w_ij)^popularity with mean 1

x_ij is 1 for an observed pair and 0 for a known dislike. This is the loss of implicit ALS (Hu, Koren and Volinsky 2008)
with a weight of missing pairs that grows with the popularity of the column (He et al. 2016). Given the columns, row i
has the normal equations A_i u_i = b_i with

    A_i = α VᵀTV + λ I + Σ_{j ∈ Ω_i} w_ij v_j v_jᵀ.

VᵀTV is diagonalised once in a pass, so that A_i is a diagonal matrix D plus one term of rank one for each pair. A row
with fewer pairs than factors is then solved in the space of its pairs (its Gram matrix):

    u_i = d + D⁻¹ Zᵀ (I + Z D⁻¹ Zᵀ)⁻¹ (y - Z d),     Z = W^½ V_Ω,   y = W^½ x,   d = λ D⁻¹ m_i,

which costs n_i² rank instead of n_i rank² + rank³. Its posterior covariance is σ² A_i⁻¹.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fisherfold.completion.grouped import Grouped
from fisherfold.completion.ratings import Ratings
from fisherfold.threads import threads

# Entries of the working arrays of a block of rows: they stay in the cache.
_BLOCK_ENTRIES = 2**20
# Rows of a block are at most this much longer than its shortest.
_STRETCH = 1.1
# The size of the random factors from which a fit starts.
_START = 1.0


@dataclass(frozen=True)
class Loss:
    """What weighs how much in the loss.

    Attributes:
        ratio: the weight of all missing cells over that of all observed pairs.
        ridge: λ in units of the mean weight of a pair: how strongly factors are held at their prior mean.
        popularity: the exponent of a column's popularity in the weight of its missing cells.
    """

    ratio: float
    ridge: float
    popularity: float


@dataclass
class Factors:
    """Factors of both sides, and all that is needed to find those of a new row.

    Attributes:
        rows: u_i, one line for each row.
        columns: v_j, one line for each column.
        alpha: the weight of missing cells, α.
        column_missing: t_j.
        ridge: λ.
        row_prior: m_i of each row, or None for zeros.
        column_prior: m_j of each column, or None.
        noise: σ², the mean squared error over all cells by their weights.
    """

    rows: Tensor
    columns: Tensor
    alpha: float
    column_missing: Tensor
    ridge: float
    row_prior: Tensor | None = None
    column_prior: Tensor | None = None
    noise: float = 1.0

    @property
    def rank(self) -> int:
        """The number of factors."""
        return self.rows.shape[1]


class Blocks:
    """The pairs of one side in blocks of rows that have about as many pairs."""

    def __init__(self, groups: Grouped) -> None:
        self.groups = groups
        self.order = torch.argsort(groups.counts, stable=True)
        self.lengths = groups.counts[self.order].cpu()

    def plan(self, rank: int) -> list[tuple[int, int]]:
        """Runs of rows that are solved together, without the rows that have no pairs."""
        lengths, runs = self.lengths, []
        first = int(torch.searchsorted(lengths, 1))
        while first < len(lengths):
            shortest = int(lengths[first])
            longest = int(_STRETCH * shortest)
            last = int(torch.searchsorted(lengths, longest, right=True))
            each = shortest * rank + min(shortest, rank) ** 2
            last = min(last, first + max(1, _BLOCK_ENTRIES // each))
            runs.append((first, last))
            first = last
        return runs

    def gather(self, run: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of a run, and for each the columns and values of its pairs; values beyond its pairs are zero."""
        rows = self.order[run[0] : run[1]]
        length = int(self.lengths[run[1] - 1])
        place = torch.arange(length, device=rows.device)
        inside = place < self.groups.counts[rows][:, None]
        at = self.groups.offsets[rows].long()[:, None] + place
        columns, values = self.groups.at(at.clamp_(max=self.groups.n_ratings - 1).flatten())
        return rows, columns.view(at.shape), values.view(at.shape) * inside


@dataclass(frozen=True)
class _Given:
    """One side as the other is solved against: in the basis that makes Σ t v vᵀ diagonal."""

    table: Tensor  # the factors in that basis
    spectrum: Tensor  # the diagonal
    basis: Tensor  # its vectors

    @classmethod
    def of(cls, factors: Tensor, weights: Tensor | None) -> _Given:
        weighted = factors if weights is None else factors * weights[:, None]
        gram = (weighted.T @ factors).double()
        spectrum, basis = torch.linalg.eigh((gram + gram.T) / 2)
        basis = basis.to(factors)
        return cls(factors @ basis, spectrum.clamp(min=0).to(factors), basis)


@dataclass
class _Block:
    """A run of rows and its normal equations."""

    rows: Tensor
    pairs: Tensor  # Z
    target: Tensor  # y
    diagonal: Tensor  # D
    start: Tensor | None  # d

    def solve(self) -> tuple[Tensor, Tensor]:
        """The solutions, in the basis of the given side, and what they leave of the loss, summed."""
        rest = self.target
        if self.start is not None:
            rest = rest - torch.bmm(self.pairs, self.start[..., None])[..., 0]
        if self.pairs.shape[1] < self.pairs.shape[2]:
            scaled, root = self._gram_root()
            inner = torch.cholesky_solve(rest[..., None], root)
            found = torch.bmm(scaled.mT, inner)[..., 0] / self.diagonal.sqrt()
            left = (rest * inner[..., 0]).sum(dtype=torch.float64)
        else:
            pull = torch.bmm(self.pairs.mT, rest[..., None])
            found = torch.cholesky_solve(pull, self._precision_root())[..., 0]
            left = rest.square().sum(dtype=torch.float64)
            left = left - (pull[..., 0] * found).sum(dtype=torch.float64)
        return (found if self.start is None else found + self.start), left

    def variances(self) -> tuple[Tensor, None]:
        """The diagonals of the A⁻¹, in the same basis."""
        if self.pairs.shape[1] < self.pairs.shape[2]:
            scaled, root = self._gram_root()
            half = torch.linalg.solve_triangular(root, scaled, upper=False)
            return (1 - half.square().sum(1)).clamp_(min=0) / self.diagonal, None
        return torch.cholesky_inverse(self._precision_root()).diagonal(dim1=1, dim2=2), None

    def _gram_root(self) -> tuple[Tensor, Tensor]:
        scaled = self.pairs / self.diagonal.sqrt()[:, None]
        gram = torch.bmm(scaled, scaled.mT)
        gram.diagonal(dim1=1, dim2=2).add_(1)
        return scaled, _root(gram)

    def _precision_root(self) -> Tensor:
        precision = torch.bmm(self.pairs.mT, self.pairs)
        precision.diagonal(dim1=1, dim2=2).add_(self.diagonal)
        return _root(precision)


def _root(matrices: Tensor) -> Tensor:
    """Cholesky factors, in float64 where float32 is too coarse."""
    root, info = torch.linalg.cholesky_ex(matrices)
    if not bool(info.any()):
        return root
    finer = matrices.double()
    finer.diagonal(dim1=1, dim2=2).mul_(1 + 1e-7)
    root, info = torch.linalg.cholesky_ex(finer)
    if bool(info.any()):
        raise ArithmeticError("the weights of pairs are too far apart: divide them by their median")
    return root.to(matrices)


@dataclass
class HalfPass:
    """One side to be solved given the other.

    Attributes:
        given: the factors of the other side.
        blocks: the pairs of this side.
        missing: the weight of missing cells of each member of this side.
        ridge: λ.
        weights: t of the members of the other side, or None for ones.
        prior: the prior means of this side, or None for zeros.
    """

    given: Tensor
    blocks: Blocks
    missing: Tensor
    ridge: float
    weights: Tensor | None = None
    prior: Tensor | None = None
    loss: float = field(init=False, default=0.0)
    _given: _Given = field(init=False)

    def __post_init__(self) -> None:
        self._given = _Given.of(self.given, self.weights)
        if self.prior is not None:
            self.prior = self.prior @ self._given.basis

    def solve(self) -> Tensor:
        """The factors of this side; ``loss`` is then what they leave of the loss, without any ridge."""
        found = self._without_pairs()
        left = self._each(_Block.solve, found)
        self.loss = sum(float(each) for each in left) - self.ridge * _size(found, self.prior)
        if self.prior is not None:
            start = self._without_pairs()
            held = (self._diagonal(slice(None)) * start.square()).sum(dtype=torch.float64)
            self.loss += self.ridge * _size(self.prior, None) - float(held)
        return found @ self._given.basis.T

    def variances(self) -> Tensor:
        """The diagonals of the posterior covariances over σ², in the basis of the factors that were given.

        They are those of the basis in which the missing cells have a diagonal Gram matrix, turned as if diagonal.
        """
        found = 1 / self._diagonal(slice(None))
        self._each(_Block.variances, found)
        return found @ self._given.basis.T.square()

    def _diagonal(self, rows: Tensor | slice) -> Tensor:
        return self.missing[rows][:, None] * self._given.spectrum + self.ridge

    def _start(self, rows: Tensor | slice, diagonal: Tensor) -> Tensor | None:
        return None if self.prior is None else self.ridge * self.prior[rows] / diagonal

    def _without_pairs(self) -> Tensor:
        start = self._start(slice(None), self._diagonal(slice(None)))
        if start is not None:
            return start
        return self.given.new_zeros(len(self.blocks.order), self.given.shape[1])

    def _block(self, run: tuple[int, int]) -> _Block:
        rows, columns, values = self.blocks.gather(run)
        root = values.abs().sqrt_()
        table = self._given.table
        pairs = table.index_select(0, columns.flatten()).view(*columns.shape, table.shape[1])
        pairs.mul_(root[..., None])
        diagonal = self._diagonal(rows)
        target = torch.where(values > 0, root, torch.zeros_like(root))
        return _Block(rows, pairs, target, diagonal, self._start(rows, diagonal))

    def _each(self, work: Callable[[_Block], tuple[Tensor, Any]], found: Tensor) -> list[Any]:
        """Write what a block gives into the lines of its rows; the second parts of what blocks give."""

        def run(part: tuple[int, int]) -> Any:
            block = self._block(part)
            found[block.rows], other = work(block)
            return other

        parts = self.blocks.plan(found.shape[1])[::-1]  # long rows first
        workers = torch.get_num_threads() if found.device.type == "cpu" else 1
        if workers == 1 or len(parts) < workers:
            return [run(part) for part in parts]
        with threads(1), ThreadPoolExecutor(workers) as pool:
            return list(pool.map(run, parts))


def _size(table: Tensor, center: Tensor | None) -> float:
    off = table if center is None else table - center
    return float(torch.linalg.vector_norm(off.double())) ** 2


class ImplicitFit:
    """Coordinate descent on the loss: a pass solves all rows, then all columns.

    Example:
        >>> from fisherfold.completion.ratings import Ratings
        >>> pairs = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [2, 2], [2, 3], [3, 2]]).T
        >>> fit = ImplicitFit(Ratings(*pairs, torch.ones(7), shape=(4, 4)), Loss(4.0, 0.1, 0.0), 2)
        >>> factors = fit.run(5)
        >>> liked, not_liked = (factors.rows[3] @ factors.columns[[3, 0]].T).tolist()
        >>> liked > not_liked
        True
    """

    def __init__(
        self,
        ratings: Ratings,
        loss: Loss,
        rank: int,
        *,
        seed: int = 0,
        start: Tensor | None = None,
        features: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        """Prepare a fit.

        Args:
            ratings: the pairs; the value is the weight of a pair, negative for a known dislike.
            loss: what weighs how much.
            rank: the number of factors.
            seed: of the random start.
            start: factors of the columns to start from; further factors are random, those beyond the rank are left out.
            features: centred tables of what is known of the rows and of the columns, or None.
        """
        self.ratings, self.features = ratings, features
        self.blocks = Blocks(ratings.by_row), Blocks(ratings.by_column)
        n, m = ratings.shape
        amounts = [_amounts(groups) for groups in (ratings.by_row, ratings.by_column)]
        total = float(amounts[0].sum(dtype=torch.float64))
        alpha = loss.ratio * total / (n * m)
        self.amount = total * (1 + loss.ratio)
        in_pairs = amounts[1] * (ratings.n_ratings / total)
        popularity = in_pairs.clamp(min=1).pow(loss.popularity)
        columns = _start(m, rank, seed, start, ratings)
        self.factors = Factors(
            columns.new_zeros(n, rank),
            columns,
            alpha,
            popularity / popularity.mean(),
            loss.ridge * total / ratings.n_ratings,
        )

    def run(self, passes: int, watch: Callable[[int, Factors], bool] | None = None) -> Factors:
        """Do some passes; ``watch`` is called after each and may end them by returning True."""
        found = self.factors
        for number in range(1, passes + 1):
            found.rows = half_pass(found, self.blocks[0], of_columns=False).solve()
            found.row_prior = _explained(found.rows, self.features[0])
            problem = half_pass(found, self.blocks[1], of_columns=True)
            found.columns = problem.solve()
            found.column_prior = _explained(found.columns, self.features[1])
            found.noise = max(problem.loss, 0.0) / self.amount
            if watch is not None and watch(number, found):
                break
        return found


def half_pass(factors: Factors, blocks: Blocks, *, of_columns: bool) -> HalfPass:
    """The problem of one side given the other; the rows may be others than those of the fit."""
    n = blocks.groups.n_groups
    if of_columns:
        missing = factors.alpha * factors.column_missing
        return HalfPass(factors.rows, blocks, missing, factors.ridge, prior=factors.column_prior)
    missing = factors.columns.new_full((n,), factors.alpha)
    prior = factors.row_prior if factors.row_prior is None or len(factors.row_prior) == n else None
    weights = factors.column_missing
    return HalfPass(factors.columns, blocks, missing, factors.ridge, weights, prior)


def _amounts(groups: Grouped) -> Tensor:
    """The summed weights of the pairs of each member."""
    found = torch.zeros(groups.n_groups, dtype=torch.float64, device=groups.offsets.device)
    found.index_add_(0, groups.groups().long(), groups.values().abs().double())
    return found.to(groups.dtype)


def _start(m: int, rank: int, seed: int, given: Tensor | None, ratings: Ratings) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(m, rank, generator=generator) * (_START / rank**0.5)
    found = found.to(ratings.by_row.stored_values)
    if given is not None:
        width = min(rank, given.shape[1])
        found[: len(given), :width] = given[:, :width]
    return found


def _explained(factors: Tensor, features: Tensor | None) -> Tensor | None:
    """The part of factors that features explain: ridge regression, one pseudo-count for each feature."""
    if features is None:
        return None
    gram = (features.T @ features).double()
    gram.diagonal().add_(1.0)
    effects = torch.linalg.solve(gram, (features.T @ factors).double())
    return features @ effects.to(factors)

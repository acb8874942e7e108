"""Factor analysis in the manner of scikit-learn, with standard errors of what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.base import ClassNamePrefixFeaturesOutMixin as NamesOut
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fisherfold.factors.errors import KINDS, Layout, uncertainty
from fisherfold.factors.fit_statistics import degrees_of_freedom, fit_statistics
from fisherfold.factors.moments import Moments
from fisherfold.factors.problem import LEAST_UNIQUENESS, FactorProblem, fit
from fisherfold.factors.rotation import ROTATIONS, default_kaiser, ordered, promax, rotate
from fisherfold.manifolds.base import positive_integer
from fisherfold.warn import warn

Array = NDArray[np.float64]

# a unique variance below this multiple of its bound is at it
_AT_BOUND = 1.2


class FactorAnalysis(NamesOut, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Factor analysis by maximum likelihood, with standard errors of rotated loadings.

    Loadings are those of variables of variance 1; they are rotated to a simple structure and come
    with standard errors that know of the rotation and of the scaling. Missing values (NaN) are
    allowed: the likelihood is that of what was observed (full information).

    Args:
        n_factors: the number of factors.
        rotation: ``"varimax"`` (uncorrelated factors), ``"oblimin"``, ``"promax"`` or ``"geomin"``
            (correlated ones), or None for the canonical axes.
        kaiser: whether rows of loadings are brought to length 1 for the rotation; True for varimax
            and promax if not given, else False.
        errors: ``"expected"`` for standard errors from the information of the model, ``"observed"``
            from the Hessian, ``"robust"`` for the sandwich, which holds for data that are not
            normal; if not given, expected for complete data and observed where values are missing.
        rotation_starts: how many rotations the criterion is minimised from.
        tol: the gradient of the mean log-likelihood at which the fit ends.
        max_iter: the most natural-gradient steps.
        random_state: the seed of the starts of rotations.

    Attributes:
        loadings_: of standardised variables, shape (variables, factors).
        loadings_std_error_: their standard errors.
        factor_correlations_: of the rotated factors.
        factor_correlations_std_error_: their standard errors; 0 where they are 0 by definition.
        uniquenesses_: the share of each variable's variance that is its own.
        uniquenesses_std_error_: their standard errors.
        fit_statistics_: χ², RMSEA, CFI and others, a ``FitStatistics``.
        heywood_: the indices of variables whose unique variance has ended at its bound, 0.005.
        mean_: the means of the variables.
        scale_: their standard deviations in the model.
        components_: loadings in the units of the data, shape (factors, variables), as in
            scikit-learn.
        noise_variance_: unique variances in the units of the data.
        n_samples_: the number of rows.
        n_iter_: the number of natural-gradient steps.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> loadings = np.array([[0.8, 0.7, 0.6, 0, 0, 0], [0, 0, 0, 0.8, 0.7, 0.6]])
        >>> x = rng.standard_normal((500, 2)) @ loadings + 0.6 * rng.standard_normal((500, 6))
        >>> model = FactorAnalysis(2, rotation="oblimin").fit(x)
        >>> model.loadings_.shape, bool((model.loadings_std_error_ < 0.1).all())
        ((6, 2), True)
    """

    def __init__(
        self,
        n_factors: int = 1,
        rotation: str | None = "oblimin",
        *,
        kaiser: bool | None = None,
        errors: str | None = None,
        rotation_starts: int = 10,
        tol: float = 1e-8,
        max_iter: int = 500,
        random_state: int = 0,
    ) -> None:
        self.n_factors = n_factors
        self.rotation = rotation
        self.kaiser = kaiser
        self.errors = errors
        self.rotation_starts = rotation_starts
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def fit(self, X: Any, y: None = None) -> FactorAnalysis:
        """Fit the model to rows of variables, with NaN where a value is missing.

        Returns the fitted estimator. Raises ValueError if a variable is constant or never observed,
        or there are too many factors.
        """
        x = self._validated(X, reset=True)
        self._check_variables(x)
        center, scale = np.nanmean(x, axis=0), np.nanstd(x, axis=0)
        rows = torch.from_numpy((x - center) / scale)
        rows = rows[torch.isfinite(rows).any(dim=1)]
        return self._fit(Moments.of_rows(rows), center, scale)

    def fit_covariance(
        self, covariance: Any, n_samples: int, *, names: Sequence[str] | None = None
    ) -> FactorAnalysis:
        """Fit the model to a covariance or correlation matrix.

        ``n_samples``: the number of rows it comes from. ``names``: of the variables. Returns the
        fitted estimator, which has means of 0. Raises ValueError if the matrix is not symmetric and
        positive definite.
        """
        matrix = np.asarray(covariance, dtype=float)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"covariance must be a square matrix, got shape {matrix.shape}")
        if not np.allclose(matrix, matrix.T) or np.linalg.eigvalsh(matrix)[0] <= 0:
            raise ValueError("covariance must be symmetric and positive definite")
        if self.errors == "robust":
            raise ValueError("errors='robust' needs the rows; use fit(X) or another kind")
        self.n_features_in_ = len(matrix)
        if names is not None:
            self.feature_names_in_ = np.asarray(names, dtype=object)
        scale = np.sqrt(np.diag(matrix))
        standard = torch.from_numpy(matrix / scale / scale[:, None])
        moments = Moments.of_covariance(standard, positive_integer(n_samples, "n_samples"))
        return self._fit(moments, np.zeros(len(matrix)), scale)

    def transform(self, X: Any, *, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Factor scores: the expectation of the factors given a row (regression scores).

        ``return_std``: whether to return their standard deviations given the row, too, which are
        larger where values are missing. Returns arrays of shape (rows, factors).
        """
        check_is_fitted(self)
        z = torch.from_numpy((self._validated(X, reset=False) - self.mean_) / self.scale_)
        seen = torch.isfinite(z)
        masks, pattern = torch.unique(seen, dim=0, return_inverse=True)
        loadings, correlations = map(torch.from_numpy, (self.loadings_, self.factor_correlations_))
        model = loadings @ correlations @ loadings.mT
        model = model + torch.diag(torch.from_numpy(self.uniquenesses_))
        both = masks.unsqueeze(-1) & masks.unsqueeze(-2)
        filled = torch.where(both, model, torch.eye(len(model), dtype=model.dtype))
        shared = masks.unsqueeze(-1) * (loadings @ correlations)
        weights = torch.linalg.solve(filled, shared)
        scores = torch.einsum("np,npk->nk", torch.where(seen, z, 0.0), weights[pattern])
        if not return_std:
            return scores.numpy()
        left = correlations - shared.mT @ weights
        deviations = left.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
        return scores.numpy(), deviations[pattern].numpy()

    def get_covariance(self) -> Array:
        """The covariance matrix of the model, in the units of the data."""
        check_is_fitted(self)
        return self._in_units(self._uncertainty.layout.covariance(self._uncertainty.values))

    def score(self, X: Any, y: None = None) -> float:
        """The mean log-likelihood of rows, of what is observed in them."""
        check_is_fitted(self)
        x = torch.from_numpy((self._validated(X, reset=False) - self._center) / self._scale)
        moments = Moments.of_rows(x)
        layout, values = self._uncertainty.layout, self._uncertainty.values
        found = moments.log_likelihood(layout.unpack(values)[3], layout.covariance(values))
        counts = (moments.counts[:, None] * moments.masks).sum(0)
        jacobian = float(counts @ torch.from_numpy(np.log(self._scale)))
        return (found - jacobian) / moments.n

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Confidence intervals of the loadings.

        ``level``: the probability with which an interval is to hold the truth. Returns the lower
        and upper ends.
        """
        check_is_fitted(self)
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        reach = stats.norm.ppf(0.5 + level / 2) * self.loadings_std_error_
        return self.loadings_ - reach, self.loadings_ + reach

    def standard_errors(self, f: Callable[[Tensor, Tensor], Tensor]) -> tuple[Array, Array]:
        """A function of the loadings and factor correlations, and its standard errors.

        ``f``: a torch function of both matrices. Returns its value and the standard errors of its
        entries.
        """
        check_is_fitted(self)

        def of_values(v: Tensor) -> Tensor:
            return f(*self._reported(v))

        value = of_values(self._uncertainty.values)
        return value.numpy(), self._uncertainty.standard_errors(of_values).numpy()

    def summary(self) -> str:
        """The loadings with their standard errors, factor correlations and fit, as text."""
        check_is_fitted(self)
        names = getattr(self, "feature_names_in_", [f"x{i}" for i in range(len(self.loadings_))])
        width = max(map(len, map(str, names)))
        lines = [f"{self.n_factors} factors, rotation {self.rotation}, {self.n_samples_} rows"]
        for i, name in enumerate(names):
            pairs = zip(self.loadings_[i], self.loadings_std_error_[i], strict=True)
            cells = [f"{value:7.3f} ({error:.3f})" for value, error in pairs]
            lines.append(
                f"{name!s:{width}} {' '.join(cells)}  unique {self.uniquenesses_[i]:.3f}"
                + (" at its bound" if i in self.heywood_ else "")
            )
        for i in range(1, self.n_factors):
            pairs = zip(
                self.factor_correlations_[i, :i],
                self.factor_correlations_std_error_[i, :i],
                strict=True,
            )
            cells = [f"{value:7.3f} ({error:.3f})" for value, error in pairs]
            lines.append(f"correlations of factor {i + 1}: {' '.join(cells)}")
        return "\n".join([*lines, str(self.fit_statistics_)])

    def _fit(self, moments: Moments, center: Array, scale: Array) -> FactorAnalysis:
        k, p = self._check_options(len(center), moments.n), len(center)
        problem = FactorProblem(moments, k)
        result = fit(problem, tol=self.tol, max_iter=self.max_iter)
        if not result.success:
            warn(
                f"the fit has not converged: {result.status}; raise max_iter or tol, or take "
                "fewer factors",
                RuntimeWarning,
            )
        covariance = problem.covariance(result.x)
        sigma = covariance.diagonal().sqrt()
        unique = problem.noise(result.x) / sigma.square()
        fixed = problem.noise(result.x) < _AT_BOUND * LEAST_UNIQUENESS
        self._report_heywood(fixed)
        first = "varimax" if self.rotation == "promax" else self.rotation
        kaiser = default_kaiser(self.rotation) if self.kaiser is None else self.kaiser
        axes = _canonical(result.x["loadings"] / sigma[:, None], unique)
        options: dict[str, Any] = {"starts": self.rotation_starts, "seed": self.random_state}
        loadings, correlations = rotate(axes, first, kaiser=kaiser, **options)
        layout = Layout(p, k, first, kaiser)
        values = layout.pack(loadings, correlations, sigma, result.x["mean"])
        kind = self.errors or ("expected" if moments.is_complete else "observed")
        self._uncertainty = uncertainty(layout, values, moments, kind=kind, fixed=fixed)
        self._center, self._scale = center, scale
        self.fit_statistics_ = fit_statistics(
            moments, result.x["mean"], covariance, k, scale=torch.from_numpy(scale)
        )
        self.n_samples_, self.n_iter_ = moments.n, result.iterations
        self.mean_ = center + scale * result.x["mean"].numpy()
        self.scale_ = scale * sigma.numpy()
        self._report()
        return self

    def _report(self) -> None:
        """The attributes that follow from the parameters and their covariance."""
        found, values = self._uncertainty, self._uncertainty.values
        loadings, correlations = self._reported(values)
        self.loadings_ = loadings.numpy()
        self.factor_correlations_ = correlations.numpy()
        self.loadings_std_error_ = found.standard_errors(lambda v: self._reported(v)[0]).numpy()
        errors = found.standard_errors(lambda v: self._reported(v)[1])
        self.factor_correlations_std_error_ = errors.fill_diagonal_(0).numpy()

        def unique(v: Tensor) -> Tensor:
            left, phi, _, _ = found.layout.unpack(v)
            return 1 - (left @ phi * left).sum(dim=1)

        self.uniquenesses_ = unique(values).numpy()
        self.uniquenesses_std_error_ = found.standard_errors(unique).numpy()
        # uncorrelated factors of variance 1, as scikit-learn has them
        root = np.linalg.cholesky(self.factor_correlations_)
        self.components_ = (self.scale_[:, None] * (self.loadings_ @ root)).T
        self.noise_variance_ = self.scale_**2 * self.uniquenesses_

    def _reported(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Loadings and factor correlations as functions of the parameters."""
        loadings, correlations, _, _ = self._uncertainty.layout.unpack(v)
        if self.rotation != "promax" or loadings.shape[1] == 1:
            return loadings, correlations
        return ordered(*promax(loadings))

    def _report_heywood(self, fixed: Tensor) -> None:
        self.heywood_ = torch.nonzero(fixed).flatten().numpy()
        if len(self.heywood_):
            names = getattr(self, "feature_names_in_", self.heywood_)
            named = [str(names[i]) if names is not self.heywood_ else str(i) for i in self.heywood_]
            warn(
                f"the unique variance of the variables {named} has ended at its bound of "
                f"{LEAST_UNIQUENESS} (a Heywood case): the model may have too many factors, or "
                "these variables too few neighbours; standard errors hold it fixed there",
                RuntimeWarning,
            )

    def _check_options(self, p: int, n: int) -> int:
        k = positive_integer(self.n_factors, "n_factors")
        if p < 3:
            raise ValueError(f"a factor needs at least 3 variables, got n_features = {p}")
        if degrees_of_freedom(p, k) < 0:
            most = max((j for j in range(1, p) if degrees_of_freedom(p, j) >= 0), default=0)
            raise ValueError(
                f"n_factors must be at most {most} for {p} variables, got {k}: the model would "
                "have more parameters than there are covariances"
            )
        if n <= p:
            raise ValueError(f"there must be more rows than the {p} variables, got n_samples = {n}")
        if self.rotation is not None and self.rotation not in ROTATIONS:
            raise ValueError(
                f"rotation must be one of {list(ROTATIONS)} or None, got {self.rotation!r}"
            )
        if self.errors is not None and self.errors not in KINDS:
            raise ValueError(f"errors must be one of {list(KINDS)} or None, got {self.errors!r}")
        return k

    def _check_variables(self, x: Array) -> None:
        names = getattr(self, "feature_names_in_", np.arange(x.shape[1]))
        missing = np.isnan(x).all(axis=0)
        if missing.any():
            raise ValueError(f"X must have values of every variable, got none of {names[missing]}")
        constant = np.nanmax(x, axis=0) == np.nanmin(x, axis=0)
        if constant.any():
            raise ValueError(f"X must have no constant variable, got {list(names[constant])}")

    def _validated(self, X: Any, *, reset: bool) -> Array:
        options: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
        x: Array = validate_data(
            self, X, reset=reset, ensure_min_samples=2 if reset else 1, **options
        )
        if np.isinf(x).any():
            raise ValueError("X must be finite or NaN, got infinite entries")
        return x

    def _in_units(self, covariance: Tensor) -> Array:
        return self._scale[:, None] * covariance.numpy() * self._scale

    @property
    def _n_features_out(self) -> int:
        return int(self.loadings_.shape[1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


def _canonical(loadings: Tensor, unique: Tensor) -> Tensor:
    """The rotation of loadings in which ``Λᵀ Ψ⁻¹ Λ`` is diagonal, with falling entries."""
    _, vectors = torch.linalg.eigh(loadings.mT @ (loadings / unique[:, None]))
    return loadings @ vectors.flip(-1)

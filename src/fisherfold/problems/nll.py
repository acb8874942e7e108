"""Any differentiable model and likelihood as a problem on a manifold.

    Ψ(θ) = (1/N) Σ_i -log p(y_i | f(x_i, θ)),    θ ∈ M

``model(x, theta)`` maps a batch of inputs, shape (B, ...), and the parameter to natural outputs z of shape (B, ...). It
treats samples independently: row i of z depends on row i of x only. Derivatives come from torch.func.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from fisherfold.fisher.flat import gram
from fisherfold.fisher.jacobian import AdjointTest, EmpiricalFisher, ExactFisher, Graph, MonteCarloFisher, record
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.likelihoods import Likelihood
from fisherfold.fisher.operators import DenseFisher, FisherOperator
from fisherfold.fisher.rowblock import RowBlockFisher
from fisherfold.manifolds import Euclidean, Manifold, Product
from fisherfold.manifolds.base import Point, Tangent, leaves, positive_integer, require_manifold, tree_map
from fisherfold.problems.base import Problem, check_batch
from fisherfold.problems.networks import check_behaviour, check_independence, check_layers


class NLLProblem(Problem):
    """Maximum likelihood for a model whose parameter lies on a manifold.

    Args:
        manifold: where θ lives.
        model: ``model(x, theta)``, a torch function of a batch of inputs and the parameter that treats samples
            independently: a batch of one sample has the row that the sample has among others.
        likelihood: the distribution of a target given the model's output.
        x: inputs, first dimension N.
        y: targets, first dimension N, in the form that the likelihood takes.
        draws: targets per sample for the Monte-Carlo Fisher information.
        seed: fixes those draws.
        chunk_size: samples handled at once when Jacobians are formed; all if not given.

    Examples:
        Fit a direction on the sphere by logistic regression:

        >>> import torch
        >>> from fisherfold import Bernoulli, NLLProblem, minimize
        >>> from fisherfold.manifolds import Sphere
        >>> g = torch.Generator().manual_seed(0)
        >>> truth = Sphere(3).random_point(generator=g)
        >>> x = torch.randn(500, 3, generator=g, dtype=torch.float64)
        >>> y = torch.bernoulli(torch.sigmoid(4 * x @ truth), generator=g)
        >>> problem = NLLProblem(Sphere(3), lambda x, w: 4 * x @ w, Bernoulli(), x, y)
        >>> result = minimize(problem, Sphere(3).random_point(generator=g))
        >>> result.status, bool(Sphere(3).dist(result.x, truth) < 0.1)
        ('converged', True)
    """

    fisher_kinds: ClassVar[tuple[str, ...]] = (
        "exact", "monte-carlo", "empirical", "kronecker", "row-block", "dense",
    )  # fmt: skip

    def __init__(
        self,
        manifold: Manifold,
        model: Callable[[Any, Any], Tensor],
        likelihood: Likelihood,
        x: Tensor,
        y: Tensor,
        *,
        draws: int = 1,
        seed: int = 0,
        chunk_size: int | None = None,
    ) -> None:
        _check_parts(manifold, model, likelihood)
        _check_data(x, y)
        self.manifold = manifold
        self.model = model
        self.likelihood = likelihood
        self.inputs = x
        self.targets = y
        self.n_samples = len(x)
        self.draws = positive_integer(draws, "draws")
        self.seed = seed
        self.chunk_size = None if chunk_size is None else positive_integer(chunk_size, "chunk_size")
        self._outputs_checked = False
        self._independence_checked = False
        self._alone_checked = False
        self._last: _Evaluation | None = None
        self._adjoint = AdjointTest()

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        likelihood: Likelihood,
        x: Tensor,
        y: Tensor,
        *,
        manifolds: Mapping[str, Manifold] | None = None,
        **options: Any,
    ) -> tuple[NLLProblem, dict[str, Tensor]]:
        """Make the parameters of a network the point θ; those with ``requires_grad=False`` stay as they are.

        Args:
            module: a network that treats samples independently, and is a function of its parameters: batch norms,
                dropout and spectral norms in evaluation mode.
            likelihood: the distribution of a target given the network's output.
            x: inputs.
            y: targets.
            manifolds: a manifold for parameters by name; all others are Euclidean.
            **options: passed on to ``NLLProblem``.

        Returns:
            The problem on the product manifold, and the network's parameters, as they are, for its starting point:
            those with a manifold must lie on it before ``minimize`` takes them.

        Raises:
            ValueError: if the network mixes samples, draws at random, remembers earlier evaluations or has nothing to
                learn, or ``manifolds`` names a parameter that it does not have.
        """
        check_layers(module)
        start = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
        if not start:
            raise ValueError("module must have a parameter that requires grad, it has none")
        given = dict(manifolds or {})
        if unknown := sorted(set(given) - set(start)):
            raise ValueError(f"manifolds names parameters that the module does not have or has frozen: {unknown}")
        product = Product({name: given.get(name, Euclidean(*p.shape)) for name, p in start.items()})

        def model(inputs: Tensor, theta: dict[str, Tensor]) -> Tensor:
            return cast("Tensor", torch.func.functional_call(module, theta, (inputs,)))

        problem = cls(product, model, likelihood, x, y, **options)
        check_behaviour(module, x)
        return problem, start

    @override
    def loss(self, x: Point, batch: Tensor | None = None) -> Tensor:
        self._check_theta(x)
        inputs, targets = self._samples(batch)
        return self.likelihood.nll(self._outputs(x, inputs), targets).mean()

    @override
    def gradient(self, x: Point, batch: Tensor | None = None) -> Tangent:
        return self.loss_and_gradient(x, batch)[1]

    @override
    def loss_and_gradient(self, x: Point, batch: Tensor | None = None) -> tuple[Tensor, Tangent]:
        self._check_theta(x)
        inputs, targets = self._samples(batch)
        self._last = None
        variables, z = record(lambda theta: self._outputs(theta, inputs), x)
        with torch.enable_grad():
            value = self.likelihood.nll(z, targets).mean()
        if not value.requires_grad:
            raise ValueError("model must depend on theta, but its output does not")
        gradients = iter(torch.autograd.grad(value, leaves(variables), retain_graph=True, materialize_grads=True))
        self._last = _Evaluation.of(x, batch, (variables, z))
        return value.detach(), self._tangent(x, tree_map(lambda _: next(gradients), x))

    def kl(self, x: Point, other: Point) -> Tensor:
        """The mean divergence E_x KL(p(· | f(x, θ)) ‖ p(· | f(x, θ'))) over all samples.

        Args:
            x: the point θ; neither is checked, so that the divergence can be mapped over many.
            other: the point θ'.

        Returns:
            A tensor without dimensions.
        """
        inputs, _ = self._samples(None)
        z, other_z = (self._outputs(theta, inputs) for theta in (x, other))
        return self.likelihood.kl(z, other_z).mean()

    def per_sample_gradients(self, x: Point, batch: Tensor | None = None) -> Tangent:
        """The Riemannian gradient of every sample's loss.

        Args:
            x: a point of the manifold.
            batch: sample indices; all samples if not given.

        Returns:
            A tangent vector with one more leading dimension, the samples.
        """
        self._check_theta(x)
        self._check_model(x)
        inputs, targets = self._samples(batch)

        def one(theta: Point, input_row: Tensor, target_row: Tensor) -> Tensor:
            z = self.model(input_row.unsqueeze(0), theta)
            return self.likelihood.nll(z, target_row.unsqueeze(0))[0]

        return self.manifold.project(x, self._each(torch.func.grad, one, x, inputs, targets))

    def jacobian(self, x: Point, batch: Tensor | None = None) -> Point:
        """The Euclidean Jacobian of the outputs of every sample.

        Args:
            x: a point of the manifold.
            batch: sample indices; all samples if not given.

        Returns:
            A tree like the point whose tensors have the leading dimensions (samples, outputs of one sample).
        """
        self._check_model(x)
        inputs, _ = self._samples(batch)

        def one(theta: Point, input_row: Tensor) -> Tensor:
            return self.model(input_row.unsqueeze(0), theta)[0].reshape(-1)

        return self._each(torch.func.jacrev, one, x, inputs)

    def _each(
        self, derivative: Callable[..., Any], one: Callable[..., Tensor], theta: Point, *samples: Tensor
    ) -> Point:
        """The derivative in θ of a function of θ and one sample, for all samples."""
        batched = torch.func.vmap(derivative(one), (None, *(0 for _ in samples)), chunk_size=self.chunk_size)
        try:
            # by plain kernels: those that are fused for attention are batched by a slow loop, with a warning; and under
            # no_grad() torch (2.13) keeps the wrong factors of torch.linalg.solve for the derivative
            with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                found = batched(theta, *samples)
            # the graph is that of whatever else in the model could be trained
            return tree_map(Tensor.detach, found)
        except RuntimeError:
            # recurrent layers, shapes that depend on values and many operations of users have no rule for vmap
            alone = [_derivative(one, theta, *rows) for rows in zip(*samples, strict=True)]
            return tree_map(lambda *leaf: torch.stack(leaf), *alone)

    @override
    def fisher(self, x: Point, batch: Tensor | None = None, *, kind: str = "exact") -> FisherOperator:
        """The Fisher information at ``x`` as an operator on the tangent space.

        Args:
            x: a point of the manifold.
            batch: sample indices; all samples if not given.
            kind: ``exact``; ``monte-carlo`` (targets drawn from the model); ``empirical`` (observed targets);
                ``kronecker`` and ``row-block`` (from the observed per-sample gradients of a matrix parameter);
                ``dense`` (the exact one as a matrix, for small problems).

        Returns:
            The operator.

        Raises:
            ValueError: if the kind is unknown, or does not apply to this parameter.
        """
        self._check_theta(x)
        inputs, targets = self._samples(batch)
        if kind in {"kronecker", "row-block"}:
            if isinstance(x, dict) or x.ndim != 2:
                raise ValueError(f"kind={kind!r} needs a matrix as its parameter; use 'exact' or 'empirical'")
            structure = KroneckerFisher if kind == "kronecker" else RowBlockFisher
            return structure.from_gradients(self.manifold, x, self.per_sample_gradients(x, batch))

        def outputs(theta: Point) -> Tensor:
            return self._outputs(theta, inputs)

        def jacobian() -> Point:
            return self.jacobian(x, batch)

        # a solver asks for the gradient first: the operator goes on with the graph of that evaluation
        last = self._last
        graph = last.graph if last is not None and last.is_of(x, batch) else None
        if kind == "empirical":
            return EmpiricalFisher(self.manifold, x, outputs, jacobian, self.likelihood, targets, graph=graph)
        if kind == "monte-carlo":
            generator = torch.Generator(device=targets.device).manual_seed(self.seed)
            return MonteCarloFisher(
                self.manifold, x, outputs, jacobian, self.likelihood,
                draws=self.draws, generator=generator, graph=graph,
            )  # fmt: skip
        exact = ExactFisher(self.manifold, x, outputs, jacobian, self.likelihood, graph=graph)
        exact.adjoint = self._adjoint
        if kind == "exact":
            return exact
        if kind == "dense":
            return DenseFisher(self.manifold, x, gram(exact.rows()))
        raise ValueError(f"kind must be one of {list(self.fisher_kinds)}, got {kind!r}")

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph of the last evaluation, which can neither be copied nor pickled."""
        return self.__dict__ | {"_last": None}

    def _outputs(self, theta: Point, inputs: Tensor) -> Tensor:
        z = self.model(inputs, theta)
        if not self._outputs_checked:
            _check_outputs(z, inputs)
            # one output tells the form of all: targets outside the first batch are checked, too
            self.likelihood.check_targets(self.targets, z[:1].expand(self.n_samples, *z.shape[1:]))
            self._outputs_checked = True
        return z

    def _check_model(self, theta: Point) -> None:
        """Raise before a mismatch of model and targets, or a lost dimension, becomes an error of torch.func."""
        self._check_independence(theta)
        if not self._alone_checked:
            _check_outputs(self._outputs(theta, self.inputs[:1]), self.inputs[:1])
            self._alone_checked = True

    def _samples(self, batch: Tensor | None) -> tuple[Tensor, Tensor]:
        if batch is None:
            return self.inputs, self.targets
        if isinstance(batch, Tensor) and batch.device not in {self.inputs.device, torch.device("cpu")}:
            raise ValueError(f"batch must be on {self.inputs.device} like the data, got {batch.device}")
        check_batch(batch, self.n_samples)
        return self.inputs[batch], self.targets[batch]

    def _check_theta(self, theta: Point) -> None:
        for leaf in filter(torch.is_tensor, leaves(theta)):
            if leaf.device != self.inputs.device:
                raise ValueError(f"theta must be on {self.inputs.device} like the data, got {leaf.device}")
            if self.inputs.is_floating_point() and leaf.dtype != self.inputs.dtype:
                raise ValueError(f"theta must have the dtype {self.inputs.dtype} of the data x, got {leaf.dtype}")
        self.manifold.check_point(theta, name="theta")
        self._check_independence(theta)

    def _check_independence(self, theta: Point) -> None:
        if not self._independence_checked:
            self._independence_checked = check_independence(self.model, theta, self.inputs)


@dataclass(frozen=True)
class _Evaluation:
    """The graph of the model at a point, valid for the same tensors as long as they have not been written to."""

    tensors: list[Tensor]
    versions: list[int]
    graph: Graph

    @classmethod
    def of(cls, x: Point, batch: Tensor | None, graph: Graph) -> _Evaluation:
        tensors = [*leaves(x), *([] if batch is None else [batch])]
        return cls(tensors, [tensor._version for tensor in tensors], graph)

    def is_of(self, x: Point, batch: Tensor | None) -> bool:
        other = _Evaluation.of(x, batch, self.graph)
        same = len(other.tensors) == len(self.tensors) and all(map(operator.is_, other.tensors, self.tensors))
        return same and other.versions == self.versions


def _derivative(one: Callable[..., Tensor], theta: Point, *sample: Tensor) -> Point:
    """The Jacobian in θ for one sample by plain backward passes, one for each entry of the value."""
    variables, value = record(lambda t: one(t, *sample), theta)

    def backward(entry: Tensor) -> tuple[Tensor, ...]:
        if not entry.requires_grad:
            return tuple(map(torch.zeros_like, leaves(variables)))
        return torch.autograd.grad(entry, leaves(variables), retain_graph=True, materialize_grads=True)

    rows = [backward(entry) for entry in value.reshape(-1)]
    columns = iter(torch.stack(column).reshape(*value.shape, *column[0].shape) for column in zip(*rows, strict=True))
    return tree_map(lambda _: next(columns), variables)


def _check_parts(manifold: object, model: object, likelihood: object) -> None:
    require_manifold(manifold)
    if not callable(model):
        raise TypeError(f"model must be a function of the inputs and theta, got {model!r}")
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"likelihood must be a likelihood such as Gaussian(), got {likelihood!r}")


def _check_data(x: Tensor, y: Tensor) -> None:
    for name, data in (("x", x), ("y", y)):
        if not isinstance(data, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(data).__name__}")
        if data.ndim == 0 or len(data) == 0:
            raise ValueError(f"{name} must hold at least one sample, got shape {tuple(data.shape)}")
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same number of samples, got {len(x)} and {len(y)}")
    if x.device != y.device:
        raise ValueError(f"x and y must be on one device, got {x.device} and {y.device}")
    for name, data in (("x", x), ("y", y)):
        if data.is_floating_point() and not bool(torch.isfinite(data).all()):
            raise ValueError(f"{name} must be finite, got NaN or infinite entries")


def _check_outputs(z: Tensor, inputs: Tensor) -> None:
    if not isinstance(z, Tensor) or z.ndim == 0 or len(z) != len(inputs):
        seen = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        hint = "; a batch of one keeps its first dimension, which squeeze() drops" if len(inputs) == 1 else ""
        raise ValueError(f"model must return a tensor with one row per sample, ({len(inputs)}, ...), got {seen}{hint}")
    if not z.is_floating_point():
        raise ValueError(f"model must return a floating tensor, got {z.dtype}")

"""Any differentiable model and likelihood as a problem on a manifold.

    Ψ(θ) = (1/N) [ Σ_i w_i ψ_i(θ) + π(θ) ],    ψ_i(θ) = -log p(y_i | f(x_i, θ) + o_i),    θ ∈ M

with weights w_i, offsets o_i and the negative logarithm π of a prior density, where they are given.

``model(x, theta)`` maps a batch of inputs, shape (B, ...), and the parameter to natural outputs z
of shape (B, ...). It treats samples independently: row i of z depends on row i of x only.
Derivatives come from torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from fisherfold.fisher.hessian import Hessian, PriorFisher
from fisherfold.fisher.jacobian import EmpiricalFisher, ExactFisher, Graph, MonteCarloFisher, record
from fisherfold.fisher.kronecker import KroneckerFisher
from fisherfold.fisher.layers import layer_fisher
from fisherfold.fisher.likelihoods import Likelihood
from fisherfold.fisher.operators import DenseFisher, FisherOperator
from fisherfold.fisher.rowblock import RowBlockFisher
from fisherfold.manifolds import Euclidean, Manifold, Product
from fisherfold.manifolds.base import (
    Point,
    Tangent,
    flatten,
    leaves,
    positive_integer,
    reorder_like,
    require_manifold,
    tree_map,
    unflatten,
    unflatten_like,
)
from fisherfold.problems.base import Problem, check_batch, check_data, check_theta
from fisherfold.problems.cache import LastPoint
from fisherfold.problems.networks import check_independence, check_layers

# Samples on which the work of a model is counted.
COUNTED = 16


class NLLProblem(Problem):
    """Maximum likelihood for a model whose parameter lies on a manifold.

    Args:
        manifold: where θ lives.
        model: ``model(x, theta)``, a torch function of a batch of inputs and the parameter that
            treats samples independently: a batch of one sample has the row that the sample has
            among others.
        likelihood: the distribution of a target given the model's output.
        x: inputs, first dimension N.
        y: targets, first dimension N, in the form that the likelihood takes.
        weights: w_i ≥ 0, one per sample, such as how often it was seen; all 1 if not given.
        offset: o_i, added to the model's output, such as a log exposure.
        prior: π, a function of the parameter: minus the logarithm of its prior density, for a
            maximum a posteriori fit.
        draws: targets per sample of the Fisher matrices with drawn targets.
        seed: of those draws outside of ``minimize``, which draws from its own generator.
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
        "exact",
        "monte-carlo",
        "empirical",
        "kronecker",
        "row-block",
        "layers",
        "empirical-kronecker",
        "empirical-row-block",
        "dense",
    )
    random_kinds: ClassVar[tuple[str, ...]] = ("monte-carlo", "kronecker", "row-block", "layers")
    any_representative: ClassVar[bool] = True

    def __init__(
        self,
        manifold: Manifold,
        model: Callable[[Any, Any], Tensor],
        likelihood: Likelihood,
        x: Tensor,
        y: Tensor,
        *,
        weights: Tensor | None = None,
        offset: Tensor | None = None,
        prior: Callable[[Any], Tensor] | None = None,
        draws: int = 1,
        seed: int = 0,
        chunk_size: int | None = None,
    ) -> None:
        _check_parts(manifold, model, likelihood, prior)
        extras = {"weights": weights, "offset": offset}
        check_data(
            x=x, y=y, **{name: column for name, column in extras.items() if column is not None}
        )
        if weights is not None and (
            weights.ndim != 1 or bool((weights < 0).any()) or not bool((weights > 0).any())
        ):
            raise ValueError(
                "weights must be one number ≥ 0 per sample, not all 0, got shape "
                f"{tuple(weights.shape)}"
            )
        self.manifold = manifold
        self.model = model
        self.likelihood = likelihood
        self.prior = prior
        self.inputs = x
        self.targets = y
        self.weights = weights
        self.offset = offset
        self.n_samples = len(x)
        self.draws = positive_integer(draws, "draws")
        self.seed = seed
        self.chunk_size = None if chunk_size is None else positive_integer(chunk_size, "chunk_size")
        self._outputs_checked = False
        self._independence_checked = False
        self._alone_checked = False
        self._prior_checked = False
        self._last: LastPoint[Graph] = LastPoint()
        self._calls = 0
        self._flops: float | None = None

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
        """Make the parameters of a network the point θ.

        Those with ``requires_grad=False`` stay as they are.

        Args:
            module: a network that treats samples independently, and is a function of its
                parameters: batch norms, dropout and spectral norms in evaluation mode.
            likelihood: the distribution of a target given the network's output.
            x: inputs.
            y: targets.
            manifolds: a manifold for parameters by name; all others are Euclidean.
            **options: passed on to ``NLLProblem``.

        Returns:
            The problem on the product manifold, and the network's parameters, as they are, for its
            starting point: those with a manifold must lie on it before ``minimize`` takes them.

        Raises:
            ValueError: if the network has a batch norm or dropout in training mode or nothing to
                learn, or ``manifolds`` names a parameter that it does not have. What else draws or
                mixes samples is found at the first evaluation.
        """
        check_layers(module)
        start = {
            name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad
        }
        if not start:
            raise ValueError("module must have a parameter that requires grad, it has none")
        given = dict(manifolds or {})
        if unknown := sorted(set(given) - set(start)):
            raise ValueError(
                f"manifolds names parameters that the module does not have or has frozen: {unknown}"
            )
        product = Product({name: given.get(name, Euclidean(*p.shape)) for name, p in start.items()})

        def model(inputs: Tensor, theta: dict[str, Tensor]) -> Tensor:
            return cast("Tensor", torch.func.functional_call(module, theta, (inputs,)))

        return cls(product, model, likelihood, x, y, **options), start

    @override
    def loss(self, x: Point, batch: Tensor | None = None) -> Tensor:
        self._check_theta(x)
        data = self._samples(batch)
        return self._mean(self._outputs(x, data), data, x)

    def _mean(self, z: Tensor, data: _Data, x: Point) -> Tensor:
        losses = self.likelihood.nll(z, data.targets)
        value = (losses if data.weights is None else data.weights.to(losses.dtype) * losses).mean()
        return value if self.prior is None else value + self._log_prior(x) / self.n_samples

    def _log_prior(self, x: Point) -> Tensor:
        value = self.prior(x)  # type: ignore[misc]  # asked for only where there is one
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            seen = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise ValueError(
                "prior must return one number as a torch tensor, such as 0.5 * "
                f"theta.square().sum(), got {seen}"
            )
        if (
            torch.is_grad_enabled()
            and any(leaf.requires_grad for leaf in leaves(x))
            and not value.requires_grad
        ):
            raise ValueError(
                "prior must depend on theta through torch operations, but it has no gradient"
            )
        if not (self._prior_checked or bool(value.isfinite())):
            raise ValueError(f"prior must be finite where a run starts, got {value.item()}")
        self._prior_checked = True
        return value.reshape(())

    @override
    def loss_and_gradient(self, x: Point, batch: Tensor | None = None) -> tuple[Tensor, Tangent]:
        self._check_theta(x)
        data = self._samples(batch)
        self._last.clear()
        variables, z = record(lambda theta: self._outputs(theta, data), x)
        with torch.enable_grad():
            value = self._mean(z, data, variables)
        if not value.requires_grad:
            raise ValueError("model must depend on theta, but its output does not")
        gradients = torch.autograd.grad(
            value, leaves(variables), retain_graph=True, materialize_grads=True
        )
        self._last.put(x, (variables, z), batch)
        return value.detach(), self._tangent(x, unflatten_like(gradients, x))

    def kl(self, x: Point, other: Point) -> Tensor:
        """The mean divergence E_x KL(p(· | f(x, θ)) ‖ p(· | f(x, θ'))) over all samples."""
        data = self._samples(None)
        z, other_z = (self._outputs(theta, data) for theta in (x, other))
        found = self.likelihood.kl(z, other_z)
        return (found if data.weights is None else data.weights * found).mean()

    def per_sample_gradients(
        self, x: Point, batch: Tensor | None = None, *, targets: Tensor | None = None
    ) -> Tangent:
        """The Riemannian gradient of every sample's loss ψ_i, without its weight.

        ``targets``: to take in place of the observed ones. Returns a tangent vector with one more
        leading dimension, the samples.
        """
        self._check_theta(x)
        self._check_model(x)
        data = self._samples(batch)

        def one(theta: Point, target_row: Tensor, *rows: Tensor) -> Tensor:
            return self.likelihood.nll(self._output_of_one(theta, *rows), target_row.unsqueeze(0))[
                0
            ]

        rows = (data.targets if targets is None else targets, *data.rows)
        return self.manifold.riemannian_gradient(x, self._each(torch.func.grad, one, x, *rows))

    def jacobian(self, x: Point, batch: Tensor | None = None) -> Point:
        """The Euclidean Jacobian of the outputs of every sample.

        Returns a tree like the point whose tensors have the leading dimensions (samples, outputs of
        one sample).
        """
        return self._jacobian_of(x, self._samples(batch).rows)

    def _jacobian_of(self, x: Point, rows: tuple[Tensor, ...]) -> Point:
        self._check_model(x)

        def one(theta: Point, *rows: Tensor) -> Tensor:
            return self._output_of_one(theta, *rows).reshape(-1)

        return self._each(torch.func.jacrev, one, x, *rows)

    def _output_of_one(self, theta: Point, inputs: Tensor, offset: Tensor | None = None) -> Tensor:
        z = self.model(inputs.unsqueeze(0), theta)
        return z if offset is None else z + offset.unsqueeze(0)

    def _each(
        self,
        derivative: Callable[..., Any],
        one: Callable[..., Tensor],
        theta: Point,
        *samples: Tensor,
    ) -> Point:
        """The derivative in θ of a function of θ and one sample, for all samples."""
        batched = torch.func.vmap(
            derivative(one), (None, *(0 for _ in samples)), chunk_size=self.chunk_size
        )
        try:
            # by plain kernels: those that are fused for attention are batched by a slow loop, with
            # a warning; and under no_grad() torch (2.13) keeps the wrong factors of
            # torch.linalg.solve for the derivative
            with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                found = batched(theta, *samples)
            # the graph is that of whatever else in the model could be trained
            return tree_map(Tensor.detach, found)
        except RuntimeError:
            # recurrent layers, shapes that depend on values and many operations of users have no
            # rule for vmap
            alone = [_derivative(one, theta, *rows) for rows in zip(*samples, strict=True)]
            return tree_map(lambda *leaf: torch.stack(leaf), *alone)

    @override
    def fisher(
        self, x: Point, batch: Tensor | None = None, *, kind: str = "exact"
    ) -> FisherOperator:
        """The Fisher information at ``x`` as an operator on the tangent space.

        With a prior, plus its Hessian over N.

        Args:
            x: a point of the manifold.
            batch: sample indices; all samples if not given.
            kind: ``exact``; ``dense`` (the same as a matrix, for small problems); with targets
                drawn from the model at every call ``monte-carlo``, for a matrix parameter
                ``kronecker`` and ``row-block`` (from the second moments of its gradients), and
                ``layers`` (the paper's E[a aᵀ] ⊗ E[g gᵀ], for matrices that the model applies as
                linear layers); with the observed targets, which make no Fisher information away
                from the truth, ``empirical``, ``empirical-kronecker`` and ``empirical-row-block``.

        Returns:
            The operator.

        Raises:
            ValueError: if the kind is unknown, or does not apply to this parameter.
        """
        if kind not in self.fisher_kinds:
            raise ValueError(f"kind must be one of {list(self.fisher_kinds)}, got {kind!r}")
        self._check_theta(x)
        return self._with_prior(self._fisher(x, batch, kind), x, batch)

    @override
    def fisher_of_part(self, whole: FisherOperator, batch: Tensor, *, kind: str) -> FisherOperator:
        x, given = whole.point, whole.targets
        targets = None if given is None else [y[batch] for y in given]
        return self._with_prior(self._fisher(x, batch, kind, targets), x, batch)

    def _with_prior(
        self, operator: FisherOperator, x: Point, batch: Tensor | None
    ) -> FisherOperator:
        operator.work = self._work(x) * (self.n_samples if batch is None else len(batch))
        if self.prior is None:
            return operator
        return PriorFisher(operator, self._log_prior, 1 / self.n_samples)

    @override
    def hessian(self, x: Point, batch: Tensor | None = None) -> Hessian:
        self._check_theta(x)
        found = Hessian(self.manifold, x, lambda theta: self.loss(theta, batch))
        samples = self.n_samples if batch is None else len(batch)
        found.work = self._work(x) * samples
        return found

    def _fisher(
        self,
        x: Point,
        batch: Tensor | None,
        kind: str,
        targets: list[Tensor] | None = None,
    ) -> FisherOperator:
        """One operator; ``targets``: in place of newly drawn ones."""
        data = self._samples(batch)

        def drawn(z: Tensor) -> list[Tensor]:
            nonlocal targets
            if targets is None:
                targets = self._draw(z)
            return targets

        structure = kind.removeprefix("empirical-")
        if structure in {"kronecker", "row-block"}:
            if isinstance(x, dict) or x.ndim != 2:
                raise ValueError(
                    f"kind={kind!r} needs a matrix as its parameter; use 'exact' or 'empirical'"
                )
            wanted = [data.targets]
            if structure == kind:
                wanted = drawn(self._outputs(x, data).detach())
            form = KroneckerFisher if structure == "kronecker" else RowBlockFisher
            operator = form.from_gradients(self.manifold, x, self._gradients(x, batch, wanted))
            operator.targets = targets
            return operator

        def outputs(theta: Point) -> Tensor:
            return self._outputs(theta, data)

        if kind == "layers":
            found = layer_fisher(
                self.manifold, x, outputs, self.likelihood, targets=drawn, weights=data.weights
            )
            found.targets = targets
            return found

        # a solver asks for the gradient first: the operator goes on with the graph of that
        # evaluation
        def jacobian(part: slice) -> Point:
            return self._jacobian_of(x, tuple(column[part] for column in data.rows))

        parts = (self.manifold, x, outputs, jacobian, self.likelihood)
        shared: dict[str, Any] = {"weights": data.weights, "graph": self._last.get(x, batch)}
        if kind == "empirical":
            return EmpiricalFisher(*parts, y=data.targets, **shared)
        if kind == "monte-carlo":
            if shared["graph"] is None:
                shared["graph"] = record(outputs, x)
            return MonteCarloFisher(*parts, targets=drawn(shared["graph"][1].detach()), **shared)
        exact = ExactFisher(*parts, **shared)
        if kind == "exact":
            return exact
        eye = torch.eye(flatten(x).numel(), dtype=leaves(x)[0].dtype, device=data.inputs.device)
        matrix = exact.in_basis(eye)
        for _ in range(2):  # P M P: the rows, then the columns
            rows = self.manifold.project(exact.point, unflatten(matrix, exact.point))
            matrix = flatten(reorder_like(rows, exact.point), batch=1).mT
        return DenseFisher(self.manifold, exact.point, (matrix + matrix.mT) / 2)

    def _work(self, x: Point) -> float:
        """Floating point operations of the model per sample, counted once for some of them."""
        if self._flops is None:
            few = _Data(*(None if c is None else c[:COUNTED] for c in self._samples(None)))  # type: ignore[arg-type]
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                self._outputs(x, few)
            self._flops = counter.get_total_flops() / len(few.inputs)
        return self._flops

    def _gradients(self, x: Point, batch: Tensor | None, targets: list[Tensor]) -> Tensor:
        """Per-sample gradients at given targets, times the roots of the weights."""
        weights = self._samples(batch).weights
        found = torch.cat([self.per_sample_gradients(x, batch, targets=y) for y in targets])
        if weights is None:
            return found
        return found * weights.to(found.dtype).sqrt().repeat(len(targets))[:, None, None]

    def _draw(self, z: Tensor) -> list[Tensor]:
        """Targets drawn from the model, as many per sample as ``draws``."""
        generator = self._generator()
        return [self.likelihood.sample(z, generator=generator) for _ in range(self.draws)]

    def _generator(self) -> torch.Generator:
        """A new one on the device of the data, seeded by that of the run, or by the number of this call."""
        if self.generator is not None:
            seed = int(torch.randint(2**31, (), generator=self.generator))
        else:
            self._calls += 1
            seed = (
                self.seed * 1_000_003 + self._calls
            ) % 2**32  # torch takes no more bits than these
        return torch.Generator(device=self.inputs.device).manual_seed(seed)

    def _outputs(self, theta: Point, data: _Data) -> Tensor:
        z = self.model(data.inputs, theta)
        if not self._outputs_checked:
            _check_outputs(z, data.inputs, data.offset)
            # one output tells the form of all: targets outside the first batch are checked, too
            self.likelihood.check_targets(
                self.targets, z[:1].expand(len(self.targets), *z.shape[1:])
            )
            self._outputs_checked = True
        return z if data.offset is None else z + data.offset

    def _check_model(self, theta: Point) -> None:
        """Raise before a mismatch of model and targets, or a lost dimension, becomes an error of torch.func."""
        self._check_independence(theta)
        if not self._alone_checked:
            one = _Data(*(None if column is None else column[:1] for column in self._samples(None)))  # type: ignore[arg-type]
            _check_outputs(self._outputs(theta, one), one.inputs)
            self._alone_checked = True

    def _samples(self, batch: Tensor | None) -> _Data:
        columns = (self.inputs, self.targets, self.weights, self.offset)
        if batch is None:
            return _Data(*columns)
        if isinstance(batch, Tensor) and batch.device not in {
            self.inputs.device,
            torch.device("cpu"),
        }:
            raise ValueError(
                f"batch must be on {self.inputs.device} like the data, got {batch.device}"
            )
        check_batch(batch, self.n_samples)
        return _Data(*(None if column is None else column[batch] for column in columns))  # type: ignore[arg-type]

    def _check_theta(self, theta: Point) -> None:
        check_theta(self.manifold, theta, [self.inputs])
        self._check_independence(theta)

    def _check_independence(self, theta: Point) -> None:
        if not self._independence_checked:
            self._independence_checked = check_independence(self.model, theta, self.inputs)


class _Data(NamedTuple):
    """The samples of a batch."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None
    offset: Tensor | None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """What the output of a sample depends on."""
        return (self.inputs,) if self.offset is None else (self.inputs, self.offset)


def _derivative(one: Callable[..., Tensor], theta: Point, *sample: Tensor) -> Point:
    """The Jacobian in θ for one sample by plain backward passes, one for each entry of the value."""
    variables, value = record(lambda t: one(t, *sample), theta)

    def backward(entry: Tensor) -> tuple[Tensor, ...]:
        if not entry.requires_grad:
            return tuple(map(torch.zeros_like, leaves(variables)))
        return torch.autograd.grad(
            entry, leaves(variables), retain_graph=True, materialize_grads=True
        )

    rows = [backward(entry) for entry in value.reshape(-1)]
    columns = (
        torch.stack(column).reshape(*value.shape, *column[0].shape)
        for column in zip(*rows, strict=True)
    )
    return unflatten_like(columns, variables)


def _check_parts(manifold: object, model: object, likelihood: object, prior: object) -> None:
    require_manifold(manifold)
    if not callable(model):
        raise TypeError(f"model must be a function of the inputs and theta, got {model!r}")
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"likelihood must be a likelihood such as Gaussian(), got {likelihood!r}")
    if prior is not None and not callable(prior):
        raise TypeError(
            f"prior must be a function of theta, minus the logarithm of its density, got {prior!r}"
        )


def _check_outputs(z: Tensor, inputs: Tensor, offset: Tensor | None = None) -> None:
    if not isinstance(z, Tensor) or z.ndim == 0 or len(z) != len(inputs):
        seen = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        hint = (
            "; a batch of one keeps its first dimension, which squeeze() drops"
            if len(inputs) == 1
            else ""
        )
        raise ValueError(
            f"model must return a tensor with one row per sample, ({len(inputs)}, ...), got "
            f"{seen}{hint}"
        )
    if not z.is_floating_point():
        hint = "; take its .real, or .abs().square()" if z.is_complex() else ""
        raise ValueError(f"model must return a floating tensor, got {z.dtype}{hint}")
    if offset is not None and offset.shape != z.shape:
        seen = tuple(offset.shape)
        raise ValueError(
            f"offset must have the shape of the model's output, {tuple(z.shape)}, got {seen}"
        )

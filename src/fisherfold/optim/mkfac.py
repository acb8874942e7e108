"""MKFAC: Kronecker-factored natural gradients on the spheres where scale-invariant weights live.

For a weight W that the network sees only up to the scale of its rows (or blocks of rows, or as a whole), with factors A
and G of its Fisher block, one step of size η is

    V = (A ⊗ G + λI)⁻¹ ∇W,     B ← P_W(μ B + V),     W ← R_W(-η B),

with P_W the projection to the tangent space of the spheres, R_W a retraction (exponential map or normalisation) and B
carried along. All other parameters get stochastic gradient descent with momentum, or Euclidean K-FAC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim import euclidean, groups, matching, norms, on_spheres, renewal, report, saving, statistics
from fisherfold.optim.curvature import Curvature, CurvatureOptions
from fisherfold.optim.distributed import rank, refuse_sharded_parts
from fisherfold.optim.fuse import eager
from fisherfold.optim.invariance import Finding
from fisherfold.optim.lengths import Lengths
from fisherfold.optim.losses import LossFunction, Sampler, check_loss_function, default_sampler
from fisherfold.optim.options import FISHERS, LOSSES, check_number, check_options, choice
from fisherfold.optim.precondition import products
from fisherfold.optim.replica import uncompiled, unwrap
from fisherfold.optim.report import Diagnosis
from fisherfold.optim.streams import Branches
from fisherfold.optim.tracking import track

CARRIED = (
    *("fisher", "reduction", "factor_decay", "max_rows", "exponential", "max_angle", "clip", "orthogonality"),
    *("balanced", "capturable", "fuse", "allow_tf32", "seed", "model", "findings", "refused", "curvature"),
    *("_grouped", "_age", "manifold_lr", "euclidean", "_refreshes", "_branches", "_lengths", "_example"),
)


class MKFAC(torch.optim.Optimizer):
    r"""Natural gradients for networks with normalisation: a drop-in ``torch.optim.Optimizer``.

    Scale-invariant weights are found by probing the model (``find_scale_invariant``), scaled to unit length and kept
    there. That does not change the network's function, up to the ε of its norms: the running statistics of batch norms
    are scaled along, so that a trained network stays the same in evaluation mode too. Where the outputs of the example
    input change by a tenth all the same (the ε is large beside small inputs, or a norm of your own has averages under
    other names), weights keep the lengths they have, as those that are loaded later do, and turn as if they had unit
    length. Rows of zero have no direction and are moved as in Euclidean space, with a warning. Call ``refresh`` (or
    train inside ``statistics()``) from time to time to renew the curvature; before the first time, MKFAC is Riemannian
    SGD.

    Args:
        model: a module, wrapped by DDP or ``torch.compile`` or not; or parameter groups, each with an entry
            ``"manifold"``: ``"none"``, ``"row"``, ``"tensor"`` or a number of spheres.
        lr: the step size of Euclidean parameters.
        manifold_lr: the step size of scale-invariant weights.
        momentum: μ, for both.
        weight_decay: for Euclidean parameters only; on a sphere it has no meaning and is refused.
        damping: λ; a group entry, used at the next refresh after it changes.
        invariant: ``"probe"``, ``"modules"`` (guess from the structure), ``"none"``, or a mapping from names to
            ``"row"``, ``"tensor"``, ``"none"`` or a number of spheres; by default ``"probe"`` where there is an example
            input, else ``"modules"``.
        example_input: a batch for the probe, also used to see which running statistics depend on the scale of weights:
            a tensor, a tuple of arguments or a mapping of keyword arguments.
        euclidean: ``"sgd"`` or ``"kfac"`` for matrix layers that are not scale invariant.
        damping_mode: ``"exact"`` (Tikhonov) or ``"factored"`` (π-split, cheaper, another direction).
        basis: ``"auto"`` (as many eigenvectors as ``basis_tolerance`` asks for), ``"full"``, or a fraction like 1/16.
        basis_tolerance: the accepted relative error of the direction on an automatic basis.
        fisher: ``"empirical"``, ``"mc"`` or ``"persample"``.
        reduction: how the loss is reduced over the batch: ``"mean"`` or ``"sum"``.
        factor_decay: β of the running mean over ``statistics()``; 0 keeps no factors besides the inverses.
        max_rows: roughly how many input rows of a layer are used per pass; None for all.
        retraction: ``"exp"`` (with parallel transport of the momentum) or ``"normalize"`` (with projection).
        max_angle: the largest angle in radians by which a row may turn in one step.
        clip: the length to which the direction of a row is cut before it joins the momentum, so that no row turns by
            more than ``manifold_lr * clip / (1 - momentum)``.
        orthogonality: ω of the penalty ω/2 ‖WWᵀ - I‖² on correlations between the unit rows of a weight, in place of
            weight decay; it is added to the direction, not preconditioned. Weights with more rows than columns, with
            rows of zero, of grouped convolutions, or on spheres of several rows are left out.
        balanced: divide the direction of every row by its running length, so that ``manifold_lr`` is the angle in
            radians by which each row turns per step (root mean square, for uncorrelated gradients).
        capturable: no host synchronisation in ``step``, fixed memory, the learning rate as a tensor.
        fuse: compile the update of a weight with ``torch.compile``.
        allow_tf32: let CUDA use TF32 in curvature products.
        model_of_groups: the module that owns the parameters, where groups are given; without it there is no curvature,
            and the running statistics of batch norms stay as they are.
        process_group: whose ranks share the statistics; the default group if there is one.
        seed: of the probe and of Monte-Carlo targets.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        >>> x, y = torch.randn(64, 8), torch.randint(3, (64,))
        >>> loss_fn = nn.CrossEntropyLoss()
        >>> opt = MKFAC(net, lr=0.1, manifold_lr=0.1, damping=0.1, example_input=x)
        >>> before = loss_fn(net(x), y).item()
        >>> for step in range(20):
        ...     with opt.statistics(enabled=step % 10 == 0):
        ...         opt.zero_grad()
        ...         loss = loss_fn(net(x), y)
        ...         loss.backward()
        ...     loss = opt.step()
        >>> loss_fn(net(x), y).item() < 0.8 * before
        True
    """

    uses_curvature = True
    _idle: frozenset[str] = frozenset()  # norms in evaluation mode at the last step

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float = 0.05,
        manifold_lr: float = 0.25,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        damping: float = 1.0,
        invariant: str | Mapping[str, str | int] | None = None,
        example_input: Any = None,
        euclidean: str = "sgd",
        damping_mode: str = "exact",
        basis: str | float = "auto",
        basis_tolerance: float = 0.05,
        fisher: str = "empirical",
        reduction: str = "mean",
        factor_decay: float = 0.95,
        max_rows: int | None = 2048,
        retraction: str = "exp",
        max_angle: float | None = None,
        clip: float | None = None,
        orthogonality: float = 0.0,
        balanced: bool = False,
        capturable: bool = False,
        fuse: bool = False,
        allow_tf32: bool = True,
        model_of_groups: nn.Module | None = None,
        process_group: Any = None,
        seed: int = 0,
    ) -> None:
        check_options(locals())
        self.fisher, self.reduction = fisher, reduction
        self.factor_decay, self.max_rows = factor_decay, max_rows
        self.exponential, self.max_angle, self.balanced = retraction == "exp", max_angle, balanced
        self.capturable, self.allow_tf32, self.seed = capturable, allow_tf32, seed
        self.clip, self.orthogonality = clip, orthogonality
        self.model = unwrap(model) if isinstance(model, nn.Module) else model_of_groups and unwrap(model_of_groups)
        if self.model is not None:
            refuse_sharded_parts(self.model)
        self.manifold_lr, self.euclidean = manifold_lr, euclidean
        self.fuse, self._branches, self._lengths = fuse, Branches(), Lengths()
        self.findings: dict[str, Finding] = {}
        if isinstance(model, nn.Module):
            self.findings = groups.findings(unwrap(model), invariant, example_input, seed)
            given: Any = groups.split(unwrap(model), self.findings)
            if euclidean == "sgd":
                groups.warn_of_sgd(type(self).__name__, unwrap(model), self.findings)
        else:
            given = groups.explicit(model, model_of_groups)
        options = CurvatureOptions(damping_mode, basis, basis_tolerance, capturable, allow_tf32, factor_decay > 0)
        defaults = {"momentum": momentum, "weight_decay": weight_decay, "damping": damping, "manifold": "none"}
        super().__init__(given, {"lr": lr, **defaults})
        self.curvature = Curvature(options, process_group)
        self._age = torch.zeros((), dtype=torch.int64, device=self._device() if capturable else "cpu")
        self._refreshes = 0
        self._example = example_input
        self._take_up()
        if all(p.requires_grad for p, _, spheres in self._entries() if spheres):
            self._example = None  # frozen weights need it when they are freed

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: the base class would leave all of this out."""
        return {**super().__getstate__(), **{name: vars(self)[name] for name in CARRIED}}

    # ------------------------------------------------------------------ parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``"manifold"`` entry decides how it is treated, and at which rate if it says none.

        The curvature of its layers is followed from now on, if they are layers of the model.

        Args:
            param_group: as for any optimizer.
        """
        group = groups.prepared(param_group, self.defaults, self.manifold_lr, capturable=self.capturable)
        # groups have names all or none; those from before their names were looked up have none
        by_name = "param_names" in self.param_groups[0] if self.param_groups else self.model is not None
        if by_name:
            group["params"] = groups.named(group["params"], self.model, len(self.param_groups))
        groups.check_group({**self.defaults, **group})
        super().add_param_group(group)
        if "_example" in vars(self):  # the groups of the constructor are taken up together
            self._take_up()

    def _entries(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], int]]:
        """Every parameter with its group and its number of spheres (0: Euclidean)."""
        for group in self.param_groups:
            for parameter, spheres in zip(group["params"], group["spheres"], strict=True):
                yield parameter, group, spheres

    def _products(self) -> AbstractContextManager[None]:
        return products(self._device(), allow_tf32=self.allow_tf32)

    def _device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

    def _take_up(self) -> None:
        """Follow the curvature of what is new, and put it on its spheres unless it is frozen."""
        self._track()
        on_spheres.constrain_freed(self)

    def _track(self) -> None:
        """Follow the curvature of the weights that are not followed yet."""
        self._grouped = on_spheres.grouped_weights(self.model)
        names, known = groups.names(self), self.curvature.by_weight
        self.refused: dict[str, str] = {}
        if self.model is None or not self.uses_curvature:
            return
        spheres = {id(p): s for p, _, s in self._entries() if p.ndim >= 2 and id(p) not in known}
        wanted = {key: names[key] for key, count in spheres.items() if count or self.euclidean == "kfac"}
        flat = [key for key in wanted if not spheres[key]]
        weights, self.refused = track(self.model, wanted, join_bias=flat, moved=names.keys())
        self.curvature.follow(weights)

    # ------------------------------------------------------------------ curvature

    @contextmanager
    def statistics(
        self,
        *,
        enabled: bool = True,
        invert: bool = True,
        samples: int | None = None,
        accumulation: int = 1,
        losses: str = "mean",
        grad_scaler: Any = None,
    ) -> Iterator[None]:
        """Collect curvature from the forward and backward passes that run inside, then renew the inverses.

        The passes may be those of training itself. A compiled model runs uncompiled inside. Calls of the model on as
        many samples before one backward pass belong to the terms of one loss. The loss itself is not seen: class
        weights enter with their squares, where ``refresh`` takes them as numbers of samples.

        Several backward passes may be over batches of one mean loss, whose Fisher matrix is the mean of theirs, or over
        the terms of a sum, such as the losses of two tasks, whose Fisher matrices add up as the gradients do. Nothing
        but ``losses`` tells the two apart.

        Args:
            enabled: False makes it a no-op, for ``statistics(enabled=step % 10 == 0)``.
            invert: False only updates the factors.
            samples: the number of terms in the loss's mean, per pass; by default the length of the model's first input,
                or of the first layer's where parts of the model are called by themselves. A mean over the tokens of
                sequences or the entries of a squared error has more: ``targets.numel()``.
            accumulation: by how many micro-batches each loss is divided.
            losses: what the losses of several backward passes are parts of: a ``"mean"`` or a ``"sum"``.
            grad_scaler: a ``torch.amp.GradScaler`` that scaled the loss.

        Yields:
            Nothing; it is an error if nothing was collected.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> net, x, z = nn.Linear(4, 2), torch.randn(64, 4), torch.randn(16, 4)
            >>> opt = MKFAC(net, euclidean="kfac")
            >>> with opt.statistics(losses="sum"):
            ...     net(x).square().mean().backward()
            ...     net(z).abs().mean().backward()
            >>> opt.step()
        """
        choice("losses", losses, LOSSES)
        check_number("accumulation", accumulation, 1.0)
        if samples is not None:
            check_number("samples", samples, 1.0)
        if not enabled:
            yield
            return
        model = renewal.module_of(self)
        scale = accumulation / (grad_scaler.get_scale() if grad_scaler is not None else 1.0)
        with uncompiled(), renewal.collecting(self, model) as collector, collector:
            collector.begin_by(renewal.passes_of_training(self.reduction, losses, samples, scale))
            yield
        if losses == "sum":
            renewal.add_up(collector, accumulation)
        renewal.fold(self, collector, self.factor_decay, invert=invert, forgive=grad_scaler is not None)

    @eager
    def refresh(
        self,
        batches: Iterable[tuple[Any, Any]],
        loss_fn: LossFunction,
        *,
        fisher: str | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Renew the curvature from batches of data, leaving gradients, running statistics and random state alone.

        Weights of PyTorch's loss modules (``weight``, ``pos_weight``) belong to the targets of the data: a sample of
        weight 3 is three samples, also where targets are drawn. Those inside a function of your own are not seen.

        Args:
            batches: pairs of inputs and targets.
            loss_fn: the loss of outputs and targets, reduced as declared.
            fisher: another choice than the optimizer's, for this time.
            sampler: draws targets for ``fisher="mc"`` from outputs, data targets and a generator; known for PyTorch's
                cross entropy, squared error and binary cross entropy.
        """
        kind = choice("fisher", fisher or self.fisher, FISHERS)
        check_loss_function(loss_fn)
        model = renewal.module_of(self)
        draw = (sampler or default_sampler(loss_fn)) if kind == "mc" else None
        generator = torch.Generator(device=self._device())
        generator.manual_seed(self.seed + 1_000_003 * self._refreshes + rank(self.curvature.process_group))
        with renewal.collecting(self, model) as collector:
            if kind == "persample":
                statistics.add_true_gradients(collector, batches, loss_fn, self.reduction)
            else:
                statistics.add_batches(collector, batches, loss_fn, self.reduction, draw, generator)
        self._refreshes += 1
        renewal.fold(self, collector, 0.0, invert=True, forgive=False)

    # ------------------------------------------------------------------ the step

    @eager
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: reevaluates the model and returns the loss, if given.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            groups.refuse_decay_on_spheres(group)
        groups.make_dense(self)
        if not self.capturable:
            groups.require_finite_gradients(self)
            norms.warn_of_lengths_that_matter(self)
        with self._products():
            directions = self._euclidean_directions()
            for group in self.param_groups:
                euclidean.step(group, self.state, directions)
            jobs = [(p, g, s) for p, g, s in self._entries() if s and p.grad is not None]
            self._branches.run(partial(on_spheres.step, self), jobs, parallel=self.capturable)
        self._age += 1
        return loss

    def _euclidean_directions(self) -> dict[int, Tensor]:
        flat = (p for p, _, s in self._entries() if not s and p.grad is not None)
        return euclidean.directions(self.curvature, flat, self._branches, parallel=self.capturable)

    @eager
    @torch.no_grad()
    def precondition_(self) -> None:
        """Replace gradients by natural gradients, tangent where the weight is on spheres; nothing else changes.

        For use with another optimizer.
        """
        groups.make_dense(self)
        with self._products():
            self._precondition()

    def _precondition(self) -> None:
        directions = self._euclidean_directions()
        for parameter, _, spheres in self._entries():
            if parameter.grad is None:
                continue
            if id(parameter) in directions:
                parameter.grad.copy_(directions[id(parameter)])
            elif spheres:
                parameter.grad.copy_(on_spheres.tangent_natural_gradient(self.curvature, parameter, spheres))

    # ------------------------------------------------------------------ what is going on

    def report(self) -> str:
        """How every parameter is treated and why, with the memory of its curvature.

        Returns:
            A table as text.
        """
        return report.treatment_table(self)

    def diagnostics(self) -> dict[str, Diagnosis]:
        """How far the curvature bends the current gradients; a cosine of 1 means that it does nothing.

        Returns:
            One entry per weight with curvature and a gradient.
        """
        return report.diagnose(self)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the curvature in its own dtype.

        Returns:
            A dictionary that ``torch.load(weights_only=True)`` accepts.
        """
        counters = {"age": int(self._age), "refreshes": self._refreshes}
        return saving.complete(self, saving.with_plain_numbers(super().state_dict()), counters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, to the bit.

        Args:
            state_dict: what ``state_dict`` returned for an optimizer of the same model.
        """
        state_dict = matching.by_names(self, saving.in_one_place(self, state_dict))
        matching.check_same_architecture(self, state_dict)
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        saving.take_over(self, state_dict, rates)
        self._age.fill_(int(state_dict["counters"]["age"]))
        self._refreshes = int(state_dict["counters"]["refreshes"])

"""SphereOptimizer: one ``torch.optim.Optimizer`` for all parameters of a network with normalisation layers.

Weights that the network sees only up to scale are moved on spheres by angles, along a direction made of the momentum:

    B ← μB + r ∇W,      D = P_W( direction(r ∇W + μB) ),      W ← R_W(-lr D),

with r the norms of the rows (blocks) of W, P_W the projection to the tangent space and R_W a rotation by ``lr`` radians
(``spheres``). Everything else gets AdamW, SGD, orthogonalised or Kronecker-factored steps (``rest``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fisherfold.optim import report as reports
from fisherfold.optim import rest
from fisherfold.optim.curvature.collecting import Curvature
from fisherfold.optim.directions import DIRECTIONS
from fisherfold.optim.distributed import any_process, is_sharded, local
from fisherfold.optim.grouping import (
    REST,
    Entry,
    check_number,
    choice,
    entries_of,
    filled,
    findings_of,
    groups_of,
    unwrap,
)
from fisherfold.optim.invariance import Finding
from fisherfold.optim.spheres import Spheres, rotate_all_
from fisherfold.warn import warn

NARROW = (torch.bfloat16, torch.float16)
LOOK_EVERY = 50  # steps between looks at the model as a whole
BatchNorms = nn.modules.batchnorm._BatchNorm


class SphereOptimizer(torch.optim.Optimizer):
    """A drop-in optimizer for networks with normalisation layers; the training loop stays as it is.

    Weights that are scale invariant, since a normalisation follows, are found by probing the model with
    ``example_input``, or guessed from its structure. Their step is an angle per row: ``lr`` is in radians, and
    schedulers change it as usual. All other weights get the optimizer ``rest`` with its own rate, as further parameter
    groups. Norms of rows are kept; nothing is rescaled, and buffers are never touched.

    Args:
        model: a module, wrapped by DDP or ``torch.compile`` or not; or parameter groups from
            ``fisherfold.optim.param_groups``.
        lr: the angle, in radians, by which every row on a sphere rotates per step.
        direction: ``"spectral"`` (orthogonalised momentum), ``"gradient"``, or ``"natural"`` (Kronecker-factored
            Fisher information, which collects itself).
        rest: ``"adamw"``, ``"sgd"``, ``"muon"`` (orthogonalised steps for hidden matrices, AdamW for embeddings, the
            last layer and vectors) or ``"kfac"``; ``"auto"`` is ``"muon"``.
        rest_lr: the rate of the rest: that of AdamW for ``"adamw"`` and ``"muon"`` (2e-3 by default), that of SGD for
            ``"sgd"`` and ``"kfac"`` (0.05).
        momentum: of spheres, SGD and orthogonalised steps.
        weight_decay: of matrices that are not on spheres; vectors have none.
        damping: of the natural direction, relative to the mean eigenvalue of each Kronecker factor.
        every: steps between collections of curvature; 0 leaves it to ``refresh``.
        invariant: ``"probe"``, ``"modules"`` (guess from the structure), ``"none"``, or a mapping from names of
            parameters to ``"row"``, ``"tensor"``, ``"none"`` or a number of spheres; by default ``"probe"`` where there
            is an example input, else ``"modules"``.
        example_input: a batch for the probe: a tensor, a tuple of arguments or a mapping of keyword arguments.
        process_group: whose ranks share curvature; the default group if there is one.

    Raises:
        TypeError: if it is given parameters that say nothing about the model.
        ValueError: if an option is out of range, or the model rejects the example.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        >>> x, y = torch.randn(64, 8), torch.randint(3, (64,))
        >>> opt = SphereOptimizer(net, lr=0.02, example_input=x)
        >>> for _ in range(50):
        ...     opt.zero_grad()
        ...     loss = nn.functional.cross_entropy(net(x), y)
        ...     loss.backward()
        ...     _ = opt.step()
        >>> loss.item() < 0.9
        True
    """

    _by_angle = True
    _nesterov = True
    _relative = True
    _mean = True

    def __init__(
        self,
        model: nn.Module | Iterable[Any],
        lr: float = 0.02,
        *,
        direction: str = "spectral",
        rest: str = "auto",
        rest_lr: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        damping: float = 0.1,
        every: int = 10,
        invariant: str | Mapping[str, str | int] | None = None,
        example_input: Any = None,
        process_group: Any = None,
    ) -> None:
        choice("direction", direction, DIRECTIONS)
        choice("rest", rest, REST)
        check_number("lr", lr, above=0.0)
        check_number("every", every, least=0)
        if rest_lr is not None:
            check_number("rest_lr", rest_lr, above=0.0)
        rest = "muon" if rest == "auto" else rest
        self.model = unwrap(model) if isinstance(model, nn.Module) else None
        self.findings: dict[str, Finding] = {}
        self._said: set[str] = set()
        groups: Any = model
        if self.model is not None:
            self.findings = findings_of(self.model, invariant, example_input)
            if not isinstance(invariant, Mapping) and invariant != "none":
                self._warn_without_spheres(rest, example_input)
            groups = groups_of(
                self.model,
                self.findings,
                lr=lr,
                rest=rest,
                rest_lr=rest_lr,
                weight_decay=weight_decay,
            )
        else:
            groups = _given_groups(groups, type(self).__name__)
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "damping": damping,
        }
        defaults |= {
            "rule": "adamw",
            "direction": direction,
            "nesterov": self._nesterov,
            "steps": 0,
            "due": 0,
        }
        super().__init__(groups, defaults)
        self.curvature = Curvature(every, process_group, relative=self._relative, mean=self._mean)
        self._follow()

    def _follow(self) -> None:
        curved = self._curved()
        if curved and self.model is None:
            raise TypeError(
                f"{type(self).__name__} collects curvature from the module: pass it instead of parameter groups"
            )
        self.curvature.follow(self.model, curved)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold."""
        own = {name: vars(self)[name] for name in ("model", "findings", "curvature", "_said")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "curvature" in vars(self):
            self.curvature.prepare(self.param_groups[0])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its entry ``"rule"`` decides how it is treated.

        Args:
            param_group: as for any optimizer; ``"rule"`` is ``"spheres"`` (on the unit rows of each weight, unless
                ``"spheres"`` lists other numbers), ``"adamw"`` (the default), ``"sgd"``, ``"muon"`` or ``"kfac"``.

        Raises:
            ValueError: if an entry is out of range.
        """
        super().add_param_group(filled(param_group, self.defaults))
        if "curvature" in vars(self):
            self._follow()

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step.

        Args:
            closure: computes the loss and its gradients once more, as for any optimizer.

        Returns:
            What the closure returns.

        Raises:
            FloatingPointError: if a gradient is not finite; parameters are unchanged.
            RuntimeError: if a preset with curvature is captured in a CUDA graph.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    # eager under ``torch.compile(opt.step)`` too: hooks come and go, and checks read values
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _update(self) -> None:
        self._check_gradients()
        if not self._relative and self.curvature.layers and _capturing():
            raise RuntimeError(
                f"{type(self).__name__} cannot be captured in a CUDA graph: the shapes of its inverses change; use "
                "SphereOptimizer(direction='natural'), whose inverses stay in their memory"
            )
        steps = self.param_groups[0]["steps"] + 1
        if steps == 1 or steps % LOOK_EVERY == 0:
            self._look_at_model()
        self.curvature.take_up(self, steps)
        for group in self.param_groups:
            entries = [entry for entry in entries_of(group) if entry.parameter.grad is not None]
            if entries:
                self._step_group(group, entries)
        self.param_groups[0]["steps"] = steps
        self.curvature.prepare(self.param_groups[0])

    def _step_group(self, group: dict[str, Any], entries: list[Entry]) -> None:
        rule, parameters = group["rule"], [entry.parameter for entry in entries]
        weights = [self._weight(p) for p in parameters]
        if rule == "spheres":
            self._on_spheres(group, entries, weights)
        else:
            gradients = [p.grad.to(w.dtype) for p, w in zip(parameters, weights, strict=True)]  # type: ignore[union-attr]
            states = [self._state(p, rule) for p in parameters]
            if rule == "adamw":
                rest.adamw_step(weights, gradients, states, group)
            elif rule == "sgd":
                rest.sgd_step(weights, gradients, states, group)
            elif rule == "kfac":
                rest.sgd_step(
                    weights, self._directions("natural", gradients, entries), states, group
                )
            else:
                self._orthogonal(group, entries, weights, gradients, states)
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)

    def _on_spheres(
        self, group: dict[str, Any], entries: list[Entry], weights: list[Tensor]
    ) -> None:
        """Momentum at unit norm, direction, rotation."""
        geometries = [
            Spheres(weight, entry) for weight, entry in zip(weights, entries, strict=True)
        ]
        momenta = []
        for entry, geometry in zip(entries, geometries, strict=True):
            scaled = geometry.at_unit_norm(entry.parameter.grad)  # type: ignore[arg-type]
            buffer = local(self._state(entry.parameter, "sgd")["momentum"])
            torch.add(scaled, buffer, alpha=group["momentum"], out=buffer)
            momenta.append(
                scaled.add_(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
            )
        directions = self._directions(group["direction"], momenta, entries)
        arranged = [g.arrange(d) for g, d in zip(geometries, directions, strict=True)]
        for device in {g.blocks.device for g in geometries}:
            here = [
                (g, d)
                for g, d in zip(geometries, arranged, strict=True)
                if g.blocks.device == device
            ]
            blocks, radii = [g.blocks for g, _ in here], [g.radius for g, _ in here]
            rotate_all_(blocks, [d for _, d in here], radii, group["lr"], by_angle=self._by_angle)
        for geometry in geometries:
            geometry.store()

    def _orthogonal(
        self,
        group: dict[str, Any],
        entries: list[Entry],
        weights: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
    ) -> None:
        momenta = []
        for gradient, state in zip(gradients, states, strict=True):
            buffer = state["momentum"].mul_(group["momentum"]).add_(gradient)
            momenta.append(
                local(
                    gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
                )
            )
        directions = self._directions("spectral", momenta, entries)
        shapes = [(len(e.parameter) // e.splits, e.parameter[0].numel()) for e in entries]
        rest.orthogonal_step([local(w) for w in weights], directions, shapes, group)

    def _directions(self, name: str, momenta: list[Tensor], entries: list[Entry]) -> list[Tensor]:
        inverses = [self.curvature.inverse(self.state[entry.parameter]) for entry in entries]
        return DIRECTIONS[name](momenta, entries, inverses)

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        """The parameter, or its copy in float32 where steps would be lost in its rounding."""
        if parameter.dtype not in NARROW:
            return parameter
        state, now = self.state[parameter], parameter.detach()
        if "master" not in state:
            state["master"] = now.float()
        own, now = local(state["master"]), local(now)
        # where the parameter is no longer its rounded copy, it has been loaded or changed by somebody else
        own.copy_(torch.where(own.to(now.dtype) == now, own, now.float()))
        return state["master"]

    def _state(self, parameter: nn.Parameter, rule: str) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if ("exp_avg" if rule == "adamw" else "momentum") not in state:
            like = torch.zeros_like(
                parameter,
                dtype=torch.float32 if parameter.dtype in NARROW else None,
                requires_grad=False,
            )
            state.update(rest.new_adam_state(like) if rule == "adamw" else {"momentum": like})
        return state

    # ------------------------------------------------------------------ checks

    def _check_gradients(self) -> None:
        pairs = [
            (e, local(e.parameter.grad)) for e in self._entries() if e.parameter.grad is not None
        ]
        gradients = [g for _, g in pairs]
        if not gradients or _capturing():
            return
        if any(g.is_sparse for g in gradients):
            raise ValueError(
                "sparse gradients are not supported: build the embedding with sparse=False"
            )
        sizes = torch._foreach_norm(gradients, float("inf"))
        bad = not bool(
            torch.isfinite(torch.stack([s.float().to(sizes[0].device) for s in sizes])).all()
        )
        if any(is_sharded(e.parameter) for e, _ in pairs):  # all ranks stop, or none
            bad = any_process(bad, self.curvature.group)
        if not bad:
            return
        names = [
            e.name for (e, _), s in zip(pairs, sizes, strict=True) if not bool(torch.isfinite(s))
        ]
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        listed = listed or "a shard of another process"
        self.curvature.prepare(self.param_groups[0])  # forget what came with it
        raise FloatingPointError(
            f"the gradient of {listed} is not finite; parameters are unchanged. Lower the learning rate, clip "
            "gradients, or use torch.amp.GradScaler with float16"
        )

    def _warn_without_spheres(self, rest: str, example_input: Any) -> None:
        if not any(finding.spheres for finding in self.findings.values()):
            hint = (
                ""
                if example_input is not None
                else "give example_input to let the model be probed, or "
            )
            warn(
                f"no weight of {type(self.model).__name__} was found to be scale invariant, as weights in front of "
                f"normalisation layers are: nothing is on spheres, the angle has no effect, and all parameters get "
                f"rest={rest!r}; {hint}pass invariant='none' if that is meant"
            )

    def _look_at_model(self) -> None:
        """Warn of a model that is no longer the one that the optimizer was made for."""
        if self.model is None:
            return
        own = {id(e.parameter) for e in self._entries()}
        named = self.model.named_parameters()
        lost = [n for n, p in named if p.requires_grad and p.grad is not None and id(p) not in own]
        if lost and not self._said & {"lost"}:
            self._said.add("lost")
            warn(
                f"the model has changed since its optimizer was made, which does not move {', '.join(lost[:3])}"
            )
        frozen = [
            n
            for n, m in self.model.named_modules()
            if isinstance(m, BatchNorms) and m.track_running_stats and not m.training
        ]
        if (
            frozen
            and not self._said & {"frozen"}
            and any(group["rule"] == "spheres" for group in self.param_groups)
        ):
            self._said.add("frozen")
            warn(
                f"batch norms are in evaluation mode while training ({', '.join(frozen[:3])}), so that the weights "
                "before them are not scale invariant; call model.train(), or pass invariant={name: 'none', ...}"
            )

    # ------------------------------------------------------------------ curvature and report

    def _entries(self) -> Iterator[Entry]:
        for group in self.param_groups:
            yield from entries_of(group)

    def _curved(self) -> dict[str, Entry]:
        """The entries whose direction is natural, by name."""
        found = {}
        for group in self.param_groups:
            if (group["rule"] == "spheres" and group["direction"] == "natural") or group[
                "rule"
            ] == "kfac":
                found.update({entry.name: entry for entry in entries_of(group)})
        return found

    def refresh(
        self, batches: Iterable[Any], loss_fn: Callable[..., Tensor], *, sampler: Any = None
    ) -> None:
        """Renew the curvature from whole batches, as in the paper's schedule; weights, gradients and buffers stay.

        Args:
            batches: pairs of inputs and targets.
            loss_fn: of outputs and targets, a mean over samples.
            sampler: draws targets from the outputs, for the Fisher matrix of the model instead of that of the data:
                a function of the outputs, or ``"mc"`` for cross-entropy, binary cross-entropy and mean squared errors.

        Raises:
            ValueError: if no weight has a natural direction, or no batch reaches one.
        """
        self.curvature.refresh(self, batches, loss_fn, sampler)

    def report(self) -> str:
        """How every parameter is treated and why, as a table.

        Returns:
            Text.
        """
        return reports.treatment_table(self)

    def diagnose(self) -> dict[str, reports.Diagnosis]:
        """How far curvature bends the present gradients.

        Returns:
            One entry per weight that has curvature and a gradient.
        """
        return reports.diagnose(self)

    # ------------------------------------------------------------------ state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Args:
            state_dict: of an optimizer of the same class for the same model.

        Raises:
            ValueError: if it is the state of another model, or not finite; nothing is changed.
        """
        groups = state_dict["param_groups"]
        saved = [i for group in groups for i in group["params"]]
        entries = list(self._entries())
        if len(saved) != len(entries):
            raise ValueError(
                f"the state is that of another model: {len(saved)} parameters, {len(entries)} expected"
            )
        names = [n for group in groups for n in group.get("param_names", [])]
        for name, entry in zip(names, entries, strict=bool(names)):
            if name != entry.name:
                raise ValueError(
                    f"the state is that of another model: it has {name} where {entry.name} is expected"
                )
        for index, entry in zip(saved, entries, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if (
                    key in {"momentum", "exp_avg", "master"}
                    and value.shape != entry.parameter.shape
                ):
                    shapes = f"{tuple(value.shape)}, expected {tuple(entry.parameter.shape)}"
                    raise ValueError(
                        f"the state is that of another model: {entry.name} has shape {shapes}"
                    )
                if not bool(torch.isfinite(value).all()):
                    raise ValueError(
                        f"the state is damaged: {key} of {entry.name} is not finite; nothing was loaded"
                    )
        for theirs, mine in zip(groups, self.param_groups, strict=False):
            for key in ("rule", "direction", "spheres"):
                if theirs.get(key, mine[key]) != mine[key] and (
                    key != "direction" or mine["rule"] == "spheres"
                ):
                    raise ValueError(
                        f"the state is that of another optimizer: {key}={theirs[key]!r} where {mine[key]!r} is expected"
                    )
        super().load_state_dict(state_dict)
        for index, entry in zip(
            saved, entries, strict=True
        ):  # torch casts states to the dtype of the parameter
            for key, value in state_dict["state"].get(index, {}).items():
                mine = self.state[entry.parameter].get(key)
                if (
                    isinstance(value, Tensor)
                    and isinstance(mine, Tensor)
                    and value.dtype != mine.dtype
                ):
                    self.state[entry.parameter][key] = value.detach().clone().to(mine.device)


def _capturing() -> bool:
    """Whether this step is being captured in a CUDA graph."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def _given_groups(groups: Any, own: str) -> list[Any]:
    """Groups given by the user, which must say how they are treated."""
    if isinstance(groups, Tensor):
        groups = [groups]
    with suppress(TypeError):
        groups = list(groups)
    if (
        not isinstance(groups, list)
        or not all(isinstance(g, dict) and "rule" in g for g in groups)
        or not groups
    ):
        raise TypeError(
            f"{own} needs the module to find the weights that belong on spheres, and was given bare parameters; "
            f"pass the module: {own}(model, ...), or groups from fisherfold.optim.param_groups"
        )
    return groups

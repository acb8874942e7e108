"""SphereOptimizer: one ``torch.optim.Optimizer`` for all parameters of a network.

Hidden matrices keep the norms of their rows and turn by an angle ``lr`` per step along their
orthogonalised momentum (``spheres``, ``spectral``); embeddings, heads, recurrent weights and
vectors get AdamW (``rest``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fisherfold.optim import averaging, grouping, loading, rest
from fisherfold.optim import report as reports
from fisherfold.optim.curvature.collecting import Curvature
from fisherfold.optim.distributed import any_process, is_sharded, local
from fisherfold.optim.grouping import check_number, choice, filled, unwrap
from fisherfold.optim.layout import Entry, entries_of
from fisherfold.optim.roles import FlowHooks
from fisherfold.optim.spheres import MAX_ANGLE, momentum_, rotate_
from fisherfold.optim.stacks import Held, Stack, spectral, stacks_of
from fisherfold.warn import warn

if TYPE_CHECKING:
    from fisherfold.optim.fused import FusedStep

NARROW = (torch.bfloat16, torch.float16)
# The oldest GPUs with products of bfloat16.
OLDEST = (8, 0)
# Steps between looks at the model as a whole.
LOOK_EVERY = 50
OWN = ("model", "overrides", "curvature", "total_steps", "average", "_said", "_seen", "_reasons")


class SphereOptimizer(torch.optim.Optimizer):
    """A drop-in optimizer with one rate for every network; the training loop stays as it is.

    Hidden matrices (convolutions, linear maps, fused queries, keys and values, experts) turn by the
    angle ``lr`` per step, in radians, row by row, along their orthogonalised momentum; the norms of
    rows stay. Embeddings, heads, recurrent weights and vectors get AdamW at ``rest_lr``. Which
    parameter is what is found from the types of modules and from the data flow of the first forward
    pass; ``report()`` tells.

    Args:
        model: a module, wrapped by DDP or ``torch.compile`` or not; or parameter groups from
            ``fisherfold.optim.param_groups``.
        lr: the angle, in radians, by which every row of a hidden matrix turns per step; about 0.002
            for fine-tuning.
        direction: ``"spectral"`` (orthogonalised momentum), ``"gradient"``, or ``"natural"``
            (Kronecker-factored Fisher information, which collects itself).
        rest: what all else gets: ``"adamw"``, ``"sgd"`` or ``"kfac"``.
        rest_lr: its rate; by default ``lr / 2`` for AdamW, with ``total_steps`` between that for
            short and ``lr / 10`` for long runs, and 0.05 for the others.
        momentum: of hidden matrices and of SGD.
        weight_decay: of heads, embeddings and other matrices that are not on spheres.
        betas: of AdamW.
        eps: of AdamW.
        ns_steps: the number of Newton-Schulz iterations.
        total_steps: lets all rates rise over the first tenth of so many steps and fall to zero at
            the end, without a scheduler.
        average: keep an average of the weights, which ``averaged()`` puts in their place.
        overrides: how parameters are treated, by name: ``"row"``, ``"tensor"`` (one sphere) or
            ``"adamw"``.
        lr_scales: factors of both rates by the names of modules or parameters, for layer-wise
            rates.
        damping: of the natural direction, relative to the mean eigenvalue of each Kronecker factor.
        every: steps between collections of curvature; 0 leaves it to ``refresh``.
        process_group: whose ranks share curvature; the default group if there is one.

    Raises:
        TypeError: if it is given parameters that say nothing about the model.
        ValueError: if an option is out of range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        >>> x, y = torch.randn(64, 8), torch.randint(3, (64,))
        >>> opt = SphereOptimizer(net, lr=0.02)
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
        rest: str = "adamw",
        rest_lr: float | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        ns_steps: int = 5,
        total_steps: int | None = None,
        average: bool = False,
        overrides: Mapping[str, str | int] | None = None,
        lr_scales: Mapping[str, float] | None = None,
        damping: float = 0.1,
        every: int = 10,
        process_group: Any = None,
    ) -> None:
        choice("direction", direction, grouping.DIRECTIONS)
        choice("rest", rest, grouping.REST)
        check_number("lr", lr, least=0.0)
        check_number("every", every, least=0)
        if total_steps is not None:
            check_number("total_steps", total_steps, above=0)
        if rest_lr is None:
            rest_lr = grouping.rest_rate(lr, rest, total_steps)
        check_number("rest_lr", rest_lr, least=0.0)
        self.total_steps = total_steps
        self.average = average
        self._said: set[str] = set()
        # what the checks of the last step have seen: the number of parameters without a gradient
        self._seen: int = -1
        self._fused: list[FusedStep] | None = None
        self.overrides = dict(overrides or {})
        self._flow: FlowHooks | None = None
        self._reasons: dict[str, str] = {}
        groups: Any = model
        self.model = (
            unwrap(model) if isinstance(model, nn.Module) else getattr(model, "model", None)
        )
        if isinstance(model, nn.Module):
            if next(model.parameters(), None) is None:
                raise ValueError(f"model must have parameters, {type(model).__name__} has none")
            treatments = self._treatments()
            groups = grouping.groups_of(
                self.model,  # type: ignore[arg-type]
                treatments,
                rates={"lr": lr, "rest_lr": rest_lr},
                rest=rest,
                weight_decay=weight_decay,
                scales=lr_scales,
            )
            on_spheres = any(t.spheres for t in treatments.values())
            if self._finds_roles and not (on_spheres or overrides):
                warn(f"{type(self.model).__name__} has no hidden matrix: all of it gets {rest}")
        else:
            groups = _given_groups(groups, type(self).__name__)
        defaults: dict[str, Any] = {
            "lr": lr,
            "rest_lr": rest_lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "ns_steps": ns_steps,
            "damping": damping,
            "rule": "adamw",
            "direction": direction,
            "nesterov": self._nesterov,
            "steps": 0,
            "due": 0,
            "format": grouping.FORMAT,
        }
        super().__init__(groups, defaults)
        for group in self.param_groups:
            group["own_lr"] = group["lr"]
        self.curvature = Curvature(every, process_group, relative=self._relative, mean=self._mean)
        self._follow()
        self._watch(model)

    # ------------------------------------------------------------------ treatment of parameters

    _finds_roles = True

    def _treatments(self, flow: Any = None) -> dict[str, grouping.Treatment]:
        """How each parameter is treated, by name."""
        assert self.model is not None
        found = grouping.treatments_of(self.model, self.overrides, flow)
        self._reasons = {name: treatment.reason for name, treatment in found.items()}
        return found

    def _watch(self, model: Any) -> None:
        """Look at the data flow of the next forward passes."""
        hidden = hasattr(model, "_orig_mod") or any(
            is_sharded(e.parameter) for e in self._entries()
        )
        if self.model is not None and self._finds_roles and not hidden:
            self._flow = FlowHooks(self.model)

    def _settle(self) -> None:
        """Move parameters between groups as the data flow of the first forward passes says."""
        if self._flow is None:
            return
        hooks, self._flow = self._flow, None
        flow = hooks.finish()
        if flow:
            loading.regroup(self, self._treatments(flow))
            self._follow()

    def _follow(self) -> None:
        self._fused = None
        curved = self._curved()
        if curved and self.model is None:
            raise TypeError(
                f"{type(self).__name__} collects curvature from the module: pass it instead of "
                f"parameter groups"
            )
        self.curvature.follow(self.model, curved)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold."""
        return {**super().__getstate__(), **{name: vars(self)[name] for name in OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._fused = None
        if "_flow" not in vars(self):
            self._flow = None
            if "model" in vars(self) and not self.state:
                self._watch(self.model)
        if "curvature" in vars(self):
            self.curvature.prepare(self.param_groups[0])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any optimizer.

        Of AdamW at ``rest_lr``, unless its entry ``"rule"`` says otherwise.

        Args:
            param_group: as for any optimizer; ``"rule"`` is ``"spheres"`` (every weight row by
                row), ``"adamw"``, ``"sgd"`` or ``"kfac"``.

        Raises:
            ValueError: if an entry is out of range.
        """
        param_group = filled(param_group, self.defaults)
        named = bool(self.param_groups) and "param_names" in self.param_groups[0]
        if named and not all(isinstance(p, tuple) for p in param_group["params"]):
            names = {id(p): name for name, p in self.model.named_parameters()} if self.model else {}
            start = sum(len(g["params"]) for g in self.param_groups)
            param_group["params"] = [
                (names.get(id(p), f"added.{start + i}"), p)
                for i, p in enumerate(param_group["params"])
            ]
        super().add_param_group(param_group)
        if "curvature" in vars(self):
            param_group["own_lr"] = param_group["lr"]
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
            ValueError: if a gradient is sparse or complex.
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
        self._settle()
        first = self.param_groups[0]
        steps = first["steps"] + 1
        self._look_at_model(steps)
        factor = averaging.rate_factor(steps, self.total_steps)
        served = self._served_on_gpu(factor)
        self._check_gradients(served)
        if not self._relative and self.curvature.layers and _capturing():
            raise RuntimeError(
                f"{type(self).__name__} cannot be captured in a CUDA graph: the shapes of its "
                f"inverses change; use "
                "SphereOptimizer(direction='natural'), whose inverses stay in their memory"
            )
        self.curvature.take_up(self, steps)
        for step in self._fused or ():
            step.step(factor)
        for group in self.param_groups:
            if served.issuperset(map(id, group["params"])):
                continue
            entries = [
                entry
                for entry in entries_of(group)
                if entry.parameter.grad is not None and id(entry.parameter) not in served
            ]
            if entries:
                self._step_group(group, entries, factor * group["lr"], steps)
        if self.average and served:
            parameters = [e.parameter for e in self._entries() if id(e.parameter) in served]
            states = [self.state[p] for p in parameters]
            weights = [self.state[p].get("master", p) for p in parameters]
            averaging.take_up(states, weights, steps)
        first["steps"] = steps
        self.curvature.prepare(first)

    def _served_on_gpu(self, factor: float) -> set[int]:
        """The parameters that fused steps serve.

        The steps are made anew where something has moved.
        """
        for step in self._fused or ():
            step.check()
        if self._fused is None or not all(step.is_current() for step in self._fused):
            self._fused = self._fuse()
        if not self._fused:
            return set()
        if _capturing():
            if self.total_steps is not None or self.average:
                raise RuntimeError(
                    "total_steps and average would be frozen in the CUDA graph that captures this "
                    "step; without a graph of yours the step captures itself"
                )
            self._warn_once(
                "captured",
                "this step is captured in a CUDA graph: its replays keep the rates of the "
                "capture, and schedules have "
                "no effect on them; without a graph of yours the step captures itself, and "
                "follows its rates",
            )
        rates = [g["lr"] for g in self.param_groups if g["rule"] == "spheres"]
        if "angle" not in self._said and any(factor * rate > MAX_ANGLE for rate in rates):
            self._check_angle(torch.tensor(rates))
        return set().union(*(step.served for step in self._fused))

    def _fuse(self) -> list[FusedStep]:
        """The fused steps, where there are GPUs that have the kernels."""
        capable = torch.version.cuda is not None and find_spec("triton") is not None
        devices = {e.parameter.device for e in self._entries() if e.parameter.is_cuda}
        if not (self._by_angle and capable and devices) or any(
            torch.cuda.get_device_capability(device) < OLDEST for device in devices
        ):
            return []
        from fisherfold.optim.fused import fused_steps

        return fused_steps(self, devices)

    def _step_group(
        self, group: dict[str, Any], entries: list[Entry], rate: float | Tensor, steps: int
    ) -> None:
        rule, parameters = group["rule"], [entry.parameter for entry in entries]
        weights = [self.weight_of(p) for p in parameters]
        states = [self.state_of(p, rule) for p in parameters]
        if rule == "spheres":
            self._on_spheres(group, entries, weights, rate)
        else:
            gradients = [p.grad.to(w.dtype) for p, w in zip(parameters, weights, strict=True)]  # type: ignore[union-attr]
            if rule == "adamw":
                rest.adamw_step(weights, gradients, states, group, rate)
            else:
                if rule == "kfac":
                    gradients = [
                        self._natural(e, g) for e, g in zip(entries, gradients, strict=True)
                    ]
                rest.sgd_step(weights, gradients, states, group, rate)
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)
        if self.average:
            averaging.take_up(states, weights, steps)

    def _on_spheres(
        self, group: dict[str, Any], entries: list[Entry], weights: list[Tensor], rate: Any
    ) -> None:
        """Momentum at unit norm, direction, rotation."""
        held = [Held(entry, weight) for entry, weight in zip(entries, weights, strict=True)]
        stacks = stacks_of(held, [self.state[entry.parameter] for entry in entries])
        for stack in stacks:
            m, w, g = (stack.blocks(t) for t in (stack.momentum, stack.weights, stack.gradients))
            nesterov = group["nesterov"]
            update, stack.share = momentum_(m, w, g, group["momentum"], nesterov=nesterov)
            stack.update = update.view_as(stack.momentum)
        for stack, direction in zip(stacks, self._directions(group, stacks), strict=True):
            angle = rate * stack.share if self._by_angle else rate
            weight = stack.blocks(stack.weights)
            angle = rotate_(weight, stack.blocks(direction), angle, by_angle=self._by_angle)
            self._check_angle(angle)
            stack.store()

    def _directions(self, group: dict[str, Any], stacks: list[Stack]) -> list[Tensor]:
        if group["direction"] == "spectral":
            return spectral(stacks, group["ns_steps"])
        if group["direction"] == "gradient":
            return [stack.update for stack in stacks]
        return [
            torch.cat(
                [
                    self._natural(h.entry, u).view_as(u)
                    for h, u in zip(stack.held, stack.parts(stack.update), strict=True)
                ]
            )
            for stack in stacks
        ]

    def _natural(self, entry: Entry, update: Tensor) -> Tensor:
        """The damped inverse of a weight applied, if it has one."""
        inverse = self.curvature.inverse(self.state[entry.parameter])
        if inverse is None:
            return update
        return inverse.apply(update.reshape(len(entry.parameter), -1)).reshape(update.shape)

    def weight_of(self, parameter: nn.Parameter) -> Tensor:
        """The parameter, or its copy in float32 where steps would be lost in its rounding."""
        if parameter.dtype not in NARROW:
            return parameter
        state, now = self.state[parameter], parameter.detach()
        if "master" not in state:
            state["master"] = now.float()
        loading.follow_(local(state["master"]), local(now))
        return state["master"]

    def state_of(self, parameter: nn.Parameter, rule: str) -> dict[str, Tensor]:
        """The state of a parameter, made where it is missing."""
        state: dict[str, Tensor] = self.state[parameter]
        if ("exp_avg" if rule == "adamw" else "momentum") not in state:
            like = torch.zeros_like(
                parameter,
                dtype=torch.float32 if parameter.dtype in NARROW else None,
                memory_format=torch.contiguous_format,
                requires_grad=False,
            )
            state.update(rest.new_adam_state(like) if rule == "adamw" else {"momentum": like})
        return state

    # ------------------------------------------------------------------ checks

    def _check_gradients(self, served: set[int]) -> None:
        """Raise for gradients that cannot be used; fused steps look for infinities themselves."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if any(
            p.grad is not None and (p.grad.is_sparse or p.grad.is_complex()) for p in parameters
        ):
            self._raise_for_kind()
        left = {id(p) for p in parameters if p.grad is not None} - served
        if not left or _capturing():
            return
        entries = [e for e in self._entries() if id(e.parameter) in left]
        pairs = [(e, local(e.parameter.grad)) for e in entries]  # type: ignore[arg-type]
        sharded = any(is_sharded(e.parameter) for e in entries)
        pairs = [(e, g) for e, g in pairs if g.numel()]  # a shard may be empty
        sizes = torch._foreach_norm([g for _, g in pairs], float("inf")) if pairs else []
        flags = [torch.isfinite(s).to(sizes[0].device) for s in sizes]
        bad = bool(flags) and not bool(torch.stack(flags).all())
        if sharded:  # all ranks stop, or none
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
            f"the gradient of {listed} is not finite; parameters are unchanged. Lower the "
            f"learning rate, clip "
            "gradients, or use torch.amp.GradScaler with float16"
        )

    def _raise_for_kind(self) -> None:
        for entry in self._entries():
            g = entry.parameter.grad
            if g is not None and g.is_sparse:
                raise ValueError(
                    f"the gradient of {entry.name} is sparse, which is not supported: build the "
                    f"embedding with "
                    "sparse=False"
                )
            if g is not None and g.is_complex():
                raise ValueError(
                    f"the gradient of {entry.name} is complex, which is not supported: keep the "
                    f"parameter as "
                    "torch.view_as_real of it"
                )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warn(message)

    def _check_angle(self, angles: Tensor) -> None:
        if angles.is_cuda or "angle" in self._said or not angles.numel():
            return
        largest = float(angles.max())
        if largest > MAX_ANGLE:
            self._warn_once(
                "angle",
                f"rows would turn by {largest:.2g} radians in a step, and turn by {MAX_ANGLE}: "
                f"lower lr, which is an "
                "angle",
            )

    def _look_at_model(self, steps: int) -> None:
        """Take up parameters that have been exchanged, and warn of what is not as it was."""
        missing = sum(p.grad is None for group in self.param_groups for p in group["params"])
        changed, self._seen = missing != self._seen, missing
        if not changed and steps % LOOK_EVERY:
            return
        if self.total_steps is not None and steps > self.total_steps:
            self._warn_once("over", f"total_steps={self.total_steps} are over: rates are 0")
        self._check_rates()
        if self.model is None:
            return
        adopted, lost = loading.adopt(self)
        if adopted:
            warn(
                f"{', '.join(adopted[:3])} of the model is a new parameter, and is trained from "
                f"now on"
            )
        if lost:
            self._warn_once(
                "lost",
                "the model has got parameters that its optimizer does not move: "
                f"{', '.join(lost[:3])}; use "
                "add_param_group",
            )
        if adopted:
            self._follow()

    def _check_rates(self) -> None:
        """Warn of a scheduler that gives all groups the same rate."""
        rates = [(g["lr"], g.get("own_lr")) for g in self.param_groups if g["params"]]
        if any(isinstance(r, Tensor) or isinstance(own, Tensor) for r, own in rates):
            return
        now, own = ({pair[i] for pair in rates} for i in (0, 1))
        if len(now) == 1 and len(own) > 1 and now != {0.0}:
            self._warn_once(
                "rates",
                "something has given all groups the same rate, but those of spheres are angles "
                "and the others rates of "
                "AdamW: pass a list, as in OneCycleLR(opt, max_lr=[g['lr'] for g in "
                "opt.param_groups], ...)",
            )

    # ------------------------------------------------------------------ averages, curvature and
    # report

    def averaged(self, batches: Iterable[Any] | None = None) -> AbstractContextManager[None]:
        """A context with the averages in the place of weights, for evaluation.

        Needs ``average=True``.

        Args:
            batches: of inputs, from which the statistics of batch norms are renewed; needed where
                there are any.

        Returns:
            The context; after it weights, buffers and modes are what they were.

        Raises:
            ValueError: if there is no average, or batches are needed and missing.
        """
        return averaging.averaged(self.model, list(self._entries()), self.state, batches)

    def _entries(self) -> Iterator[Entry]:
        for group in self.param_groups:
            yield from entries_of(group)

    def _curved(self) -> dict[str, Entry]:
        """The entries whose direction is natural, by name."""
        found = {}
        for group in self.param_groups:
            natural = group["rule"] == "spheres" and group["direction"] == "natural"
            if natural or group["rule"] == "kfac":
                found.update({entry.name: entry for entry in entries_of(group)})
        return found

    def refresh(
        self, batches: Iterable[Any], loss_fn: Callable[..., Tensor], *, sampler: Any = None
    ) -> None:
        """Renew the curvature from whole batches, as in the paper's schedule.

        Weights, gradients and buffers stay.

        Args:
            batches: pairs of inputs and targets.
            loss_fn: of outputs and targets, a mean over samples.
            sampler: draws targets from the outputs, for the Fisher matrix of the model instead of
                that of the data: a function of the outputs, or ``"mc"`` for cross-entropy, binary
                cross-entropy and mean squared errors.

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Args:
            state_dict: of an optimizer of the same class for the same model.

        Raises:
            ValueError: if it is the state of another model, optimizer or version, or not finite;
                nothing is changed.
        """
        order = loading.validated(self, state_dict)
        if self._flow is not None:
            self._flow.finish()
            self._flow = None
        loading.arrange(self, order)
        super().load_state_dict(state_dict)
        loading.restore_dtypes(self, state_dict)
        self._follow()
        self.curvature.prepare(self.param_groups[0])


def _capturing() -> bool:
    """Whether this step is being captured in a CUDA graph."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def _given_groups(groups: Any, own: str) -> list[Any]:
    """Groups given by the user, which must say how they are treated."""
    if isinstance(groups, Tensor):
        groups = [groups]
    with suppress(TypeError):
        groups = list(groups)
    good = isinstance(groups, list) and all(isinstance(g, dict) and "rule" in g for g in groups)
    if not good or not groups:
        raise TypeError(
            f"{own} needs the module to tell hidden matrices from heads, and was given bare "
            f"parameters; pass the "
            f"module: {own}(model, ...), or groups from fisherfold.optim.param_groups"
        )
    return groups

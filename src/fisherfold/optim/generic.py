"""Generic values for the parameters of a network, where no identity holds but those of its architecture.

A network at its start is a special point: biases are zero, gains are one, the last layer or the last gain of a
residual branch may be zero. Identities hold there that end with the first step. Since a network is a piecewise
analytic function of its parameters, an identity that holds at a random point of an open set holds all around it, so
every parameter p is moved:

    p ← s · p/rms(p) · (1 + u),   u ~ U(-½, ½),   with ±s in the place of entries that are (nearly) zero,

where s is its own size rms(p), or a usual one where its own is out of the ordinary. Tensors of one sign keep it, as a
scale may be under a root or a logarithm; the signs of others are drawn, so that no unit stays dead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

LAYERS_WITH_BIAS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
SPREADS = {"free": 0.5, "gentle": 0.1}
VECTOR_SIZE = 0.3
NEARLY_ZERO = 0.05


class Points:
    """Moves the parameters of a model between its own values and generic ones.

    Args:
        model: its parameters are changed in place.
        seed: of the generic values.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed = seed
        self.parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point() and p.numel() > 0}
        self.own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        modules = [(m, key, p) for m in model.modules() for key, p in m._parameters.items() if p is not None]
        modules = [entry for entry in modules if id(entry[2]) in names]
        self._vectors = {names[id(p)] for m, _, p in modules if _is_vector(p) or isinstance(m, LOOKUPS)}
        self._biased = [(names[id(p)], m) for m, key, p in modules if key == "bias" and isinstance(m, LAYERS_WITH_BIAS)]
        padded = [(names[id(p)], m.padding_idx) for m, _, p in modules if isinstance(m, LOOKUPS)]
        self._padding = [(name, row) for name, row in padded if row is not None]
        self._bias_sizes: dict[str, float] = {}
        self._own_sizes = {name: _rms(own) for name, own in self.own.items()}
        self._places: dict[str, tuple[Any, ...] | None] = dict.fromkeys(self.parameters)
        self._states: dict[tuple[int, str], Tensor] = {}

    def usual_size(self, name: str) -> float:
        """The size of a parameter's entries that keeps signals at their size: 1/√(length of a row), 1 for a vector.

        Args:
            name: of the parameter.

        Returns:
            A positive number.
        """
        value = self.own[name]
        return 1.0 if name in self._vectors else (len(value) / value.numel()) ** 0.5

    def asleep(self, name: str) -> bool:
        """Whether a parameter is so small that it may hide what lies before it.

        Args:
            name: of the parameter.

        Returns:
            True for one that is zero, or a hundredth of its usual size.
        """
        return self._own_sizes[name] < 1e-2 * self.usual_size(name)

    def hiding(self, *, but: Collection[str]) -> list[str]:
        """The parameters that may hide what lies before them: asleep, and no biases of layers, which only add to it.

        Args:
            but: the names of those that are left out.

        Returns:
            Names.
        """
        left_out = {*but, *(name for name, _ in self._biased)}
        return [name for name in self.own if name not in left_out and self.asleep(name)]

    def measure_biases(self, run: Callable[[], Any]) -> None:
        """Find out how large the biases of layers must be to matter: half as large as what they are added to.

        Args:
            run: runs the model.
        """
        seen: dict[str, float] = {}

        def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, _inputs, output: seen.update({name: _rms(output.detach())})

        handles = [module.register_forward_hook(hook(name)) for name, module in self._biased]
        self._bias_sizes = {name: 0.0 for name, _ in self._biased}
        try:
            self.move("free", 0)
            run()
        finally:
            for handle in handles:
                handle.remove()
        self._bias_sizes = {name: 0.5 * size for name, size in seen.items() if size > 0}

    def move(self, manner: str, draw: int, *, only: Collection[str] | None = None) -> None:
        """Put parameters at generic values, all others at their own.

        Args:
            manner: ``"free"``, or ``"gentle"`` to stay near the model's own values.
            draw: different numbers give different values.
            only: the names of the parameters to move; all if not given.
        """
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + draw)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                moves = only is None or name in only
                place = (manner, draw, self._size(name, manner))
                # one that is there already stays, unless its module has changed it since
                stays = moves and self._places[name] == (*place, parameter._version)
                draws = self._draws(name, draw, generator, needed=moves and not stays)
                if not moves:
                    self._put_back(name)
                elif draws is not None:
                    own = self.own[name]
                    size, spread = (self._own_sizes[name], place[2]), SPREADS[manner]
                    parameter.copy_(_moved(own, size, spread, manner == "free", draws))
                    self._places[name] = (*place, parameter._version)
            for name, row in self._padding:  # no gradient ever moves it
                self.parameters[name][row] = self.own[name][row]

    def restore(self) -> None:
        """Put all parameters back at the model's own values."""
        with torch.no_grad():
            for name in self.parameters:
                self._put_back(name)

    def _put_back(self, name: str) -> None:
        self.parameters[name].copy_(self.own[name])
        self._places[name] = None

    def _draws(self, name: str, draw: int, generator: torch.Generator, *, needed: bool) -> tuple[Tensor, Tensor] | None:
        """Uniform numbers and coins for a parameter, the same ones whenever they are asked for."""
        # parameters draw in turn from one generator on the host, the first time whether they need it or not; where a
        # draw is repeated, each goes on from where it began
        own, key = self.own[name], (draw, name)
        if key not in self._states:
            self._states[key] = generator.get_state()
        elif needed:
            generator.set_state(self._states[key])
        else:
            return None
        uniform = torch.rand(own.shape, generator=generator, dtype=own.dtype, device="cpu")
        coins = torch.rand(own.shape, generator=generator, device="cpu") < 0.5
        return (uniform, coins) if needed else None

    def _size(self, name: str, manner: str) -> float:
        own, usual = self._own_sizes[name], self.usual_size(name)
        if manner == "gentle":
            return own or 0.1 * usual
        if name in self._bias_sizes:
            return self._bias_sizes[name]
        if name in self._vectors:
            return max(own, VECTOR_SIZE)
        return own if 0.1 * usual <= own <= 10 * usual else usual


def _is_vector(parameter: Tensor) -> bool:
    """Gains, shifts, tokens and tables that are broadcast: no rows that something is multiplied by."""
    return parameter.ndim < 2 or len(parameter) == 1


def _rms(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt())


def _moved(own: Tensor, sizes: tuple[float, float], spread: float, free: bool, draws: tuple[Tensor, Tensor]) -> Tensor:
    """A tensor like another, with entries of about the second of two sizes, where the first is its own."""
    rms, size = sizes
    base = own * (size / rms) if rms > 1e-150 else torch.zeros_like(own)
    uniform, coins = (t.to(own.device) for t in draws)
    lengths = base.abs()
    small = lengths <= NEARLY_ZERO * size
    lengths.masked_fill_(small, size).mul_(uniform.mul_(2).sub_(1).mul_(spread).add_(1))
    lowest, highest = torch.stack(base.masked_fill_(small, 0.0).aminmax()).tolist()
    if lowest >= 0 and highest > 0:
        return lengths
    if highest <= 0 and lowest < 0:
        return lengths.neg_()
    return torch.where(coins if free else base < 0, -lengths, lengths)

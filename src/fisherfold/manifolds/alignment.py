r"""How two frames lie to each other: the rotation between them, and a function of their principal angles.

With ``m = xᵀy = U cos(θ) Vᵀ`` the rotation is ``Q = U Vᵀ``, the polar factor of m, and ``c = m Qᵀ = U cos(θ) Uᵀ``. Both
are smooth functions of m while no angle is a right one, but singular vectors are not: their derivatives divide by
differences of singular values, which are all 1 where the subspaces meet. So Q is differentiated as what it is: from
``m = c Q`` with c symmetric, ``Qᵀ dQ = X`` solves the Sylvester equation ``p X + X p = Qᵀdm - dmᵀQ`` with
``p = Qᵀm``, whose own derivatives are Sylvester equations again. And ``θ / sin θ`` is a power series of matrices.
The inverse root that makes a frame of a step is differentiated in the same way.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

# θ / sin θ = Σ 4^k (k!)² / (2k + 1)! w^k in w = sin²(θ/2) ≤ 1/2; what is left out is below 1e-16. In rows of seven.
_WIDTH = 7
_SERIES = [4**k * math.factorial(k) ** 2 / math.factorial(2 * k + 1) for k in range(_WIDTH**2)]


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenvalues and eigenvectors of Hermitian matrices; NaN eigenvalues where an entry is not finite."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not listed by torch
        # A step that went astray must come back as a point that can be rejected, not as an exception.
        finite = torch.isfinite(matrix).all(dim=-1).all(dim=-1)[..., None]
        values, vectors = torch.linalg.eigh(torch.where(finite[..., None], matrix, 0.0))
        values = torch.where(finite, values, torch.nan)
    return values, vectors


def angle_over_sine(cosines: Tensor) -> Tensor:
    """The matrix function ``θ / sin θ`` of the cosines of angles between 0 and a right one."""
    eye = torch.eye(cosines.shape[-1], dtype=cosines.dtype, device=cosines.device).expand_as(cosines)
    w = 0.5 * (eye - cosines)
    powers = [eye]
    for _ in range(_WIDTH):
        powers.append(powers[-1] @ w)
    rows = torch.tensor(_SERIES, dtype=w.dtype, device=w.device).reshape(_WIDTH, _WIDTH)
    parts = torch.tensordot(rows, torch.stack(powers[:_WIDTH]), dims=1)
    value = parts[-1]
    for part in reversed(parts[:-1].unbind()):
        value = value @ powers[_WIDTH] + part
    return value


def rotation_between(matrix: Tensor) -> Tensor:
    """The orthogonal polar factor ``U Vᵀ`` of ``m = U s Vᵀ``, which can be differentiated any number of times."""
    return _applied(_Rotation, matrix)


def _applied(function: Any, *arguments: Tensor) -> Tensor:
    """The function; its ``apply`` takes 0.2 ms to look at names of arguments, so only where derivatives are wanted."""
    plain = not (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)
    if plain and not any(argument.requires_grad for argument in arguments):
        return cast("Tensor", function.forward(*arguments))
    return cast("Tensor", function.apply(*arguments))


class _Rotation(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor) -> Tensor:
        left, _, right = torch.linalg.svd(matrix)
        found: Tensor = left @ right
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        matrix, q = ctx.saved_tensors
        z = _sylvester(_symmetric(q.mT @ matrix), q.mT @ gradient)
        found: Tensor = q @ (z - z.mT)
        return found

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        matrix, q = ctx.saved_tensors
        turned = q.mT @ tangent
        found: Tensor = q @ _sylvester(_symmetric(q.mT @ matrix), turned - turned.mT)
        return found


def inverse_root(gram: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
    """The inverse root ``g^{-1/2}``, which can be differentiated as ``rotation_between`` can."""
    return _applied(_InverseRoot, gram, values, vectors)


class _InverseRoot(torch.autograd.Function):
    """``x = g^{-1/2}``: from ``x g x = I``, with the root ``r = g x``, ``r dx + dx r = -x dg x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gram: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        return (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gram, x = ctx.saved_tensors
        found: Tensor = -x @ _along_root(gram, x, gradient) @ x
        return found, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        gram, x = ctx.saved_tensors
        return -_along_root(gram, x, x @ tangent @ x)


def _along_root(gram: Tensor, x: Tensor, right: Tensor) -> Tensor:
    root = _symmetric(gram @ x)
    # a constant that takes out the size of g, so that nothing is flat because it is small
    size = root.detach().diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    return _sylvester(root / size, right / size)


class _Sylvester(torch.autograd.Function):
    """The X of ``p X + X p = r`` for a symmetric, positive semi-definite p."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, r: Tensor) -> Tensor:
        values, vectors = eigh(p)
        total = values.unsqueeze(-1) + values.unsqueeze(-2)
        # at two right angles there is nothing to divide by: many geodesics are shortest, and the one taken is kept
        flat = total <= 4 * torch.finfo(p.dtype).eps
        inside = torch.where(flat, 0.0, vectors.mT @ r @ vectors / torch.where(flat, 1.0, total))
        return vectors @ inside @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        p, x = ctx.saved_tensors
        y = _sylvester(p, gradient)
        return -(y @ x.mT + x.mT @ y), y

    @staticmethod
    def jvp(ctx: Any, p_tangent: Tensor, r_tangent: Tensor) -> Tensor:
        p, x = ctx.saved_tensors
        return _sylvester(p, r_tangent - p_tangent @ x - x @ p_tangent)


def _sylvester(p: Tensor, r: Tensor) -> Tensor:
    return _applied(_Sylvester, p, r)


def _symmetric(matrix: Tensor) -> Tensor:
    return 0.5 * (matrix + matrix.mT)

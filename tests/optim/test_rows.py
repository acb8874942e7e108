"""The fused sphere step against the operations of the Oblique manifold."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from fisherfold.manifolds import Oblique
from fisherfold.optim.fuse import fused
from fisherfold.optim.rows import (
    advance,
    balance,
    decorrelation,
    sphere_step,
    tangent,
    unit_rows,
    update_on_spheres,
)  # fmt: skip


def setting(rows: int = 5, columns: int = 7) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    oblique = Oblique(rows, columns)
    w = oblique.random_point(generator=generator)
    v = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    b = oblique.random_tangent(w, generator=generator)
    return w, v, b


def test_tangent_is_the_projection_of_the_manifold() -> None:
    w, v, _ = setting()
    torch.testing.assert_close(tangent(w, v), Oblique(5, 7).project(w, v))


@pytest.mark.parametrize(
    ("exponential", "retraction", "transport"), [(True, "exp", "parallel"), (False, "normalize", "projection")]
)
def test_step_is_retraction_and_transport_of_the_manifold(exponential: bool, retraction: str, transport: str) -> None:
    oblique = Oblique(5, 7)
    w, v, b = setting()
    moved, carried = sphere_step(w, v, b, 0.3, 0.9, exponential)
    momentum = oblique.project(w, v) + 0.9 * b
    expected = oblique.retract(w, -0.3 * momentum, method=retraction)
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(carried, oblique.transport(w, expected, momentum, method=transport))
    oblique.check_point(moved)
    oblique.check_tangent(moved, carried)


def test_parallel_transport_keeps_the_length_and_projection_shortens_it() -> None:
    w, v, b = setting()
    length = (tangent(w, v) + 0.9 * b).norm(dim=1)
    torch.testing.assert_close(sphere_step(w, v, b, 0.3, 0.9, True)[1].norm(dim=1), length)
    assert bool((sphere_step(w, v, b, 0.3, 0.9, False)[1].norm(dim=1) < length).all())


def test_zero_direction_stays() -> None:
    w, _, _ = setting()
    moved, carried = sphere_step(w, torch.zeros_like(w), torch.zeros_like(w), 0.3, 0.9, True)
    torch.testing.assert_close(moved, w)
    assert bool((carried == 0).all())


def test_angle_is_capped() -> None:
    w, v, b = setting()
    moved, carried = sphere_step(w, 100 * v, b, 0.3, 0.9, True, 0.2)
    cosine = (w * moved).sum(dim=1)
    torch.testing.assert_close(torch.arccos(cosine), torch.full((5,), 0.2, dtype=torch.float64))
    Oblique(5, 7).check_tangent(moved, carried)


def test_float32_rows_do_not_drift_off_the_sphere() -> None:
    w, v, b = (t.float() for t in setting())
    generator = torch.Generator().manual_seed(1)
    for _ in range(2000):
        v = torch.randn(w.shape, generator=generator)
        w, b = sphere_step(w, v, b, 0.01, 0.9, True)
    assert float((w.norm(dim=1) - 1).abs().max()) < 3e-7
    assert float(((w * b).sum(dim=1) / b.norm(dim=1)).abs().max()) < 1e-6


def test_unit_rows_leave_rows_without_a_direction() -> None:
    w = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-20, 0.0]])
    scaled, alive = unit_rows(w)
    torch.testing.assert_close(scaled, torch.tensor([[0.6, 0.8], [0.0, 0.0], [1e-20, 0.0]]))
    assert alive is not None
    assert alive.flatten().tolist() == [True, False, False]
    assert unit_rows(w[:1])[1] is None


def test_dead_rows_move_as_in_euclidean_space() -> None:
    w = torch.tensor([[0.6, 0.8], [0.0, 0.0]])
    v = torch.ones(2, 2)
    state = {"momentum_buffer": torch.zeros(2, 2), "alive": torch.tensor([[True], [False]])}
    update_on_spheres(w, v, state, advance, (0.5, 0.9, True, None, None, 0.0))
    torch.testing.assert_close(w[1], torch.tensor([-0.5, -0.5]))
    assert float(w[0].norm()) == pytest.approx(1.0)


def turned(scales: torch.Tensor, steps: int = 400, lr: float = 0.01) -> tuple[torch.Tensor, torch.Tensor]:
    """The last points and the mean square angle per step of rows that random directions push."""
    generator = torch.Generator().manual_seed(1)
    w, _, _ = setting(4, 300)
    b, sums, angles = torch.zeros_like(w), torch.zeros(4, 2, dtype=w.dtype), []
    for _ in range(steps):
        v = scales * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        before = w.clone()
        advance(w, v, b, lr, 0.9, True, None, None, 0.0, sums)
        angles.append(torch.acos((before * w).sum(dim=1).clamp(max=1)).square())
    return w, torch.stack(angles[50:]).mean(dim=0).sqrt()


def test_balanced_rows_turn_by_the_same_angle_whatever_their_gradients() -> None:
    scales = torch.tensor([[1e-4], [1.0], [30.0], [2.0]], dtype=torch.float64)
    points, angles = turned(scales)
    torch.testing.assert_close(angles, torch.full((4,), 0.01, dtype=torch.float64), rtol=0.05, atol=0.0)
    torch.testing.assert_close(points, turned(torch.ones(4, 1, dtype=torch.float64))[0])


def test_balance_divides_by_the_running_length_of_the_tangent_part() -> None:
    w, v, _ = setting()
    sums = torch.zeros(5, 2, dtype=torch.float64)
    lengths = tangent(w, v).norm(dim=1, keepdim=True)
    torch.testing.assert_close(balance(w, v, sums, 0.6), 0.8 * tangent(w, v) / lengths)
    second = balance(w, 3 * v, sums, 0.6)
    mean = (0.99 * 0.01 * lengths**2 + 0.01 * 9 * lengths**2) / (0.99 * 0.01 + 0.01)
    torch.testing.assert_close(second, 0.8 * 3 * tangent(w, v) / mean.sqrt())
    assert bool((balance(w, torch.zeros_like(v), torch.zeros_like(sums), 0.6) == 0).all())


def test_decorrelation_is_the_gradient_of_the_penalty() -> None:
    w, v, b = setting()
    leaf = w.clone().requires_grad_()
    penalty = 0.3 / 2 * (leaf @ leaf.T - torch.eye(5, dtype=w.dtype)).square().sum()
    (gradient,) = torch.autograd.grad(penalty, leaf)
    torch.testing.assert_close(decorrelation(w, 0.3), gradient)
    expected = sphere_step(w, v + gradient, b, 0.1, 0.9, True)
    advance(w, v, b, 0.1, 0.9, True, None, None, 0.3, None)
    torch.testing.assert_close((w, b), expected)


def test_the_penalty_on_a_balanced_step_does_not_depend_on_the_size_of_the_gradient() -> None:
    ends = []
    for scale in (1e-6, 1e3):
        w, v, b = setting()
        advance(w, scale * v, b, 0.1, 0.9, True, None, None, 0.3, torch.zeros(5, 2, dtype=w.dtype))
        ends.append(w)
    torch.testing.assert_close(*ends)


def test_a_compiler_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(*_: object) -> None:
        calls.append(1)
        raise torch._dynamo.exc.TorchDynamoException("KeyError: buf2")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    fused.cache_clear()
    w, v, b = setting()
    expected = sphere_step(w, v, b, 0.3, 0.9, True)
    step = fused(advance)
    with pytest.warns(UserWarning, match=r"the compiler failed .KeyError: buf2.; going on without it"):
        step(w, v, b, 0.3, 0.9, True, None, None, 0.0, None)
    torch.testing.assert_close((w, b), expected)
    step(w, v, b, 0.3, 0.9, True, None, None, 0.0, None)
    assert len(calls) == 1
    fused.cache_clear()

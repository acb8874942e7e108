import pytest
import scipy.linalg
import torch

from fisherfold.manifolds import frames


def tall(n, p, *batch, seed=0, dtype=torch.float64):
    return torch.randn(*batch, n, p, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_condition(n, p, condition, dtype):
    """A matrix of given condition number."""
    left = torch.linalg.qr(tall(n, p, seed=1)).Q
    right = torch.linalg.qr(tall(p, p, seed=2)).Q
    return (
        (left * torch.logspace(0, -torch.log10(torch.tensor(condition)), p, dtype=torch.float64))
        @ right
    ).to(dtype)


def polar_reference(y):
    left, _, right = torch.linalg.svd(y, full_matrices=False)
    return left @ right


@pytest.mark.parametrize("n", [5, 2047, 2048, 5000])
def test_cross_is_the_product_of_the_transpose(n):
    a, b = tall(n, 3, 2, seed=1), tall(n, 4, 2, seed=2)
    torch.testing.assert_close(frames.cross(a, b), a.mT @ b, atol=1e-11, rtol=1e-12)


def test_cross_keeps_its_digits_over_many_float32_rows():
    a = torch.linalg.qr(tall(300_000, 3)).Q.float()
    exact = a.double().mT @ a.double()
    assert float((frames.cross(a, a) - exact).abs().max()) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("condition", [1.0, 3.0, 1e2, 1e4])
@pytest.mark.parametrize("maker", [frames.polar, frames.qr, frames.cholesky_qr])
def test_frames_are_orthonormal_whatever_the_condition(maker, condition, dtype):
    y = with_condition(50, 4, condition, dtype)
    frame = maker(y)
    assert float(frames.orthonormality_error(frame)) < 30 * torch.finfo(dtype).eps
    # the span is that of y, to what its condition allows
    off = y - frame @ (frame.mT @ y)
    assert float(off.abs().max()) < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("condition", [1.0, 3.9, 4.1, 1e3, 1e6])
def test_polar_is_that_of_the_singular_values_on_both_roads(condition):
    y = with_condition(40, 5, condition, torch.float64)
    torch.testing.assert_close(
        frames.polar(y), polar_reference(y), atol=1e-14 * condition + 1e-14, rtol=0
    )


def test_polar_of_a_batch_with_one_bad_entry():
    y = torch.stack(
        [with_condition(20, 3, 1.5, torch.float64), with_condition(20, 3, 1e5, torch.float64)]
    )
    torch.testing.assert_close(frames.polar(y), polar_reference(y), atol=1e-9, rtol=0)


def test_polar_survives_huge_and_tiny_entries():
    y = tall(10, 3)
    for factor in (1e200, 1e-200):
        torch.testing.assert_close(frames.polar(factor * y), frames.polar(y), atol=1e-13, rtol=0)
    wide = tall(10, 3, dtype=torch.float32)
    torch.testing.assert_close(frames.polar(1e30 * wide), frames.polar(wide), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("size", "dtype"), [(1e20, torch.float32), (1e200, torch.float64)])
def test_polar_of_one_column_is_its_direction_at_every_size(size, dtype):
    # the square is infinite and the condition of a 1×1 matrix is still 1
    y = tall(10, 1).to(dtype)
    torch.testing.assert_close(
        frames.polar(size * y), y / y.norm(), atol=10 * torch.finfo(dtype).eps, rtol=0
    )


def test_polar_of_nan_is_nan_only_where_it_must():
    y = tall(6, 2, 2)
    y[0, 3, 1] = torch.nan
    frame = frames.polar(y)
    assert bool(frame[0].isnan().all())
    torch.testing.assert_close(frame[1], frames.polar(y[1]), atol=1e-14, rtol=0)


def test_qr_fixes_frames_and_agrees_with_cholesky():
    y = tall(30, 4, 3)
    frame = frames.qr(y)
    torch.testing.assert_close(frames.qr(frame), frame)
    torch.testing.assert_close(frames.cholesky_qr(y), frame)
    triangle = frame.mT @ y
    assert bool((triangle.diagonal(dim1=-2, dim2=-1) > 0).all())
    torch.testing.assert_close(triangle.tril(-1), torch.zeros_like(triangle))


def test_random_frames_have_the_uniform_mean():
    frame = frames.random_frame(
        (20_000, 3, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64, device=None
    )
    # E xxᵀ = (p/n) I and E x = 0 under the uniform distribution; five standard errors
    second = (frame @ frame.mT).mean(0)
    torch.testing.assert_close(
        second, 2 / 3 * torch.eye(3, dtype=torch.float64), atol=0.015, rtol=0
    )
    assert float(frame.mean(0).abs().max()) < 5 * (1 / 3 / 20_000) ** 0.5


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning"
)  # from torch's forward mode itself
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("step", [0.0, 0.3, 2.0, 9.0])
def test_second_derivatives_of_the_polar_factor_are_the_slopes_of_the_first(step, size):
    """On both roads, in all units, and in every way in which PyTorch forms a Hessian."""
    frame, weights = frames.qr(tall(5, 2)), tall(10, 10, seed=1)
    y = frame + step * tall(5, 2, seed=2)

    def value(y):
        flat = frames.polar(size * y).flatten()
        return flat @ weights @ flat

    gradient = torch.func.grad(value)
    steps = 1e-5 * torch.eye(10, dtype=torch.float64).reshape(10, 5, 2)
    expected = torch.stack([(gradient(y + e) - gradient(y - e)) / 2e-5 for e in steps])
    for hessian in (
        torch.autograd.functional.hessian(value, y),
        torch.func.hessian(value)(y),
        torch.func.jacrev(torch.func.jacfwd(value))(y),
    ):
        torch.testing.assert_close(hessian.reshape(10, 5, 2), expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("longest", [2.0, 5.0, 50.0])
def test_the_polar_factor_is_differentiated_where_singular_values_are_equal(longest):
    """A step along one column leaves the others at 1; long ones take the road through QR."""
    left, right = frames.qr(tall(6, 3)), frames.qr(tall(3, 3))
    y = (left * torch.tensor([longest, 1.0, 1.0], dtype=torch.float64)) @ right.mT
    # by the Sylvester equation p X + X p = Qᵀdy - dyᵀQ, and 1/s outside of the span
    gradient = torch.autograd.functional.jacobian(frames.polar, y)
    direction = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s = torch.tensor([longest, 1.0, 1.0], dtype=torch.float64)
    inside = left.mT @ direction @ right
    inside = (inside - inside.mT) / (s[:, None] + s)
    outside = (direction - left @ (left.mT @ direction)) @ right / s
    expected = (left @ inside + outside) @ right.mT
    torch.testing.assert_close(
        torch.einsum("ijkl,kl->ij", gradient, direction), expected, atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("norm", [1e-6, 1e-3, 0.01, 0.03, 0.05, 0.5, 5.0])
def test_the_matrix_exponential_is_exact_at_every_norm(norm):
    square = tall(6, 6)
    square = norm * square / torch.linalg.matrix_norm(square, 1)
    expected = torch.as_tensor(scipy.linalg.expm(square.numpy()))
    torch.testing.assert_close(frames.matrix_exp(square), expected, atol=1e-15, rtol=1e-13)
    assert bool(frames.matrix_exp(square * torch.nan).isnan().all())

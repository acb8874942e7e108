import warnings

import pytest
import torch


@pytest.fixture(scope="session")
def geoopt():
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # geoopt 0.5.1 compiles with the deprecated torch.jit when imported
        return pytest.importorskip("geoopt")


@pytest.fixture(scope="session")
def pair():
    """A point, a neighbour, two tangent vectors and an ambient one, in float64."""

    def draw(manifold, seed=0, length=0.8):
        generator = torch.Generator().manual_seed(seed)
        x = manifold.random_point(generator=generator)
        u, v = (length * manifold.random_tangent(x, generator=generator) for _ in range(2))
        a = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x, manifold.retract(x, u), u, v, a

    return draw


@pytest.fixture(scope="session")
def same():
    """Equality to rounding with a peer's result."""

    def compare(ours, theirs, atol=1e-13):
        torch.testing.assert_close(
            ours, torch.as_tensor(theirs, dtype=ours.dtype), atol=atol, rtol=0
        )

    return compare

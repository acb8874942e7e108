import pytest
import torch

from fisherfold.manifolds import Euclidean, FixedRank, Grassmann, Product, Sphere, Stiefel

NESTED = Product({"u": Grassmann(5, 2), "rest": Product({"w": Sphere(3), "b": Euclidean()})})


def draw(manifold, *batch, **options):
    generator = torch.Generator().manual_seed(0)
    x = manifold.random_point(*batch, generator=generator, **options)
    return x, manifold.random_tangent(x, generator=generator)


def test_dimensions_shapes_and_orders_come_from_the_factors():
    assert NESTED.dim == 6 + 2 + 1
    assert NESTED.point_shape == {"u": (5, 2), "rest": {"w": (3,), "b": ()}}
    assert NESTED.retraction_order == 2
    assert Product({"u": NESTED, "q": Stiefel(4, 2, retraction="qr")}).retraction_order == 1
    assert NESTED.factors["u"] == Grassmann(5, 2)


def test_distances_add_in_squares_and_tangents_have_unit_length():
    x, v = draw(NESTED, 4)
    torch.testing.assert_close(NESTED.norm(x, v), torch.ones(4, dtype=torch.float64))
    y = NESTED.exp(x, v)
    torch.testing.assert_close(NESTED.dist(x, y), torch.ones(4, dtype=torch.float64))
    parts = (
        Grassmann(5, 2).dist(x["u"], y["u"]) ** 2
        + Sphere(3).dist(x["rest"]["w"], y["rest"]["w"]) ** 2
    )
    parts = parts + (x["rest"]["b"] - y["rest"]["b"]) ** 2
    torch.testing.assert_close(NESTED.dist(x, y) ** 2, parts)


def test_bad_arguments_are_named_with_their_place():
    x, v = draw(NESTED)
    with pytest.raises(
        TypeError, match=r"x must be a dictionary of the factors \['u', 'rest'\], got Tensor"
    ):
        NESTED.check_point(x["u"])
    with pytest.raises(
        ValueError, match=r"v must have the keys \['rest', 'u'\] of Product.*, got \['u'\]"
    ):
        NESTED.retract(x, {"u": v["u"]})
    with pytest.raises(
        ValueError, match=r"x\['rest'\]\['w'\] must have shape \(\.\.\., 3\) .* got \(4,\)"
    ):
        NESTED.check_point({"u": x["u"], "rest": {"w": torch.zeros(4), "b": x["rest"]["b"]}})
    with pytest.raises(ValueError, match=r"x0\['rest'\]\['w'\] is not a point of Sphere\(3\)"):
        NESTED.check_point(
            {"u": x["u"], "rest": {"w": 2 * x["rest"]["w"], "b": x["rest"]["b"]}}, name="x0"
        )
    with pytest.raises(ValueError, match=r"v\['u'\] is not a tangent vector of Grassmann\(5, 2\)"):
        NESTED.check_tangent(x, {"u": x["u"], "rest": v["rest"]})
    with pytest.raises(
        ValueError, match=r"retraction of Product must be one of \['factors'\], got 'qr'"
    ):
        NESTED.retract(x, v, method="qr")
    with pytest.raises(
        ValueError,
        match=r"transport_method of Product must be one of \['factors'\], got 'parallel'",
    ):
        NESTED.transport(x, x, v, method="parallel")


def test_factors_have_one_batch():
    x, _ = draw(NESTED, 4)
    other = {"u": x["u"], "rest": {"w": x["rest"]["w"][0], "b": x["rest"]["b"][0]}}
    for call in (
        NESTED.check_point,
        NESTED.violation,
        lambda p: NESTED.dist(p, p),
        lambda p: NESTED.norm(p, p),
    ):
        with pytest.raises(
            ValueError, match=r"x must have the same batch .* \{'u': \(4,\), 'rest': \(\)\}"
        ):
            call(other)
    with pytest.raises(
        ValueError, match=r"x\['rest'\] must have the same batch .* \{'w': \(4,\), 'b': \(2,\)\}"
    ):
        NESTED.check_point({"u": x["u"], "rest": {"w": x["rest"]["w"], "b": x["rest"]["b"][:2]}})


def test_a_factor_without_logarithm_is_named():
    product = Product({"u": FixedRank(4, 2, 1), "w": Sphere(3)})
    x, _ = draw(product)
    with pytest.raises(NotImplementedError, match=r"FixedRank\(4, 2, 1\) has no closed-form dist"):
        product.dist(x, x)


def test_violation_is_the_worst_of_the_factors():
    x, _ = draw(NESTED)
    x["rest"]["w"] = x["rest"]["w"] * 1.25
    assert NESTED.violation(x) == pytest.approx(0.25)
    x["u"] = x["u"] * torch.nan
    assert not NESTED.violation(x) < 1

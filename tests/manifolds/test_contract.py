"""What every manifold promises: messages, dtypes kept, nothing n×n, plain value objects."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherfold.manifolds import (
    SPD,
    Euclidean,
    FixedRank,
    Grassmann,
    Lorentz,
    LowRankPSD,
    Manifold,
    Oblique,
    PoincareBall,
    PositiveOrthant,
    Power,
    Product,
    Rotations,
    Simplex,
    SpecialEuclidean,
    Sphere,
    Stiefel,
    Unitary,
)
from fisherfold.manifolds.base import combine, dot, is_finite, leaves, scale, tolerance, tree_map

MANIFOLDS = [
    Euclidean(3, 2),
    Sphere(4),
    Oblique(3, 4),
    Stiefel(6, 3),
    Grassmann(6, 2),
    Rotations(3),
    Power(Sphere(3), 2),
    SPD(3),
    PoincareBall(3),
    Lorentz(2),
    Simplex(4),
    PositiveOrthant(3),
    LowRankPSD(4, 2),
]
CURVED = [*MANIFOLDS[1:7], Lorentz(2), Simplex(4)]
COMPLEX = [
    Sphere(3, complex=True),
    Oblique(2, 2, complex=True),
    Stiefel(5, 2, complex=True),
    Grassmann(5, 2, complex=True),
    Unitary(3),
    SPD(3, complex=True),
]
TREES = [
    Product({"a": Sphere(3), "b": Euclidean()}),
    Product({"a": Unitary(2), "b": Euclidean(2)}),
    FixedRank(4, 3, 2),
    SpecialEuclidean(3),
    SpecialEuclidean(2, retraction="exp"),
]


def draw(manifold, *batch, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random_point(*batch, generator=generator, **options)
    return x, manifold.random_tangent(x, generator=generator)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Grassmann(5, 5),
            r"p of Grassmann, the dimension of the subspaces, must be less than n=5, got 5",
        ),
        (lambda: Grassmann(5, 7), r"must be less than n=5, got 7"),
        (lambda: Grassmann(5, 0), r"p of Grassmann must be a positive integer, got 0"),
        (lambda: Grassmann(5.0, 2), r"n of Grassmann must be a positive integer, got 5\.0"),
        (lambda: Stiefel(3, 4), r"p of Stiefel must be at most n=3, got 4"),
        (lambda: Sphere(1), r"n of Sphere must be at least 2, got 1"),
        (lambda: Oblique(3, 1), r"n of Oblique must be at least 2, got 1"),
        (lambda: Oblique(True, 2), r"m of Oblique must be a positive integer, got True"),
        (
            lambda: Sphere(np.float64(3)),
            r"n of Sphere must be a positive integer, got np\.float64\(3\.0\)",
        ),
        (
            lambda: Sphere(np.int64(-3)),
            r"n of Sphere must be a positive integer, got np\.int64\(-3\)",
        ),
        (lambda: Euclidean(3, -1), r"every size of Euclidean must be a positive integer, got -1"),
        (
            lambda: Stiefel(4, 2, retraction="svd"),
            r"retraction of Stiefel must be one of .*'polar'.*, got 'svd'",
        ),
        (
            lambda: Stiefel(4, 2, transport_method="parallel"),
            r"must be one of \['projection'\], got 'parallel'",
        ),
        (
            lambda: Stiefel(4, 2, complex=1),
            r"complex of Stiefel must be True or False, got 1",
        ),
        (lambda: FixedRank(4, 3, 4), r"rank of FixedRank must be at most 3, got 4"),
        (lambda: LowRankPSD(2, 3), r"k of LowRankPSD must be at most n=2, got 3"),
        (lambda: Simplex(1), r"n of Simplex must be at least 2, got 1"),
        (lambda: PositiveOrthant(0), r"every size of PositiveOrthant must be a positive"),
        (lambda: Product({}), r"factors must be a dictionary of at least one name"),
        (lambda: Product({"a": 3}), r"factors must map names to manifolds, got 'a': 3"),
    ],
)
def test_constructors_name_what_is_wrong(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("whole", [np.int64, np.uint8, np.array, torch.tensor])
def test_sizes_are_whole_numbers_of_any_type(whole):
    for kind, sizes in (
        (Grassmann, (5, 2)),
        (Stiefel, (5, 2)),
        (Sphere, (5,)),
        (Oblique, (5, 2)),
        (Euclidean, (5, 2)),
    ):
        manifold, plain = kind(*map(whole, sizes)), kind(*sizes)
        assert (manifold, hash(manifold), repr(manifold)) == (plain, hash(plain), repr(plain))
        assert type(manifold.dim) is int
        assert all(type(size) is int for size in manifold.point_shape)
        assert torch.equal(draw(manifold)[0], draw(plain)[0])


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_bad_arguments_are_named(manifold):
    x, v = draw(manifold)
    shape = tuple(x.shape)
    with pytest.raises(TypeError, match=r"v must be a torch\.Tensor, got ndarray"):
        manifold.project(x, np.zeros(shape))
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got ndarray"):
        manifold.check_point(np.zeros(shape))
    with pytest.raises(ValueError, match=r"v must have a floating dtype, got torch\.int64"):
        manifold.project(x, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"v must have shape \(\.\.\., .* got \(9, 9, 9\)"):
        manifold.retract(x, torch.zeros(9, 9, 9))
    with pytest.raises(ValueError, match=r"start must have shape .* got \(\)"):
        manifold.check_point(torch.zeros(()), name="start")
    with pytest.raises(
        ValueError, match=r"v must be torch\.float64 on cpu like the point x, got torch\.float32"
    ):
        manifold.retract(x, v.float())
    with pytest.raises(
        ValueError, match=r"y must be torch\.float64 on cpu .* got torch\.float64 on meta"
    ):
        manifold.dist(x, x.to("meta"))
    with pytest.raises(ValueError, match=r"retraction of \w+ must be one of \[.*\], got 'nearest'"):
        manifold.retract(x, v, method="nearest")
    with pytest.raises(
        ValueError, match=r"transport_method of \w+ must be one of \[.*\], got 'drag'"
    ):
        manifold.transport(x, x, v, method="drag")
    with pytest.raises(ValueError, match="x0 must be finite, got NaN or infinite entries"):
        manifold.check_point(x * torch.nan, name="x0")
    with pytest.raises(ValueError, match="v must be finite, got NaN or infinite entries"):
        manifold.check_tangent(x, v * torch.inf)
    with pytest.raises(ValueError, match=r"dtype must be a floating dtype, got torch\.int32"):
        manifold.random_point(dtype=torch.int32)


@pytest.mark.parametrize("manifold", CURVED, ids=repr)
def test_points_off_the_manifold_and_vectors_not_tangent_are_refused(manifold):
    x, v = draw(manifold)
    manifold.check_point(x)
    manifold.check_tangent(x, v)
    with pytest.raises(
        ValueError,
        match=r"x0 is not a point of .*: its constraint is violated by .* more than 1e-08",
    ):
        manifold.check_point(1.01 * x, name="x0")
    manifold.check_point((1 + 1e-5) * x, atol=1e-4)
    with pytest.raises(
        ValueError, match=r"d is not a tangent vector of .*: its normal part is .* project it first"
    ):
        manifold.check_tangent(x, v + x, name="d")


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_parameters_can_be_checked(manifold):
    x, v = draw(manifold)
    x.requires_grad_()
    manifold.check_point(x)
    manifold.check_tangent(x, v)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning"
)  # from torch.func.jvp itself
@pytest.mark.parametrize("manifold", [*MANIFOLDS, Stiefel(4, 3), Stiefel(3, 3)], ids=repr)
def test_retractions_can_be_differentiated_at_zero_too(manifold):
    # At a zero step the Gram matrix is the identity: a derivative through eigenvectors would be
    # NaN.
    x, v = draw(manifold)
    w = manifold.random_tangent(x, generator=torch.Generator().manual_seed(1))
    for method in manifold.retractions:

        def step(u, method=method):
            return manifold.retract(x, u, method=method)

        _, velocity = torch.func.jvp(step, (torch.zeros_like(v),), (w,))
        torch.testing.assert_close(velocity, w, atol=1e-14, rtol=0)
        for base in (torch.zeros_like(v), 0.7 * v):
            slope = (step(base + 1e-5 * w) - step(base - 1e-5 * w)) / 2e-5
            _, forward = torch.func.jvp(step, (base,), (w,))
            torch.testing.assert_close(forward, slope, atol=1e-9, rtol=0)
            a = torch.ones_like(v)
            (backward,) = torch.func.vjp(step, base)[1](a)
            torch.testing.assert_close((backward * w).sum(), (a * slope).sum(), atol=1e-8, rtol=0)


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_a_point_with_many_vectors_is_a_batch_of_that_point(manifold):
    x, _ = draw(manifold)
    v = manifold.project(
        x, torch.randn(3, *x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    )
    for method in manifold.retractions:
        expected = manifold.retract(x.expand_as(v), v, method=method)
        torch.testing.assert_close(
            manifold.retract(x, v, method=method), expected, atol=1e-14, rtol=0
        )


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=repr)
def test_non_finite_steps_give_non_finite_points_and_no_exception(manifold):
    x, v = draw(manifold, 2)
    v[0] = torch.nan
    for method in manifold.retractions:
        y = manifold.retract(x, v, method=method)
        assert bool(y[0].isnan().all()), method


@pytest.mark.parametrize("manifold", [Stiefel(200_000, 2), Grassmann(200_000, 2)])
def test_no_operation_forms_a_square_of_the_height(manifold):
    # 200,000² float32 numbers would be 160 GB.
    x, v = draw(manifold, dtype=torch.float32)
    for method in manifold.retractions:
        y = manifold.retract(x, v, method=method)
        assert manifold.violation(y) < 1e-6
    for method in manifold.transports:
        manifold.check_tangent(y, manifold.transport(x, y, v, method=method))
    if isinstance(manifold, Grassmann):
        assert abs(float(manifold.dist(x, manifold.exp(x, v))) - 1) < 1e-5


@pytest.mark.parametrize("manifold", [*MANIFOLDS, *COMPLEX, *TREES], ids=repr)
def test_manifolds_are_values(manifold):
    assert copy.deepcopy(manifold) == manifold
    assert pickle.loads(pickle.dumps(manifold)) == manifold
    assert hash(copy.deepcopy(manifold)) == hash(manifold)
    assert eval(repr(manifold)) == manifold
    with pytest.raises((AttributeError, TypeError)):
        manifold.retraction = "exp"


def test_reprs_show_only_what_was_chosen():
    assert repr(Grassmann(100, 5)) == "Grassmann(100, 5)"
    assert repr(Grassmann(100, 5, retraction="qr")) == "Grassmann(100, 5, retraction='qr')"
    assert repr(Euclidean()) == "Euclidean()"
    assert repr(Product({"a": Sphere(3)})) == "Product({'a': Sphere(3)})"


def test_a_manifold_without_closed_forms_says_so():
    manifold = FixedRank(4, 3, 2)
    x, v = draw(manifold)
    with pytest.raises(NotImplementedError, match=r"FixedRank\(4, 3, 2\) has no closed-form exp"):
        manifold.exp(x, v)
    with pytest.raises(NotImplementedError, match="has no closed-form logarithm"):
        manifold.log(x, x)
    with pytest.raises(NotImplementedError, match="has no closed-form distance"):
        manifold.dist(x, x)


@pytest.mark.parametrize("manifold", [*MANIFOLDS, *COMPLEX, *TREES], ids=repr)
def test_empty_batches_are_batches(manifold):
    x = manifold.random_point(2, 0)
    v = manifold.random_tangent(x)
    manifold.check_point(manifold.retract(x, v))
    manifold.check_tangent(x, manifold.transport(x, x, v))
    assert manifold.violation(x) == 0
    assert manifold.norm(x, v).shape == (2, 0)


def test_a_manifold_of_dimension_zero_has_only_the_zero_vector():
    x, v = draw(Stiefel(1, 1))
    assert Stiefel(1, 1).dim == 0
    assert torch.equal(v, torch.zeros_like(x))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 9),
    p=st.integers(1, 8),
    batch=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    length=st.floats(0, 1e4),
    seed=st.integers(0, 2**31),
)
def test_retractions_land_on_the_manifold_for_any_shape_and_step(n, p, batch, dtype, length, seed):
    manifolds: list[Manifold] = [
        Sphere(n),
        Oblique(p, n),
        Stiefel(n, min(p, n)),
        Power(Sphere(n), p),
    ]
    if p < n:
        manifolds += [Grassmann(n, p)]
    for manifold in manifolds:
        x, v = draw(manifold, *batch, seed=seed, dtype=dtype)
        for method in manifold.retractions:
            y = manifold.retract(x, length * v, method=method)
            assert y.shape == x.shape
            assert y.dtype == dtype
            assert manifold.violation(y) < 30 * torch.finfo(dtype).eps, (manifold, method)


def test_trees_add_scale_and_multiply():
    u = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3.0)}}
    v = tree_map(torch.ones_like, u)
    assert float(dot(u, v)) == 6.0
    assert leaves(combine(2.0, u, -1.0, v))[1] == 5.0
    assert torch.equal(scale(3.0, u)["a"], torch.tensor([3.0, 6.0]))
    assert is_finite(u)
    assert not is_finite({"a": u, "b": torch.tensor(torch.nan)})
    assert tolerance(torch.float64) == pytest.approx(1.49e-8, rel=1e-2)


MAPPED = [
    *[(manifold, method) for manifold in MANIFOLDS for method in manifold.retractions],
    *[(manifold, method) for manifold in MANIFOLDS for method in manifold.transports],
    *[(manifold, "log") for manifold in MANIFOLDS if not isinstance(manifold, Stiefel)],
    (Product({"u": Grassmann(5, 2), "s": Sphere(3)}), "factors"),
]


def operation(manifold, method):
    if method == "log":
        return lambda x, y, _: manifold.log(x, y)
    if method in manifold.retractions:
        return lambda x, _, v: manifold.retract(x, v, method=method)
    return lambda x, y, v: manifold.transport(x, y, v, method=method)


@pytest.mark.parametrize(("manifold", "method"), MAPPED, ids=repr)
@pytest.mark.parametrize("length", [0.0, 0.4, 8.0], ids="steps of {}".format)
def test_under_vmap_values_and_derivatives_are_those_of_the_members(manifold, method, length):
    (x, v), (y, _) = draw(manifold, 3), draw(manifold, 3, seed=1)
    v, apply = scale(length, v), operation(manifold, method)

    def weighed(x, y, v):
        return sum(
            (leaf * torch.arange(leaf.numel(), dtype=leaf.dtype).cos().reshape(leaf.shape)).sum()
            for leaf in leaves(apply(x, y, v))
        )

    def pick(tree, k):
        return tree_map(lambda leaf: leaf[k], tree)

    members = [tuple(pick(tree, k) for tree in (x, y, v)) for k in range(3)]
    for function in (apply, torch.func.grad(weighed, argnums=2)):
        mapped = torch.func.vmap(function)(x, y, v)
        for k, member in enumerate(members):
            for found, alone in zip(leaves(mapped), leaves(function(*member)), strict=True):
                torch.testing.assert_close(found[k], alone, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("manifold", [Sphere(4), Oblique(3, 4)], ids=repr)
def test_under_vmap_only_antipodes_are_without_a_logarithm(manifold):
    (x, v), (y, _) = draw(manifold, 3), draw(manifold, 3, seed=1)
    y[1] = -x[1]
    for mapped in (
        torch.func.vmap(manifold.log)(x, y),
        torch.func.vmap(lambda *args: manifold.transport(*args, method="parallel"))(x, y, v),
    ):
        assert bool(mapped[1].isnan().all())
        assert bool(mapped[[0, 2]].isfinite().all())


@pytest.mark.parametrize("manifold", COMPLEX, ids=repr)
def test_numbers_of_the_wrong_field_are_named(manifold):
    x, v = draw(manifold)
    with pytest.raises(ValueError, match=r"x0 must be complex on .* got torch\.float64; use x\.to"):
        manifold.check_point(x.real, name="x0")
    with pytest.raises(ValueError, match=r"v must be complex on .*, got torch\.float64"):
        manifold.retract(x, v.real)
    assert manifold.random_point(dtype=torch.complex64).dtype == torch.complex64
    assert manifold.random_point(dtype=torch.float32).dtype == torch.complex64


def test_a_complex_point_on_a_real_manifold_is_named():
    message = (
        r"x0 must be real on Sphere\(3\), got torch\.complex128; use the manifold with complex"
    )
    with pytest.raises(ValueError, match=message):
        Sphere(3).check_point(draw(Sphere(3, complex=True))[0], name="x0")
    with pytest.raises(
        ValueError, match=r"x must be real on Rotations\(3\), got torch\.complex128$"
    ):
        Rotations(3).check_point(draw(Unitary(3))[0])
    with pytest.raises(ValueError, match="dtype must be a floating dtype"):
        Sphere(3).random_point(dtype=torch.complex64)

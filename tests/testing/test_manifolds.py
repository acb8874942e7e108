"""The kit passes what is right and names what is wrong."""

import warnings
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import pytest
import torch

from fisherfold.fisher import Gaussian
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
    Verdict,
)
from fisherfold.problems import NLLProblem
from fisherfold.testing import check_manifold
from toy import slow

# Every manifold of the library, with every retraction over many float32 steps; the full ten
# thousand on the sphere.
LONG = [
    Euclidean(3, 2),
    Sphere(5),
    Oblique(3, 4),
    Stiefel(6, 3),
    Grassmann(7, 3),
    Rotations(3),
    SPD(3),
    Power(Rotations(2), 2),
    Stiefel(5, 2, complex=True),
    Grassmann(5, 2, complex=True),
    Unitary(3),
    PoincareBall(3),
    Lorentz(3),
    Simplex(4),
    PositiveOrthant(3),
    FixedRank(6, 5, 2),
    LowRankPSD(5, 2),
    SpecialEuclidean(3),
]
SHORT = [
    Euclidean(),
    Sphere(2),
    Oblique(1, 2),
    Stiefel(3, 3),
    Stiefel(4, 3),
    Stiefel(1, 1),
    Grassmann(2, 1),
    Grassmann(600, 2, transport_method="parallel"),
    Rotations(2),
    Rotations(5, transport_method="parallel"),
    SPD(1),
    Euclidean(2, complex=True),
    Sphere(1, complex=True),
    Sphere(3, complex=True),
    Oblique(2, 2, complex=True),
    Stiefel(3, 3, complex=True),
    Unitary(1),
    SPD(3, complex=True),
    PoincareBall(1),
    Lorentz(1),
    Simplex(2),
    PositiveOrthant(),
    FixedRank(4, 3, 3),
    FixedRank(4, 3, 2, retraction="orthographic"),
    LowRankPSD(3, 3),
    LowRankPSD(4, 2, complex=True),
    Power(FixedRank(4, 4, 1), 2),
    Product({"a": Unitary(2), "b": Simplex(3)}),
    Power(SPD(2, retraction="exp"), 2),
    Power(Product({"rotation": Rotations(3), "translation": Euclidean(3)}), 2),
    Product({"a": Sphere(3), "b": Stiefel(4, 2, retraction="qr")}),
    Product(
        {
            "a": Sphere(3, retraction="exp"),
            "b": Product(
                {
                    "c": Grassmann(4, 2, retraction="qr", transport_method="parallel"),
                    "d": Euclidean(),
                }
            ),
        }
    ),
]


@pytest.mark.parametrize("manifold", LONG, ids=repr)
@pytest.mark.parametrize("steps", [200, *slow(10_000)])
def test_the_manifolds_of_the_library_pass_with_the_long_run(manifold, steps):
    if steps > 200 and isinstance(manifold, Lorentz):
        pytest.skip("coordinates grow like exp of the distance: a long walk leaves float32")
    report = check_manifold(manifold, steps=steps)
    assert all(isinstance(verdict, Verdict) and verdict for verdict in report)
    for method in manifold.retractions:
        assert f"retraction {method!r} stays on the manifold over {steps} float32 steps" in {
            v.name for v in report
        }


@pytest.mark.parametrize("manifold", SHORT, ids=repr)
def test_variants_and_edges_pass(manifold):
    assert all(check_manifold(manifold, steps=100, batch_shapes=((), (2,)), seed=1))


class PlainSphere(Manifold):
    """A manifold that somebody wrote as an ordinary class."""

    retraction, retractions, dim, point_shape = "normalize", {"normalize": 2}, 2, (3,)

    def _project(self, x, v):
        return v - (x * v).sum(-1, keepdim=True) * x

    def _retract(self, x, v, method):
        return (x + v) / (x + v).norm(dim=-1, keepdim=True)

    def _random(self, shape, generator, dtype, device):
        y = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        return y / y.norm(dim=-1, keepdim=True)

    def _constraint_error(self, x):
        return (x.norm(dim=-1) - 1).abs().amax()


def test_a_manifold_may_be_an_ordinary_class():
    assert all(check_manifold(PlainSphere(), steps=100))
    with pytest.raises(
        ValueError, match=r"not a point of PlainSphere\(\): its constraint is violated by 7.32e-01"
    ):
        PlainSphere().check_point(torch.ones(3))


# geoopt's formulas for its default Stiefel manifold: the canonical gradient as projection, a Cayley
# step without the ½.
def canonical_gradient(x, v):
    return v - x @ v.mT @ x


def cayley_without_half(x, v):
    w = v @ x.mT - x @ v.mT
    eye = torch.eye(x.shape[-2], dtype=x.dtype)
    return torch.linalg.solve(eye - w / 2, (eye + w / 2) @ x)


@dataclass(frozen=True, repr=False)
class CanonicalStiefel(Stiefel):
    retractions: ClassVar = MappingProxyType({"polar": 1})

    def _project(self, x, v):
        return canonical_gradient(x, v)

    def _retract(self, x, v, method):
        return cayley_without_half(x, v)

    _log = Manifold._log
    _dist = Manifold._dist


@dataclass(frozen=True, repr=False)
class CayleyWithoutHalf(Stiefel):
    retractions: ClassVar = MappingProxyType({"polar": 1})

    def _retract(self, x, v, method):
        return cayley_without_half(x, v)


@dataclass(frozen=True, repr=False)
class QRDeclaredSecondOrder(Stiefel):
    retractions: ClassVar = MappingProxyType({"polar": 2, "qr": 2})


@dataclass(frozen=True, repr=False)
class HalfProjector(Sphere):
    def _project(self, x, v):
        return v - 0.5 * (x * v).sum(-1, keepdim=True) * x


@dataclass(frozen=True, repr=False)
class ObliqueProjector(Sphere):
    """Idempotent, onto the tangent space, but not orthogonal."""

    def _project(self, x, v):
        skewed = x + 0.5 * x.roll(1, -1)
        skewed = skewed / (x * skewed).sum(-1, keepdim=True)
        return v - (x * v).sum(-1, keepdim=True) * skewed


@dataclass(frozen=True, repr=False)
class WrongDimension(Sphere):
    @property
    def dim(self):
        return self.n


@dataclass(frozen=True, repr=False)
class Drifting(Sphere):
    """The exponential map without a final normalisation: right in every single step."""

    def _retract(self, x, v, method):
        angle = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        y = angle.cos() * x + torch.sinc(angle / torch.pi) * v
        return y * (1 + torch.finfo(x.dtype).eps)


@dataclass(frozen=True, repr=False)
class DraggedTransport(Sphere):
    def _transport(self, x, y, v, method):
        return v


@dataclass(frozen=True, repr=False)
class ArcCosine(Sphere):
    def _dist(self, x, y):
        return torch.acos((x * y).sum(-1).clamp(-1, 1))


@dataclass(frozen=True, repr=False)
class NormalizedExp(Sphere):
    def _exp(self, x, v):
        return self._retract(x, v, "normalize")


@dataclass(frozen=True, repr=False)
class DoubledMetric(Sphere):
    def inner(self, x, u, v):
        return 2 * super().inner(x, u, v)


@dataclass(frozen=True, repr=False)
class Unaligned(Grassmann):
    def _transport(self, x, y, v, method):
        return self._project(y, v)


@dataclass(frozen=True, repr=False)
class NormOverTheBatch(Sphere):
    def _retract(self, x, v, method):
        return super()._retract(x, v * (1 + 0.1 * v.norm()), method)


@dataclass(frozen=True, repr=False)
class AlwaysDouble(Sphere):
    def retract(self, x, v, *, method=None):
        return super().retract(x, v, method=method).double()


@dataclass(frozen=True, repr=False)
class Blind(Sphere):
    def _constraint_error(self, x):
        return x.new_zeros(())


@dataclass(frozen=True, repr=False)
class WithoutLog(Sphere):
    """As a user's manifold may be: an exponential map, and neither logarithm nor distance."""

    retractions: ClassVar = MappingProxyType({"normalize": 2})

    def _log(self, x, y):
        raise NotImplementedError

    def _dist(self, x, y):
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class HalfSpeed(WithoutLog):
    def _exp(self, x, v):
        return super()._exp(x, v / 2)


@dataclass(frozen=True, repr=False)
class InPlace(Sphere):
    def _project(self, x, v):
        return v.sub_((x * v).sum(-1, keepdim=True) * x)


@dataclass(frozen=True, repr=False)
class AmbientGradient(SPD):
    def _gradient(self, x, e):
        return self._project(x, e)


@dataclass(frozen=True, repr=False)
class FlatHessian(Sphere):
    def _hessian(self, x, e, h, v):
        return self._project(x, h)


@dataclass(frozen=True, repr=False)
class HalfHessian(SPD):
    def _hessian(self, x, e, h, v):
        return 0.5 * super()._hessian(x, e, h, v)


@dataclass(frozen=True, repr=False)
class WrongSide(Stiefel):
    projector_structure: ClassVar[str] = "left"


@dataclass(frozen=True, repr=False)
class NotIsometric(SPD):
    def _transport(self, x, y, v, method):
        return v


@dataclass(frozen=True, repr=False)
class AmbientGeodesic(SPD):
    def _exp(self, x, v):
        return self._retract(x, v, "quadratic")


def test_a_manifold_with_some_closed_forms_passes():
    assert all(check_manifold(WithoutLog(4), steps=10))


@pytest.mark.parametrize(
    ("manifold", "property_name"),
    [
        (CanonicalStiefel(6, 3), "projector is idempotent"),
        (CanonicalStiefel(6, 3), r"retraction 'polar' has DR\(0\) = Id"),
        (CayleyWithoutHalf(6, 3), r"retraction 'polar' has DR\(0\) = Id"),
        (CayleyWithoutHalf(6, 3), "retraction 'polar' is of order 1 "),
        (QRDeclaredSecondOrder(6, 3), "retraction 'qr' is of order 2 "),
        (HalfProjector(4), "projector is idempotent"),
        (HalfProjector(4), "dimension is the rank of the projector: measured 4, expected 3"),
        (ObliqueProjector(4), "projector is self-adjoint"),
        (WrongDimension(4), "dimension is the rank of the projector: measured 3, expected 4"),
        (Drifting(4), "stays on the manifold over 10000 float32 steps"),
        (DraggedTransport(4), "transport 'projection' lands in the tangent space"),
        (DraggedTransport(4), "parallel transport keeps the geodesic's velocity"),
        (ArcCosine(4), "dist keeps its digits near 0"),
        (NormalizedExp(4), "exp has no tangential acceleration"),
        (NormalizedExp(4), "log inverts exp"),
        (DoubledMetric(4), "inner product is the ambient one"),
        (Unaligned(6, 3), "transport 'projection' follows the representative of y"),
        (NormOverTheBatch(4), "retract 'normalize' of a batch is one by one"),
        (Blind(4), "violation sees points off the manifold"),
        (HalfSpeed(4), r"exp has Dexp\(0\) = Id"),
        (InPlace(4), "operations leave their arguments as they are"),
        (AmbientGradient(2), "Riemannian gradient has <g, v> = the derivative along v"),
        (FlatHessian(4), "Riemannian Hessian is the second derivative along a curve"),
        (HalfHessian(2), "Riemannian Hessian is the second derivative along a curve"),
        (WrongSide(4, 2), "projector acts on the side 'left'"),
        (NotIsometric(2), "transport 'parallel' there and back are adjoint"),
        (NotIsometric(2), "parallel transport is an isometry"),
        (AmbientGeodesic(2), "exp has constant speed"),
    ],
)
def test_wrong_manifolds_are_caught_by_name(manifold, property_name):
    with pytest.raises(AssertionError, match=f"FAILED: .*{property_name}"):
        check_manifold(
            manifold,
            steps=10_000 if isinstance(manifold, Drifting) else 10,
            batch_shapes=((), (2,)),
        )


def test_a_retraction_that_changes_the_dtype_is_named():
    with pytest.raises(
        AssertionError,
        match=r"retract must keep shape and dtype .*float32, got \(4,\), torch.float64",
    ):
        check_manifold(AlwaysDouble(4))


def test_drift_shows_only_in_the_long_run():
    assert all(check_manifold(Drifting(4), steps=10))


def test_the_message_counts_and_the_sound_properties_are_not_named():
    with pytest.raises(AssertionError) as caught:
        check_manifold(QRDeclaredSecondOrder(6, 3), steps=10)
    message = str(caught.value)
    # by the acceleration and against exp for each batch shape, in float64
    assert message.startswith("QRDeclaredSecondOrder(6, 3) fails 6 of ")
    assert "'polar'" not in message
    assert "idempotent" not in message


def test_a_symmetry_of_the_user_is_tested():
    q = torch.linalg.qr(
        torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ).Q

    def rotate(x):
        return x @ q.to(x.dtype)

    assert all(check_manifold(Grassmann(6, 3), steps=1, symmetry=rotate))
    # frames themselves are not a quotient: a distance that forgets the rotation does not exist, a
    # transport neither
    with pytest.raises(
        AssertionError, match="transport 'projection' follows the representative of y"
    ):
        check_manifold(Stiefel(6, 3), steps=1, symmetry=rotate)


def test_dtypes_and_batches_can_be_chosen():
    report = check_manifold(Sphere(3), dtypes=(torch.float32,), batch_shapes=((4,),), steps=1)
    labels = {verdict.name.split("[")[1] for verdict in report if "[" in verdict.name}
    assert labels == {"float32, batch (4,)]"}


def test_classes_and_manifolds_of_geoopt_are_refused_by_name():
    with pytest.raises(
        TypeError, match=r"manifold must be a manifold such as Sphere\(3\), got <class"
    ):
        check_manifold(Sphere)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import
        geoopt = pytest.importorskip("geoopt")
    parameter = geoopt.ManifoldParameter(torch.eye(3)[0], manifold=geoopt.Sphere())
    for given, name in ((geoopt.Sphere(), "Sphere"), (parameter, "ManifoldParameter")):
        with pytest.raises(
            TypeError,
            match=rf"one of fisherfold, got geoopt's {name}; pass from_geoopt\(...\) of it",
        ):
            check_manifold(given)
        with pytest.raises(
            TypeError,
            match=rf"one of fisherfold, got geoopt's {name}; pass from_geoopt\(...\) of it",
        ):
            NLLProblem(given, torch.matmul, Gaussian(), torch.randn(5, 3), torch.randn(5))


def test_batches_without_a_point_are_refused():
    with pytest.raises(
        ValueError, match=r"batch_shapes must hold at least one point each, got \[\(0,\)\]"
    ):
        check_manifold(Sphere(3), batch_shapes=((), (0,)))

"""The operators against Fisher matrices built sample by sample from reverse-mode Jacobians."""

import pytest
import torch

from fisherfold import Gaussian, NLLProblem
from fisherfold.fisher import DenseFisher, ExactFisher, RowBlockFisher, VarianceReducedFisher
from fisherfold.manifolds import Euclidean, Grassmann, Oblique, Product, Sphere
from fisherfold.manifolds.base import dot, flatten, leaves, scale, tree_map, unflatten

KINDS = ["exact", "monte-carlo", "empirical", "dense"]


def agree(found, expected, *, rtol=1e-12):
    assert float((found - expected).norm()) <= rtol * float(expected.norm())


def test_exact_is_the_dense_reference(case):
    operator, reference = case.problem.fisher(case.theta), case.dense_fisher()
    agree(operator.dense(), reference)
    v = case.tangent()
    agree(flatten(operator.matvec(v)), reference @ flatten(v))
    agree(operator.quadratic(v), flatten(v) @ reference @ flatten(v))


def test_exact_on_a_batch_is_the_mean_over_the_batch(case):
    batch = torch.tensor([5, 0, 2])
    agree(case.problem.fisher(case.theta, batch).dense(), case.dense_fisher(batch.tolist()))


def test_the_kind_dense_is_the_exact_one_as_a_matrix(case):
    operator = case.problem.fisher(case.theta, kind="dense")
    assert isinstance(operator, DenseFisher)
    agree(operator.matrix, case.dense_fisher())


def test_empirical_is_the_mean_outer_product_of_the_gradients(case):
    gradients = case.gradients()
    agree(
        case.problem.fisher(case.theta, kind="empirical").dense(),
        gradients.T @ gradients / len(gradients),
    )
    agree(
        flatten(case.problem.gradient(case.theta)),
        gradients.mean(0),
        rtol=1e-10,
    )
    ours = case.problem.per_sample_gradients(case.theta)
    agree(torch.cat([leaf.reshape(len(leaf), -1) for leaf in leaves(ours)], dim=1), gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_the_factor_gives_the_operator(case, kind):
    operator = case.problem.fisher(case.theta, kind=kind)
    if kind == "dense":
        with pytest.raises(TypeError, match="DenseFisher has no factor in sample space"):
            operator.rows()
        return
    rows = operator.rows()
    assert len(rows) == operator.n_rows
    agree(rows.T @ rows, operator.dense())


@pytest.mark.parametrize("kind", KINDS)
def test_symmetric_positive_tangent_and_the_same_to_the_bit(case, kind):
    operator, manifold = case.problem.fisher(case.theta, kind=kind), case.problem.manifold
    u, v = case.tangent(1), case.tangent(2)
    product = operator.matvec(v)
    manifold.check_tangent(case.theta, product, atol=1e-12)
    size = float(flatten(product).norm())
    left, right = (
        manifold.inner(case.theta, u, product),
        manifold.inner(case.theta, operator.matvec(u), v),
    )
    assert abs(float(left - right)) <= 1e-14 + 1e-12 * size
    matrix = operator.dense()
    assert float(torch.linalg.eigvalsh((matrix + matrix.T) / 2).min()) >= -1e-13 * float(
        matrix.norm()
    )
    again = operator.matvec(v)
    assert all(torch.equal(a, b) for a, b in zip(leaves(product), leaves(again), strict=True))
    assert torch.equal(flatten(operator @ v), flatten(product))


def test_float32_agrees_with_float64(manifold_name, likelihood_name, build):
    wide = build(manifold_name, likelihood_name)
    problem = wide.problem
    # the same numbers, rounded
    target = problem.targets.float() if problem.targets.is_floating_point() else problem.targets

    def model(x, theta):
        return problem.model(x.double(), tree_map(torch.Tensor.double, theta)).to(x.dtype)

    narrow = NLLProblem(problem.manifold, model, problem.likelihood, problem.inputs.float(), target)
    theta = unflatten(flatten(wide.theta).float(), wide.theta)
    v = problem.manifold.project(theta, unflatten(flatten(wide.tangent()).float(), wide.theta))
    product = narrow.fisher(theta).matvec(v)
    assert flatten(product).dtype == torch.float32
    agree(flatten(product).double(), wide.dense_fisher() @ flatten(wide.tangent()), rtol=2e-5)


def monte_carlo(case, seed):
    """The matrix of the Monte-Carlo operator with draws from another seed."""
    case.problem.seed = seed
    rows = case.problem.fisher(case.theta, kind="monte-carlo").rows()
    return rows.T @ rows


def test_monte_carlo_error_falls_like_one_over_the_root_of_the_draws(likelihood_name, build):
    errors = []
    for draws in (5, 500):
        case = build("grassmann", likelihood_name, draws=draws)
        exact = case.dense_fisher()
        errors.append(
            sum(float((monte_carlo(case, seed) - exact).square().sum()) for seed in range(12))
            ** 0.5
        )
    # a hundred times the draws, a tenth of the error
    assert 5 < errors[0] / errors[1] < 20


def test_monte_carlo_is_unbiased(likelihood_name, build):
    case, runs = build("sphere", likelihood_name, draws=20), 50
    exact = case.dense_fisher()
    errors = torch.stack([monte_carlo(case, seed) - exact for seed in range(runs)])
    assert bool((errors.mean(0).abs() <= 5 * errors.std(0) / runs**0.5 + 1e-12).all())


@pytest.mark.parametrize("kind", ["monte-carlo", "kronecker", "row-block"])
def test_targets_are_drawn_anew_at_every_call_so_that_their_noise_averages_out(kind, build):
    case, again, other = (build("grassmann", "gaussian", seed=0) for _ in range(3))
    other.problem.seed = 1
    found = [c.problem.fisher(c.theta, kind=kind).dense() for c in (case, case, again, other)]
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[3])
    # the generator of a run takes the place of the problem's own
    lent = []
    for c in (case, again):
        c.problem.generator = c.generator(7)
        lent.append(c.problem.fisher(c.theta, kind=kind).dense())
    assert torch.equal(*lent)
    exact = case.dense_fisher()
    operators = [case.problem.fisher(case.theta, kind=kind) for _ in range(150)]
    mean = sum(operator.dense() for operator in operators) / 150
    if kind == "monte-carlo":
        assert float((mean - exact).norm()) < 0.15 * float(exact.norm())
    if kind != "row-block":  # whose projection takes a part of the trace
        assert float(mean.trace()) == pytest.approx(float(exact.trace()), rel=0.1)


@pytest.mark.parametrize("kind", ["kronecker", "row-block"])
def test_at_a_perfect_fit_only_empirical_matrices_vanish(kind, build):
    case = build("grassmann", "gaussian")
    case.problem.targets = case.problem.model(case.problem.inputs, case.theta)
    drawn, observed = (
        case.problem.fisher(case.theta, kind=k).dense() for k in (kind, f"empirical-{kind}")
    )
    assert float(observed.norm()) < 1e-12
    assert float(drawn.trace()) > 0.1 * float(case.dense_fisher().trace())


def test_a_model_that_solves_a_linear_system_on_grassmann():
    """Completion by variable projection: z_i = M_i U (UᵀM_iU)⁻¹ UᵀM_i y_i, with the mask M_i as the input."""
    g = torch.Generator().manual_seed(0)
    manifold = Grassmann(7, 2)
    theta = manifold.random_point(generator=g)
    masks = (torch.rand(12, 7, generator=g) < 0.8).double()
    table = torch.randn(12, 7, generator=g, dtype=torch.float64) * masks

    def model(x, u):
        mask, observed = x[:, 0], x[:, 1]
        gram = torch.einsum("jp,nj,jq->npq", u, mask, u)
        coefficients = torch.linalg.solve(gram, observed @ u)
        return mask * (coefficients @ u.T)

    problem = NLLProblem(manifold, model, Gaussian(), torch.stack([masks, table], 1), table)
    v = manifold.random_tangent(theta, generator=g)
    operator = problem.fisher(theta)
    total = torch.zeros(7, 2, dtype=torch.float64)
    for mask, row in zip(masks, table, strict=True):
        # NOTES 4: P_iᵀ[(I - Π_i) H_i a aᵀ + r rᵀ H_i M]
        seen = mask.bool()
        u, h, x = theta[seen], v[seen], row[seen]
        inverse = torch.linalg.inv(u.T @ u)
        a = inverse @ u.T @ x
        r = u @ a - x
        part = h @ torch.outer(a, a)
        total[seen] += part - u @ inverse @ (u.T @ part) + torch.outer(r, r) @ h @ inverse
    agree(operator.matvec(v), total / 12, rtol=1e-12)
    batch = torch.arange(5)
    agree(operator.rows().T @ operator.rows(), operator.dense(), rtol=1e-12)
    assert problem.fisher(theta, batch).n_samples == 5


def moved_point(case, length=0.3):
    manifold = case.problem.manifold
    return manifold.retract(case.theta, scale(length, case.tangent(7)))


def dense_transport(manifold, x, y):
    """The matrix of the transport on flattened ambient vectors."""
    size = flatten(x).numel()
    basis = torch.eye(size, dtype=torch.float64)
    columns = [
        flatten(manifold.transport(x, y, manifold.project(x, unflatten(e, x)))) for e in basis
    ]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("kind", ["exact", "monte-carlo", "empirical"])
def test_variance_reduction_is_its_dense_formula_and_positive(manifold_name, kind, build):
    case = build(manifold_name, "poisson")
    problem, x0, x = case.problem, case.theta, moved_point(case)
    batch = torch.tensor([1, 4, 6])
    operator = problem.snapshot(x0).fisher(x, batch, kind=kind)
    assert isinstance(operator, VarianceReducedFisher)
    transport = dense_transport(problem.manifold, x0, x)
    share = len(batch) / problem.n_samples
    if kind != "monte-carlo":
        rest = (
            problem.fisher(x0, kind=kind).dense()
            - share * problem.fisher(x0, batch, kind=kind).dense()
        )
        expected = (
            share * problem.fisher(x, batch, kind=kind).dense() + transport @ rest @ transport.T
        )
        agree(operator.dense(), expected)
    matrix = operator.dense()
    agree(matrix, matrix.T)
    assert float(torch.linalg.eigvalsh((matrix + matrix.T) / 2).min()) >= -1e-12 * float(
        matrix.norm()
    )


def test_variance_reduction_over_all_samples_is_the_operator_itself(gaussian_case):
    problem, x = gaussian_case.problem, moved_point(gaussian_case)
    everything = torch.arange(problem.n_samples)
    operator = problem.snapshot(gaussian_case.theta).fisher(x, everything, kind="exact")
    agree(operator.dense(), problem.fisher(x).dense())


def test_a_batch_that_holds_a_sample_twice_stays_positive(gaussian_case):
    problem, x = gaussian_case.problem, moved_point(gaussian_case)
    snapshot = problem.snapshot(gaussian_case.theta)
    twice = snapshot.fisher(x, torch.tensor([3, 3, 3, 3, 1]), kind="exact").dense()
    agree(twice, snapshot.fisher(x, torch.tensor([1, 3]), kind="exact").dense())


@pytest.mark.parametrize(
    "kind", ["exact", "monte-carlo", "empirical", "kronecker", "row-block", "dense"]
)
def test_every_kind_says_what_it_approximates(kind, build):
    case = build("grassmann", "gaussian")
    assert len(case.problem.fisher(case.theta, kind=kind).approximates) > 20


def test_a_batch_of_vectors_is_refused():
    """Row blocks of a square point would be laid along the batch, without a word."""
    manifold, g = Oblique(3, 3), torch.Generator().manual_seed(0)
    x = manifold.random_point(generator=g)
    v = manifold.random_tangent(x.expand(3, 3, 3), generator=g)
    blocks = torch.eye(3, dtype=x.dtype) * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None, None]
    problem = NLLProblem(manifold, lambda x, t: x @ t.T, Gaussian(), v[0], v[1])
    for operator in (
        RowBlockFisher(manifold, x, blocks),
        problem.fisher(x),
        problem.fisher(x, kind="dense"),
    ):
        for name, call in (
            ("v", operator.matvec),
            ("v", operator.quadratic),
            ("g", operator.solve),
        ):
            message = rf"{name} must be a single tangent vector like the point, of shape \(3, 3\), got \(3, 3, 3\)"
            with pytest.raises(ValueError, match=message):
                call(v)


def test_vectors_that_are_not_tangent_are_refused(build):
    case = build("sphere", "gaussian")
    operator = case.problem.fisher(case.theta)
    with pytest.raises(
        ValueError, match=r"v is not a tangent vector of Sphere\(5\).*project it first"
    ):
        operator.matvec(case.theta)
    with pytest.raises(
        ValueError,
        match=r"v must be torch.float64 on cpu like the point x, got torch.float32 on cpu",
    ):
        operator.matvec(case.tangent().float())
    with pytest.raises(
        ValueError, match=r"v must have shape \(..., 5\) on Sphere\(5\), got \(4,\)"
    ):
        operator.matvec(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(
        ValueError,
        match=r"v must be torch.float64 on cpu like the point x, got torch.float64 on meta",
    ):
        operator.matvec(case.tangent().to("meta"))
    with pytest.raises(ValueError, match="v must be finite, got NaN or infinite entries"):
        operator.matvec(case.tangent() * torch.nan)


def test_dense_and_monte_carlo_refuse_at_the_door(build):
    case = build("sphere", "gaussian")
    with pytest.raises(
        ValueError, match=r"matrix must have shape \(5, 5\) for this point, got \(4, 4\)"
    ):
        DenseFisher(Sphere(5), case.theta, torch.eye(4))
    with pytest.raises(
        ValueError, match=r"matrix must be torch.float64 on cpu like the point, got torch.float32"
    ):
        DenseFisher(Sphere(5), case.theta, torch.eye(5))
    one_sided = torch.eye(5, dtype=torch.float64)
    one_sided[0, 3] = 1.5
    with pytest.raises(
        ValueError, match=r"matrix must be symmetric, got entries that differ .* by up to 1.50e\+00"
    ):
        DenseFisher(Sphere(5), case.theta, one_sided)
    with pytest.raises(ValueError, match="draws must be a positive integer, got 0"):
        build("sphere", "gaussian", draws=0)


def test_a_number_as_parameter_and_one_output_per_sample():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    problem = NLLProblem(Euclidean(), lambda x, t: x * t, Gaussian(), x, 3 * x)
    operator = problem.fisher(torch.tensor(0.5, dtype=torch.float64))
    assert isinstance(operator, ExactFisher)
    assert float(operator.matvec(torch.tensor(1.0, dtype=torch.float64))) == pytest.approx(2.5)
    assert float(operator.solve(torch.tensor(1.0, dtype=torch.float64), 0.5)) == pytest.approx(
        1 / 3
    )


def backwards(tree):
    return {key: backwards(tree[key]) for key in reversed(tree)} if isinstance(tree, dict) else tree


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_keys_of_a_point_or_a_vector_means_nothing(kind):
    """Two factors of one shape: vectors that are taken for each other raise no error."""
    manifold = Product({"a": Sphere(3), "rest": Product({"b": Euclidean(3), "c": Sphere(3)})})
    g = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(9, 3, generator=g, dtype=torch.float64),
        torch.randn(9, generator=g, dtype=torch.float64),
    )

    def model(x, t):
        return torch.tanh(x @ t["a"]) + torch.sin(2 * x @ t["rest"]["b"]) * (x @ t["rest"]["c"])

    problem = NLLProblem(manifold, model, Gaussian(), x, y)
    theta = manifold.random_point(generator=g)
    v, w = (manifold.random_tangent(theta, generator=g) for _ in range(2))

    def fisher(point):
        problem.generator = torch.Generator().manual_seed(0)
        return problem.fisher(point, kind=kind)

    expected = fisher(theta).matvec(v)
    for point, vector in (
        (backwards(theta), v),
        (theta, backwards(v)),
        (backwards(theta), backwards(v)),
    ):
        operator = fisher(point)
        agree(flatten(operator.matvec(vector)), flatten(expected))
        agree(dot(backwards(w), operator.matvec(vector)), dot(w, expected))
        for method in ("dense", "cg", *(["woodbury", "pinv"] if operator.n_rows else [])):
            solution = operator.solve(operator.matvec(vector), method=method)
            agree(flatten(operator.matvec(solution)), flatten(expected), rtol=1e-8)
    problem.gradient(backwards(theta))  # its graph, in that order, is gone on with
    agree(flatten(fisher(theta).matvec(v)), flatten(expected))
    if kind != "dense":
        agree(problem.fisher(theta, kind=kind).jvp(backwards(v)), operator.jvp(v))

"""The facts of the theory report at small size, and the report itself."""

from __future__ import annotations

import pytest
import torch

from benchmarks import theory
from benchmarks.theory import (
    PARTS,
    Settings,
    divergence,
    global_convergence,
    invariance,
    rates,
    section,
    stability,
    steepest,
)
from benchmarks.theory.report import Finding, Part, fitted_power
from fisherfold.fisher.likelihoods import Categorical, Gaussian, Poisson
from fisherfold.manifolds import Stiefel
from fisherfold.manifolds.verdict import slope
from fisherfold.reproduce import reproduce
from fisherfold.reproduce.reproduce import Options
from fisherfold.reproduce.twolayer import TwoLayer

NOISE = 2e-15


@pytest.mark.parametrize("likelihood", divergence.LIKELIHOODS)
@pytest.mark.parametrize("manifold", divergence.MANIFOLDS)
def test_kl_departs_from_the_fisher_metric_at_third_order(manifold, likelihood):
    geometry = divergence.MANIFOLDS[manifold]
    problem, theta = divergence.make_problem(geometry, divergence.LIKELIHOODS[likelihood], seed=3)
    # of every order, Stiefel's QR and Cayley included: KL has no linear term
    for method in geometry.retractions:
        errors = divergence.kl_remainder(problem, theta, method, seed=5)
        assert slope(divergence.STEPS, errors, NOISE) > 2.8, method


def test_without_a_retraction_the_order_is_lost():
    problem, theta = divergence.make_problem(Stiefel(5, 2), Categorical(), seed=3)
    errors = divergence.kl_remainder(problem, theta, "polar", seed=5, stretch=1.2)
    assert slope(divergence.STEPS, errors, NOISE) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(("method", "power"), [("polar", 3), ("exp", 3), ("qr", 2), ("cayley", 2)])
def test_the_model_of_the_loss_does_need_a_second_order_retraction(method, power):
    problem, theta = divergence.make_problem(Stiefel(5, 2), Poisson(), seed=3)
    errors = divergence.loss_remainder(problem, theta, method, seed=5)
    assert slope(divergence.STEPS, errors, NOISE) == pytest.approx(power, abs=0.15)


def test_the_printed_hessian_is_off_by_the_hessian_itself():
    problem, theta = divergence.make_problem(Stiefel(5, 2), Gaussian(), seed=0)
    d = problem.manifold.random_tangent(theta, generator=torch.Generator())
    true, printed = (
        divergence.riemannian_hessian(problem, theta, d, as_printed=flag) for flag in (False, True)
    )

    # grad Ψ differentiated along the curve and projected is Hess Ψ: the printed formula subtracts it from P∇²Ψ
    t = 1e-5
    ends = [problem.gradient(problem.manifold.exp(theta, s * t * d)) for s in (1, -1)]
    differences = problem.manifold.project(theta, (ends[0] - ends[1]) / (2 * t))
    assert torch.allclose(true, differences, atol=1e-8)
    assert float((true - printed).norm()) > 0.5 * float(true.norm())


@pytest.mark.parametrize("likelihood", divergence.LIKELIHOODS.values(), ids=divergence.LIKELIHOODS)
def test_the_fisher_information_is_the_hessian_only_with_frozen_targets(likelihood):
    assert divergence.entropy_hessian_error(likelihood, frozen=True, seed=1) < 1e-12
    assert divergence.entropy_hessian_error(likelihood, frozen=False, seed=1) > 0.1


def test_the_natural_direction_is_the_steepest_one():
    scene = steepest.Scene.make("categorical", "polar", seed=1)
    natural = scene.natural_direction()
    generator = torch.Generator().manual_seed(0)
    radius = 0.003
    draws = torch.cat(
        [natural[None], torch.randn(300, len(natural), generator=generator, dtype=torch.float64)]
    )
    candidates = scene.stretched(draws, radius)
    assert torch.allclose(
        scene.divergence(candidates), torch.tensor(radius**2 / 2, dtype=torch.float64), rtol=1e-9
    )
    falls = -scene.loss(candidates)
    assert int(falls.argmax()) == 0
    start = 0.5 * torch.randn(len(natural), generator=generator, dtype=torch.float64)
    distances = [float((scene.best_step(r, start) - natural).norm()) for r in (0.02, 0.01, 0.005)]
    assert fitted_power((0.02, 0.01, 0.005), distances) == pytest.approx(1, abs=0.15)


def test_growing_batches_converge_and_fixed_ones_stop_at_a_floor():
    problem, start = global_convergence.make_problem(800, seed=0)
    grow = global_convergence.run(
        problem, start, "growing", 0, 50, batch_size=global_convergence.Growing(800, 50)
    )
    assert grow["final_gradient_norm"] < 1e-9
    floors = []
    for size in (20, 160):
        run = global_convergence.run(problem, start, "fixed", 0, 50, batch_size=size)
        floors.append(run["tail_gradient_norm"])
        assert run["least_gradient_norm"] > 1e-3
    assert 1.5 < floors[0] / floors[1] < 5  # √8 = 2.8


def test_a_large_eta2_makes_sigma_grow_and_the_rate_linear():
    problem, start = global_convergence.make_problem(800, seed=0)
    kappa, _ = global_convergence.least_eta2(problem, start)
    large = global_convergence.run(problem, start, "large", 0, 60, eta2=kappa)
    tiny = global_convergence.run(problem, start, "tiny", 0, 60)
    assert large["final_sigma"] > 100
    assert tiny["final_sigma"] < 1e-3
    assert large["final_gradient_norm"] > 1e-7 > 1e-10 > tiny["final_gradient_norm"]
    products = [d / kappa for d in large["dampings"][-20:]]
    assert 1 / 16 < min(products) < max(products) < 16


def test_algorithm_1_converges_with_the_eta2_of_the_theorem_and_the_verdict_can_fail():
    problem, start = global_convergence.make_problem(400, seed=1)
    kappa, eta2 = global_convergence.least_eta2(problem, start)
    assert eta2 > 4 * kappa  # 16 κ_ef/(1 - η₁) is what decides, not κ_fim
    batches = {
        "all samples": None,
        "growing batch": global_convergence.Growing(400, 250),
        "fixed": 40,
    }
    runs = {
        name: global_convergence.run(problem, start, name, 0, 250, eta2=eta2, batch_size=size)
        for name, size in batches.items()
    }
    assert (
        global_convergence._theorem_finding([runs["all samples"], runs["growing batch"]]).verdict
        == "holds"
    )
    assert global_convergence._theorem_finding([runs["fixed"]]).verdict == "fails"


def test_the_regularised_model_is_not_fully_linear_with_a_constant():
    problem, start = global_convergence.make_problem(400, seed=0)
    sigmas, constants = global_convergence.model_errors(problem, start)
    assert fitted_power(sigmas[3:], constants["with λ"][3:]) == pytest.approx(1, abs=0.1)
    assert fitted_power(sigmas[3:], constants["without λ"][3:]) == pytest.approx(0, abs=0.1)


def wide(activation, *, width=2048, seed=0):
    x, y = stability.inputs(rates.SAMPLES, rates.DIM, seed=0)
    generator = torch.Generator().manual_seed(seed)
    problem, theta = TwoLayer.draw(x, y, width, activation=activation, generator=generator)
    return problem, theta, generator


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("step", [0.25, 0.5, 0.75])
def test_rates_are_within_the_theorem_and_tend_to_one_minus_t(activation, step):
    problem, theta, _ = wide(activation)
    factors = rates.ratios(
        rates.residuals(problem, theta, problem.targets, step=step, iterations=12)
    )
    assert max(factors) <= 1 - step / 2
    assert factors[-1] == pytest.approx(1 - step, abs=0.03)


def test_one_step_is_quadratic_for_a_smooth_activation_and_the_relu_jumps():
    steps = {}
    for activation in ("tanh", "relu"):
        problem, theta, generator = wide(activation)
        near = stability.moved_targets(problem, theta, 1.0, generator=generator)
        steps[activation] = rates._one_step(near, theta)
    left, _, change = zip(*steps["tanh"][3:12], strict=True)
    assert fitted_power(rates.DISTANCES[3:12], left) == pytest.approx(2, abs=0.1)
    assert fitted_power(rates.DISTANCES[3:12], change) == pytest.approx(1, abs=0.05)
    _, turned, change = zip(*steps["relu"][:4], strict=True)
    assert min(turned) > 10
    assert fitted_power(rates.DISTANCES[:4], change) < 0.75


def test_the_jacobian_moves_as_counting_says():
    x, y = stability.inputs(8, 4, seed=0)
    widths, worst, smooth = (256, 1024, 4096), [], []
    for width in widths:
        for activation, norms in (("relu", worst), ("tanh", smooth)):
            generator = torch.Generator().manual_seed(0)
            problem, theta = TwoLayer.draw(x, y, width, activation=activation, generator=generator)
            row = stability.look(problem, theta, generator=generator)
            norms.append(row["adversary_1"] if activation == "relu" else row["random_1"])
    assert fitted_power(widths, worst) == pytest.approx(-1 / 6, abs=0.06)
    assert fitted_power(widths, smooth) == pytest.approx(-1 / 2, abs=0.06)


def test_the_adversary_stays_in_its_ball_and_turns_units_over():
    x, y = stability.inputs(8, 4, seed=0)
    problem, theta = TwoLayer.draw(x, y, 512, generator=torch.Generator().manual_seed(1))
    point = stability.adversary(problem, theta, 1.0)
    assert 0.9 < float((point - theta).norm()) <= 1 + 1e-6
    turned = (x @ theta.T).sign().ne((x @ point.T).sign()).sum(dim=1)
    # Σ over the K nearest of (k/(2 h m))² = 1 with density h at zero: K = (12 h² m²)^{1/3}
    expected = (12 * stability.density_at_zero(4) ** 2 * 512**2) ** (1 / 3)
    assert float(turned.max()) == pytest.approx(expected, rel=0.15)


def test_the_constants_of_the_lemmas_on_a_tetrahedron():
    x = (
        torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64)
        / 3**0.5
    )
    # V = I/n, hence φ_i(u) = √n (x_i - (u·x_i) u) with M = n and L = √n
    c = stability.constants(x)
    assert c.m_constant == pytest.approx(3, rel=1e-2)
    assert c.l_constant == pytest.approx(3**0.5, rel=1e-2)


def test_the_deterministic_lemma_bounds_what_the_adversary_does():
    x, y = stability.inputs(8, 4, seed=0)
    c = stability.constants(x)
    for seed in range(3):
        problem, theta = TwoLayer.draw(x, y, 512, generator=torch.Generator().manual_seed(seed))
        for radius in (0.1, 1.0):
            change = stability.change_norm(
                problem, stability.adversary(problem, theta, radius), theta
            )
            assert 0 < change <= stability.deterministic_bound(problem, theta, radius, c)
    assert stability.deterministic_bound(problem, theta, 1e9, c) == float("inf")


@pytest.mark.parametrize("dim", [2, 3, 10, 50])
def test_random_directions_are_nearly_orthogonal_as_often_as_the_beta_law_says(dim):
    generator = torch.Generator().manual_seed(dim)
    v = torch.nn.functional.normalize(
        torch.randn(100_000, dim, generator=generator, dtype=torch.float64), dim=1
    )
    for gamma in (0.01, 0.1, 0.3):
        exact = stability.exact_probability(dim, gamma)
        seen = float((v[:, 0].abs() <= gamma).double().mean())
        assert abs(seen - exact) < 4.5 * (exact * (1 - exact) / 100_000) ** 0.5
        assert exact <= (torch.pi * dim) ** 0.5 * gamma
    # the proof's first step loses the factor 2
    assert stability.exact_probability(dim, 0.001) > 1.9 * stability.density_at_zero(dim) * 0.001


def test_rows_behind_batch_norm_have_tangent_gradients_but_hooks_do_not_see_them():
    network, x, y = invariance.make("batch", seed=0)
    weight = network.first.weight.detach()
    true, hooks = invariance.true_gradients(network, x, y), invariance.hook_gradients(network, x, y)
    assert torch.allclose(true.sum(0), hooks.sum(0), atol=1e-12)
    assert invariance.radial_share(true, weight) < 1e-28
    assert invariance.radial_share(hooks, weight) > 1e-3
    assert invariance.projected_fisher_change(true, weight) < 1e-13
    assert invariance.projected_fisher_change(hooks, weight) > 1e-2


def test_without_batch_statistics_hooks_are_exact_and_the_identity_is_gone():
    network, x, y = invariance.make("none", seed=0)
    true, hooks = invariance.true_gradients(network, x, y), invariance.hook_gradients(network, x, y)
    assert torch.allclose(true, hooks, atol=1e-13)
    assert invariance.radial_share(true, network.first.weight.detach()) > 1e-3


def test_the_verdicts_of_the_fifth_part():
    verdicts = {f.name: f.verdict for f in invariance.part(Settings(seeds=2)).findings}
    assert list(verdicts.values()) == [
        "holds",
        "fails",
        "holds",
        "fails",
        "fails",
        "fails",
        "holds",
    ]


@pytest.mark.slow
def test_every_part_runs_and_gives_ten_rows_and_more():
    parts = [PARTS[name](Settings(quick=True, seeds=2)) for name in PARTS]
    assert [part.name for part in parts] == list(PARTS)
    results = [finding for part in parts for finding in part.findings]
    assert len(results) >= 35
    assert {f.verdict for f in results} == {"holds", "partly", "fails"}
    assert [f.verdict for f in results if global_convergence.THEOREM in f.name] == ["holds"]


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (("holds", "fails"), "holds partly"),
        (("holds",), "holds"),
        (("fails",), "does not hold"),
        (("partly",), "holds partly"),
        (("holds", "partly"), "holds partly"),
    ],
)
def test_the_verdict_of_a_part_of_the_theory(seen, verdict):
    findings = [Finding(f"statement {i}", 0.0, 0.25, each, "") for i, each in enumerate(seen)]
    found = section(Part("metric", "T", "S", findings, [], None), {})
    assert found.verdict == verdict
    assert (f"Does not hold: statement {len(seen) - 1} (measured 0.25)." in found.why) == (
        "fails" in seen
    )


def test_a_part_of_the_theory_leaves_its_files_and_is_read_again(tmp_path, monkeypatch):
    options = Options(quick=True, seeds=1, output=tmp_path)
    found = reproduce.reproduce_theory(options, ("invariance",))
    assert [section.name for section in found] == ["theory-invariance"]
    file = options.folder / "theory" / "invariance"
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert file.with_suffix(".csv").read_text().count("\n") == 5
    assert {row[3] for row in found[0].tables[0].rows} == {"holds", "fails"}
    monkeypatch.setattr(theory, "PARTS", {"invariance": None})
    assert reproduce.reproduce_theory(options, ("invariance",)) == found
    with pytest.raises(TypeError):
        reproduce.reproduce_theory(Options(quick=True, seeds=2, output=tmp_path), ("invariance",))


def test_a_section_that_was_cut_short_is_measured_again(tmp_path):
    options = Options(quick=True, seeds=1, output=tmp_path)
    (part,) = reproduce.reproduce_theory(options, ("invariance",))
    record = options.section_file("theory-invariance")
    record.write_bytes(record.read_bytes()[:100])
    assert reproduce.reproduce_theory(options, ("invariance",)) == [part]


def test_a_part_that_does_not_exist_is_rejected(tmp_path):
    options = Options(output=tmp_path)
    with pytest.raises(ValueError, match=r"part must be one of \['metric', .*\], got \['proof'\]"):
        reproduce.reproduce_theory(options, ("proof",))

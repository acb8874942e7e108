"""The invariance probe against networks whose invariances are known, and the promise to leave the model alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from architectures import SUITE, Net, build
from torch import nn

from fisherfold.optim.invariance import call, find_scale_invariant
from fisherfold.optim.structure import guess_from_structure

BIG = {"wrn-16-4", "vgg16-bn"}


def test_suite_is_large_enough() -> None:
    assert len(SUITE) >= 25


@pytest.mark.parametrize("name", list(SUITE))
def test_probe_is_right(name: str) -> None:
    net, example, expected = build(name)
    findings = find_scale_invariant(net, example)
    assert list(findings) == [key for key, _ in net.named_parameters()]
    assert {key: f.kind for key, f in findings.items() if f.kind != "none"} == expected
    for key, finding in findings.items():
        rows = dict(net.named_parameters())[key].shape[0]
        blocks = {"row": rows, "tensor": 1, "none": 0}
        assert finding.spheres == blocks.get(finding.kind, finding.spheres)
        assert finding.reason


@pytest.mark.parametrize("name", [n for n in SUITE if n not in BIG])
def test_verdicts_agree_with_rescaling_one_weight_at_a_time(name: str) -> None:
    """Positive and negative verdicts: doubling the first block changes the output exactly when the verdict is none."""
    net, example, _ = build(name)
    findings = find_scale_invariant(net, example)
    net = copy.deepcopy(net).double()
    inputs = tuple(t.double() for t in example) if isinstance(example, tuple) else example.double()

    def outputs() -> torch.Tensor:
        torch.manual_seed(0)
        result = call(net.train(), inputs)
        parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
        return torch.cat([p.detach().flatten() for p in parts])

    base = outputs()
    for key, parameter in net.named_parameters():
        finding = findings[key]
        if parameter.ndim < 2 or "depend" in finding.reason:
            continue
        blocks = finding.spheres or 1
        saved = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(blocks, -1)[0].mul_(2.0)
        change = float((outputs() - base).norm() / base.norm())
        with torch.no_grad():
            parameter.copy_(saved)
        assert (change < 1e-2) == (finding.kind != "none"), (key, change, finding)


def test_no_finer_partition_is_invariant() -> None:
    """GroupNorm(3, 6): the blocks are the three groups; a single row of a group is not invariant."""
    net, example, _ = build("conv-gn-groups")
    finding = find_scale_invariant(net, example)["0.weight"]
    assert finding.spheres == 3
    net = net.double()
    base = net(example.double()).detach()
    with torch.no_grad():
        net[0].weight[0].mul_(2.0)
    assert float((net(example.double()).detach() - base).norm() / base.norm()) > 1e-2


def test_epsilon_of_the_norm_is_reported_and_can_veto() -> None:
    """With outputs of variance v the invariance breaks like ε/v: reported when small, decisive when it dominates."""
    net, example, _ = build("conv-bn")
    small = find_scale_invariant(net, example)["0.weight"]
    net[1].eps = 1e-3
    visible = find_scale_invariant(net, example)["0.weight"]
    bare = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, eps=10.0, affine=False))
    dominant = find_scale_invariant(bare, torch.randn(8, 5))["0.weight"]
    assert small.kind == visible.kind == "row"
    assert small.rescaling < 0.1 * visible.rescaling
    assert dominant.kind == "none"
    assert "ε of a norm dominates" in dominant.reason


def test_model_and_random_state_are_untouched() -> None:
    net, example, _ = build("dropout")
    seen: list[int] = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    net.eval()
    net[0].weight.grad = torch.full_like(net[0].weight, 7.0)
    net[0].weight.requires_grad_(False)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    rng = torch.get_rng_state()
    findings = find_scale_invariant(net, example)
    assert findings["0.weight"].kind == "row"
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not net.training
    assert not net[0].weight.requires_grad
    assert bool((net[0].weight.grad == 7.0).all())
    assert seen == []
    assert len(net[0]._forward_hooks) == 1


def test_old_style_weight_norm_hook_is_kept() -> None:
    with pytest.warns(FutureWarning):
        layer = torch.nn.utils.weight_norm(nn.Linear(5, 6))
    findings = find_scale_invariant(nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3)), torch.randn(8, 5))
    assert findings["0.weight_v"].kind == "row"
    assert findings["0.weight_g"].kind == "none"


def test_random_seed_does_not_decide() -> None:
    net, example, expected = build("residual-pre-activation")
    for seed in range(5):
        findings = find_scale_invariant(net, example, seed=seed)
        assert {key: f.kind for key, f in findings.items() if f.kind != "none"} == expected


def test_bad_input_is_named() -> None:
    net, _, _ = build("linear-bn")
    with pytest.raises(ValueError, match=r"example_input \(shapes \[\(8, 7\)\]\) was rejected by Sequential"):
        find_scale_invariant(net, torch.randn(8, 7))
    with pytest.raises(ValueError, match="Identity has none"):
        find_scale_invariant(nn.Identity(), torch.randn(2, 2))
    with pytest.raises(ValueError, match="no differentiable tensor"):
        find_scale_invariant(Net(lambda s, x: s.p(x).argmax(dim=1), p=nn.Linear(5, 3)), torch.randn(2, 5))
    stuck = nn.Linear(3, 3)
    stuck.lock = threading.Lock()
    with pytest.raises(ValueError, match="Linear cannot be copied for the probe"):
        find_scale_invariant(stuck, torch.randn(2, 3))


@pytest.mark.parametrize(
    "name", ["conv-bn", "residual-pre-activation", "dense-concatenation", "raw-skip", "wrn-16-4", "tied"]
)
def test_structure_never_claims_what_the_probe_denies(name: str) -> None:
    net, _, expected = build(name)
    guesses = guess_from_structure(net)
    claimed = {key for key, f in guesses.items() if f.kind == "row"}
    assert claimed <= set(expected)
    assert all(f.guessed and f.reason.startswith("guess") for f in guesses.values())


def test_structure_on_an_untraceable_model() -> None:
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    net = Net(lambda s, x: s.body(x) if float(x.sum()) > 0 else -s.body(x), body=body)
    finding = guess_from_structure(net)["body.0.weight"]
    assert finding.kind == "row"
    assert "nn.Sequential" in finding.reason
    with pytest.raises(ValueError, match="Identity has none"):
        guess_from_structure(nn.Identity())

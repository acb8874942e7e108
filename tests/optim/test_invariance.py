"""The invariance probe against networks whose invariances are known, and the promise to leave the model alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from architectures import SUITE, Net, build
from starts import CASES, STARTS, network
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from fisherfold.optim import MKFAC
from fisherfold.optim.invariance import find_scale_invariant
from fisherfold.optim.replica import call
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


def assert_right_from(start: str, cases: list[Any]) -> None:
    wrong = []
    for case in cases:
        net, example, expected = network(case, STARTS[start])
        findings = find_scale_invariant(net, example)
        kinds = {key: f.kind for key, f in findings.items() if f.kind != "none"}
        if kinds != expected:
            wrong.append((case, kinds, {key: f.reason for key, f in findings.items() if key in kinds | expected}))
    assert not wrong


@pytest.mark.parametrize("start", list(STARTS))
def test_verdict_does_not_depend_on_the_start(start: str) -> None:
    """Zero heads, gains and biases, constants, tiny and huge values: a fourth of all networks for each."""
    assert_right_from(start, CASES[list(STARTS).index(start) % 4 :: 4])


@pytest.mark.slow
@pytest.mark.parametrize("start", list(STARTS))
def test_verdict_does_not_depend_on_the_start_for_any_network(start: str) -> None:
    assert_right_from(start, CASES)


@pytest.mark.parametrize("name", [n for n in SUITE if n not in BIG])
def test_suite_is_right_with_zero_vectors_and_zero_heads(name: str) -> None:
    net, example, expected = build(name)
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            if parameter.ndim == 1 or key.startswith(("head", "q.weight", "3.")):
                parameter.zero_()
    findings = find_scale_invariant(net, example)
    assert {key: f.kind for key, f in findings.items() if f.kind != "none"} == expected


class Scaled(nn.Module):
    """A normalised layer times a function of a parameter with a domain of its own."""

    def __init__(self, scale: float, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.norm, self.q = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.scale, self.function = nn.Parameter(torch.full((6,), scale)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.q((self.norm(self.p(x)) * self.function(self.scale)).relu())


def only_one(t: Tensor) -> Tensor:
    if not bool((t == 1).all()):
        raise RuntimeError("scale must be one")
    return t


@pytest.mark.parametrize(
    ("scale", "function", "own"),
    [
        (1e-4, torch.sqrt, False),
        (0.0, torch.sqrt, False),
        (0.9, lambda t: (1 - t * t).sqrt(), False),
        (1.0, torch.log, False),
        (600.0, torch.exp, False),
        (1.0, only_one, True),
        (1.0, lambda t: torch.where(t == 1, t, -t).sqrt(), True),
    ],
    ids=["root", "root of zero", "edge of a domain", "logarithm", "exponential", "refusal", "isolated point"],
)
def test_parameters_with_a_domain(scale: float, function: Callable[[Tensor], Tensor], own: bool) -> None:
    torch.manual_seed(0)
    findings = find_scale_invariant(Scaled(scale, function), torch.randn(8, 5))
    assert findings["p.weight"].kind == "row"
    assert findings["q.weight"].kind == "none"
    assert ("at the model's own values" in findings["p.weight"].reason) == own


def test_reparametrised_and_pruned_weights_at_zero() -> None:
    torch.manual_seed(0)
    normed = parametrizations.weight_norm(nn.Linear(5, 6))
    nn.init.zeros_(normed.parametrizations.weight.original0)
    spectral = parametrizations.spectral_norm(nn.Linear(6, 6))
    pruned = nn.Linear(6, 6)
    prune.random_unstructured(pruned, "weight", 0.7)
    net = nn.Sequential(normed, nn.Tanh(), spectral, nn.Tanh(), pruned, nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    kinds = {key: f.kind for key, f in find_scale_invariant(net, torch.randn(8, 5)).items() if f.kind != "none"}
    assert kinds == {
        "0.parametrizations.weight.original1": "row",
        "2.parametrizations.weight.original": "tensor",
        "4.weight_orig": "row",
    }


def test_size_of_the_data_does_not_decide() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3))
    torch.manual_seed(0)
    for size in (1e-3, 255.0, 1e6):
        assert find_scale_invariant(net, size * torch.rand(8, 5))["0.weight"].kind == "none"


def test_position_table_at_zero_is_seen() -> None:
    """Patches, plus a table of positions that starts at zero, before a layer norm: not invariant."""
    net = Net(
        lambda s, x: s.head(s.norm(s.patch(x) + s.table.weight).square().mean(dim=1)),
        patch=nn.Linear(5, 64, bias=False),
        table=nn.Embedding(4, 64),
        norm=nn.LayerNorm(64),
        head=nn.Linear(64, 3),
    )
    torch.manual_seed(0)
    for module in (net.table, net.head):
        nn.init.zeros_(module.weight)
    assert find_scale_invariant(net, torch.randn(8, 4, 5))["patch.weight"].kind == "none"


def test_branch_that_is_dropped_at_random_is_seen() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.stem(x)
        return s.head(s.b(h + float(torch.rand(()) < 0.5) * s.a(s.p(h))).relu())

    linear = {name: nn.Linear(6, 6, bias=False) for name in ("stem", "p")}
    net = Net(forward, a=nn.BatchNorm1d(6), b=nn.BatchNorm1d(6), head=nn.Linear(6, 3), **linear)
    for seed in range(5):
        findings = find_scale_invariant(net, torch.randn(8, 6), seed=20 * seed)
        assert findings["stem.weight"].kind == "none"


def test_epsilon_is_seen_through_a_head_of_zeros() -> None:
    """The ε that dominates, as in the test below, where nothing reaches the output at the start."""
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, eps=10.0), nn.Linear(6, 3, bias=False))
    nn.init.zeros_(net[2].weight)
    assert "ε of a norm dominates" in find_scale_invariant(net, torch.randn(8, 5))["0.weight"].reason


def test_parameters_that_are_not_real_stay_euclidean() -> None:
    net, example, _ = build("linear-bn")
    net.register_parameter("counts", nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False))
    net.register_parameter("phases", nn.Parameter(torch.ones(2, 2, dtype=torch.complex64)))
    net.register_parameter("empty", nn.Parameter(torch.ones(0, 2)))
    findings = find_scale_invariant(net, example)
    assert [findings[key].kind for key in ("counts", "phases", "empty", "0.weight")] == ["none", "none", "none", "row"]


def test_values_that_are_not_finite_are_named() -> None:
    net, example, _ = build("linear-bn")
    nn.init.constant_(net[0].weight, float("nan"))
    assert "not finite at the model's own values" in find_scale_invariant(net, example)["0.weight"].reason


def test_masked_logits_hide_no_invariance() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([False, True, False])
    body, example = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(8, 5)
    net = Net(lambda s, x: s.head(s.body(x)).masked_fill(mask, -torch.inf), body=body, head=nn.Linear(4, 3))
    plain = Net(lambda s, x: s.head(s.body(x)).masked_fill(mask, 0.0), body=body, head=net.head)
    found, expected = (find_scale_invariant(n, example) for n in (net, plain))
    assert {key: f.kind for key, f in found.items() if f.kind != "none"} == {"body.0.weight": "row"}
    assert found["body.0.weight"].rescaling == pytest.approx(expected["body.0.weight"].rescaling)
    # what the scale of a weight decides is no mask
    wide = nn.Sequential(nn.Linear(5, 32), nn.BatchNorm1d(32))
    lengths = wide[0].weight.detach().norm(dim=1).median()
    edge = Net(lambda s, x: s.body(x).where(s.body[0].weight.norm(dim=1) > lengths, torch.inf), body=wide)
    assert find_scale_invariant(edge, example)["body.0.weight"].kind == "none"


def test_synchronised_batch_norm_is_probed_on_a_cpu() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.SyncBatchNorm(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3))
    assert find_scale_invariant(net, torch.randn(4, 3, 5, 5))["0.weight"].kind == "row"
    assert type(net[1]) is nn.SyncBatchNorm


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
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, not its parameters, got generator"):
        find_scale_invariant(nn.Linear(2, 2).parameters(), torch.randn(2, 2))


def test_an_example_that_batch_norms_hide_everything_of_is_refused() -> None:
    """Of two values per channel a batch norm makes ±1, of one value 0: gradients before it are rounding errors."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ValueError, match=r"too few samples: batch norm '1' sees two values .* three samples or more"):
        find_scale_invariant(mlp, torch.randn(2, 5))
    assert find_scale_invariant(mlp, torch.randn(3, 5))["0.weight"].kind == "row"

    parts = (nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    cnn = nn.Sequential(*parts, nn.Linear(6, 4), nn.BatchNorm1d(4))
    alike = torch.randn(1, 2, 7, 7).expand(8, -1, -1, -1)
    for example in (torch.zeros(8, 2, 7, 7), torch.ones(8, 2, 7, 7), alike):
        with pytest.raises(ValueError, match=r"\(shapes \[\(8, 2, 7, 7\)\]\) are all alike: batch norm '[16]'"):
            find_scale_invariant(cnn, example)
    with pytest.raises(ValueError, match="are all alike: batch norm '1' sees one value"):
        find_scale_invariant(nn.Sequential(*parts[:3]), torch.zeros(1, 2, 7, 7))


class OnRunningStatistics(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> OnRunningStatistics:
        return super().train(False)


def test_samples_may_be_alike_where_no_batch_norm_hides_anything() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    alike = torch.randn(1, 2, 7, 7).expand(4, -1, -1, -1)
    for example in (alike, alike[:1], torch.randn(2, 2, 7, 7)):  # they have places that differ
        assert find_scale_invariant(layers, example)["0.weight"].kind == "row"
    normed = nn.Sequential(nn.Linear(5, 6, bias=False), nn.LayerNorm(6))
    assert find_scale_invariant(normed, torch.ones(2, 5))["0.weight"].kind == "tensor"
    frozen = nn.Sequential(*normed, OnRunningStatistics(6))
    assert find_scale_invariant(frozen, torch.randn(2, 5))["0.weight"].kind == "tensor"


@dataclass(slots=True)
class Answer:
    logits: Tensor
    hidden: Tensor


def test_outputs_may_be_data_classes_of_any_kind() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    net = Net(lambda s, x: Answer(s.head(s.body(x)), x), body=body, head=nn.Linear(4, 3))
    assert find_scale_invariant(net, torch.randn(8, 5))["body.0.weight"].kind == "row"


@pytest.mark.parametrize(
    "name", ["conv-bn", "residual-pre-activation", "dense-concatenation", "raw-skip", "wrn-16-4", "tied"]
)
def test_structure_never_claims_what_the_probe_denies(name: str) -> None:
    net, _, expected = build(name)
    guesses = guess_from_structure(net)
    claimed = {key for key, f in guesses.items() if f.kind == "row"}
    assert claimed <= set(expected)
    assert all(f.guessed and f.reason.startswith("guess") for f in guesses.values())


class Traceable(nn.Module):
    """A layer before a batch norm, whose weight or bias is used once more."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.enc, self.bn, self.table = use, nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Embedding(6, 5)
        if use == "embedding":
            self.table.weight = self.enc.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.bn(self.enc(self.table(x)))
        if self.use == "decoder":
            return nn.functional.linear(hidden, self.enc.weight.t())
        return hidden * self.enc.bias


@pytest.mark.parametrize("use", ["decoder", "embedding", "bias"])
def test_structure_sees_weights_that_something_else_uses_too(use: str) -> None:
    torch.manual_seed(0)
    net = Traceable(use)
    guess = guess_from_structure(net)["enc.weight"]
    assert guess.reason.endswith("(symbolic trace)")
    assert guess.kind == ("row" if use == "bias" else "none")
    assert (find_scale_invariant(net, torch.arange(6))["enc.weight"].kind == "row") == (use == "bias")


def test_structure_on_an_untraceable_model() -> None:
    body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    net = Net(lambda s, x: s.body(x) if float(x.sum()) > 0 else -s.body(x), body=body)
    finding = guess_from_structure(net)["body.0.weight"]
    assert finding.kind == "row"
    assert "nn.Sequential" in finding.reason
    with pytest.raises(ValueError, match="Identity has none"):
        guess_from_structure(nn.Identity())


def test_structure_compares_channels_with_rows() -> None:
    """A batch norm over the second axis of a sequence does not normalise the outputs of the layer before it."""
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3))
    assert guess_from_structure(net)["0.weight"].kind == "none"
    assert find_scale_invariant(net, torch.randn(8, 4, 5))["0.weight"].kind == "none"


class Cached(nn.Module):
    """Makes a buffer when it first runs, as masks and tables of positions often are made."""

    def __init__(self, *, declared: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.size = 0
        if declared:
            self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.size:
            self.register_buffer("mask", torch.ones(len(x), 1, dtype=x.dtype), persistent=False)
            self.size = len(x)
        return self.norm(self.layer(x)) * self.mask[: len(x)]


@pytest.mark.parametrize("declared", [True, False])
def test_buffers_that_are_made_in_the_forward_pass(declared: bool) -> None:
    torch.manual_seed(0)
    net, x = Cached(declared=declared), torch.randn(8, 4)
    assert find_scale_invariant(net, x)["layer.weight"].kind == "row"
    assert net.size == 0
    opt = MKFAC(net, example_input=x)
    net(x[:4])
    opt.refresh([(x, torch.randint(3, (8,)))], nn.CrossEntropyLoss())
    assert net.size == len(net.mask) == 8
    net(x)


class Fourier(nn.Module):
    """Complex weights between real layers, and complex outputs if wanted."""

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        self.real = real
        self.first, self.norm = nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)
        self.filters = nn.Parameter(torch.randn(3, 3, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.norm(self.first(x)))
        spectrum = torch.einsum("bik,iok->bok", spectrum, self.filters)
        return torch.fft.irfft(spectrum, n=x.shape[-1]) if self.real else spectrum


@pytest.mark.parametrize("real", [True, False])
def test_networks_with_complex_weights_are_probed(real: bool) -> None:
    torch.manual_seed(0)
    found = find_scale_invariant(Fourier(real=real), torch.randn(6, 2, 8))
    assert {n: f.kind for n, f in found.items() if f.kind != "none"} == {"first.weight": "row"}
    assert found["filters"].reason == "complex numbers of shape (3, 3, 5): stays Euclidean"


class Recurrent(nn.Module):
    """Takes a packed sequence, which is a tuple by its type."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head, self.norm = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, sequence: nn.utils.rnn.PackedSequence) -> Tensor:
        return self.norm(self.head(self.rnn(sequence)[1][-1]))


def test_packed_sequences_are_inputs() -> None:
    torch.manual_seed(0)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 7, 4), torch.tensor([7, 5, 2]), batch_first=True)
    for example in (packed, (packed,)):
        opt = MKFAC(Recurrent(), example_input=example)
        assert opt.findings["head.weight"].kind == "row"
        opt.refresh([(example, torch.randint(6, (3,)))], nn.CrossEntropyLoss())
        assert opt.curvature.layers["head.weight"].inverse is not None


def casting(forward: Callable[..., Tensor]) -> nn.Module:
    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(6, 8), norm=nn.BatchNorm1d(8), c=nn.Linear(8, 3))
    net.plain = 0.3 * torch.randn(8, 8)  # neither a parameter nor a buffer
    return net


def upcast_attention(s: Any, x: Tensor) -> Tensor:
    return s.c(s.norm(s.a(x)).to(torch.bfloat16).softmax(1, dtype=torch.float32) @ torch.eye(8))


def written_frequencies(s: Any, x: Tensor) -> Tensor:
    """As Fourier layers are written: low frequencies are put into zeros of a named precision."""
    kept = torch.zeros(len(x), 5, dtype=torch.cfloat)
    kept[:, :3] = torch.fft.rfft(s.norm(s.a(x)))[:, :3] * torch.tensor([1.0, 1.0j, 0.5])
    return s.c(torch.fft.irfft(kept, n=8))


CASTING: dict[str, Callable[..., Tensor]] = {
    "bytes": lambda s, x: s.c(s.norm(s.a(x.float() / 255))),
    "softmax": upcast_attention,
    "attribute": lambda s, x: s.c(s.norm(s.a(x.float())) @ s.plain),
    "literal": lambda s, x: s.c(s.norm(s.a(x)) @ torch.tensor([[1.0, 2.0] * 4] * 8)),
    "checkpoint": lambda s, x: s.c(checkpoint(lambda t: s.norm(s.a(t.float())), x, use_reentrant=False)),
    "frequencies": written_frequencies,
    "complex": lambda s, x: s.c((s.norm(s.a(x)).cfloat() @ s.plain.cfloat()).abs()),
}


@pytest.mark.parametrize("name", list(CASTING))
def test_networks_that_cast_to_float32_are_probed_in_float64(name: str) -> None:
    net = casting(CASTING[name])
    x = torch.randint(256, (16, 6), dtype=torch.uint8) if name == "bytes" else torch.randn(16, 6)
    net(x)
    findings = find_scale_invariant(net, x)
    assert {key: f.kind for key, f in findings.items() if f.kind != "none"} == {"a.weight": "row"}
    assert findings["a.weight"].statistic < 1e-6  # of float64, the ε of norms out of the way


def test_running_statistics_of_networks_that_cast_are_carried_over() -> None:
    net = casting(CASTING["bytes"])
    x = torch.randint(256, (64, 6), dtype=torch.uint8)
    for _ in range(100):
        net(x)
    expected = net.eval()(x)
    MKFAC(net, example_input=x)
    torch.testing.assert_close(net(x), expected, rtol=1e-2, atol=1e-3)


def test_a_network_that_casts_and_rejects_its_input_says_why() -> None:
    with pytest.raises(ValueError, match=r"was rejected by Net in float64 training mode: .*shapes cannot be"):
        find_scale_invariant(casting(CASTING["bytes"]), torch.randn(8, 7))


def test_reentrant_checkpoints_of_an_input_that_requires_gradients_are_seen_through() -> None:
    net = casting(lambda s, x: s.c(checkpoint(lambda t: s.norm(s.a(t)), x, use_reentrant=True)))
    x = torch.randn(16, 6, requires_grad=True)
    assert find_scale_invariant(net, x)["a.weight"].kind == "row"
    assert x.grad is None


class WithLambda(nn.Module):
    """A network that keeps functions of itself among its attributes."""

    def __init__(self, *, in_a_list: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.c = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        first = lambda x: self.norm(self.a(x))  # noqa: E731
        if in_a_list:
            self.steps = [first]
        else:
            self.first = first

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.steps[0](x) if hasattr(self, "steps") else self.first(x))


def with_wrapped_forward(*, inner: bool) -> nn.Module:
    """As tools for mixed precision wrap the forward of a model, and scripts that of a layer."""
    net = casting(lambda s, x: s.c(s.norm(s.a(x))))
    part = net.norm if inner else net
    forward = part.forward

    def wrapper(*args: Any, again: bool = False) -> Tensor:
        return forward(*args) if again else wrapper(*args, again=True)

    part.forward = wrapper  # type: ignore[method-assign]
    return net


def untouched(net: nn.Module, before: dict[str, Tensor]) -> bool:
    same = all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    return same and all(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["lambda", "wrapped", "wrapped layer"])
def test_functions_that_hold_on_to_a_module_do_not_lead_back_to_the_original(kind: str, dtype: torch.dtype) -> None:
    net = WithLambda() if kind == "lambda" else with_wrapped_forward(inner=kind == "wrapped layer")
    x = torch.randn(16, 6, dtype=dtype)
    before = copy.deepcopy(net.to(dtype).state_dict())
    findings = find_scale_invariant(net, x)
    assert {key: f.kind for key, f in findings.items() if f.kind != "none"} == {"a.weight": "row"}
    assert untouched(net, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_that_runs_the_original_is_refused_and_leaves_it_alone(dtype: torch.dtype) -> None:
    net = WithLambda(in_a_list=True).to(dtype)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"WithLambda cannot be copied for the probe: its copy runs parts of the orig"):
        find_scale_invariant(net, torch.randn(16, 6, dtype=dtype))
    assert untouched(net, before)

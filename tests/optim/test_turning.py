"""Rows turned by an angle, at random, further along their last step or towards growing loss, and back to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fisherfold.optim import RowAhead, RowAscent, RowNoise
from fisherfold.optim.turning import turned


@pytest.mark.parametrize("shape", [(5, 7), (4, 3, 3, 3), (3, 2)])
def test_rows_turn_by_the_angle_and_keep_their_length(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w = torch.randn(shape, dtype=torch.float64) * torch.logspace(-3, 3, shape[0], dtype=torch.float64).reshape(
        -1, *(1 for _ in shape[1:])
    )
    moved = turned(w, torch.randn_like(w), 0.3).flatten(1)
    lengths = torch.linalg.vector_norm(w.flatten(1), dim=1)
    torch.testing.assert_close(torch.linalg.vector_norm(moved, dim=1), lengths)
    cosines = (moved * w.flatten(1)).sum(1) / lengths**2
    torch.testing.assert_close(cosines, torch.full_like(cosines, math.cos(0.3)))


def test_directions_have_no_preference() -> None:
    """The mean of turned rows is cos θ · w, their covariance sin² θ ‖w‖²/(d-1) on the tangent space."""
    torch.manual_seed(0)
    w = torch.tensor([3.0, 0.0, 4.0, 0.0], dtype=torch.float64).expand(200_000, 4)
    moved = turned(w, torch.randn_like(w), 0.5)
    torch.testing.assert_close(moved.mean(0), math.cos(0.5) * w[0], atol=0.02, rtol=0)
    tangent = torch.eye(4, dtype=torch.float64) - torch.outer(w[0], w[0]) / 25
    torch.testing.assert_close(torch.cov(moved.T), math.sin(0.5) ** 2 * 25 / 3 * tangent, atol=0.03, rtol=0)


def test_inside_rows_are_turned_and_outside_they_are_what_they_were() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
    before = [p.detach().clone() for p in net.parameters()]
    noise = RowNoise(net.parameters(), 0.2)
    with noise:
        inside = [p.detach().clone() for p in net.parameters()]
    assert [torch.equal(a, b) for a, b in zip(before, inside, strict=True)] == [p.ndim == 1 for p in before]
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    with pytest.raises(KeyError), noise:
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # on importing the compiler
def test_compiled_turns_are_the_plain_ones() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Linear(5, 3)).to(memory_format=torch.channels_last)
    before = [p.detach().clone() for p in net.parameters()]
    inside = []
    for fuse in (False, True):
        torch.manual_seed(1)
        with RowNoise(net.parameters(), 0.3, fuse=fuse):
            inside.append([p.detach().clone() for p in net.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    torch.testing.assert_close(*inside)


def test_rows_that_cannot_turn_stay() -> None:
    """Rows of one entry have no direction to turn to, rows of zero none to turn from."""
    single, dead = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    with RowNoise([single, dead], 0.5):
        assert torch.equal(single, torch.ones(3, 1))
        assert torch.equal(dead[0], torch.zeros(2))
        assert not torch.equal(dead[1], torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("angle", [-0.1, 1.6, math.nan])
def test_angles_that_are_none_are_refused(angle: float) -> None:
    with pytest.raises(ValueError, match="angle must be in"):
        RowNoise([nn.Parameter(torch.ones(2, 2))], angle)


def test_shared_weights_and_steps_inside_the_block() -> None:
    """A weight given twice is put back; what the block would undo is an error, not a step that was never taken."""
    table, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = table.weight
    before = table.weight.detach().clone()
    noise, optimizer = RowNoise([table.weight, head.weight], 0.3), torch.optim.SGD(head.parameters(), lr=0.1)
    with noise:
        head(torch.ones(1, 4)).sum().backward()
    assert torch.equal(table.weight, before)
    with pytest.raises(RuntimeError, match="take the step of the optimizer after the block"), noise:
        optimizer.step()
    assert torch.equal(table.weight, before)
    with pytest.raises(RuntimeError, match="cannot be inside another"), noise, noise:
        pass
    assert torch.equal(table.weight, before)
    with noise:
        assert not torch.equal(table.weight, before)


def test_an_autocast_region_around_the_block_sees_the_turn_and_its_end() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(8, 4), torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = net(x)
        with RowNoise(net.parameters(), 0.5):
            inside = net(x)
        assert not torch.equal(inside, before)
        assert torch.equal(net(x), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [1e-3, 1e3])
def test_half_precision_turns_by_the_angle(dtype: torch.dtype, length: float) -> None:
    """The squares of such rows are below the least, or above the largest, number of float16."""
    torch.manual_seed(0)
    rows = nn.functional.normalize(torch.randn(5, 20, dtype=torch.float64), dim=1)
    weight = nn.Parameter((length * rows).to(dtype))
    before = weight.detach().double()
    with RowNoise([weight], 0.1):
        after = weight.detach().double()
    cosines = nn.functional.cosine_similarity(before, after, dim=1)
    torch.testing.assert_close(cosines.acos(), torch.full_like(cosines, 0.1), rtol=0.05, atol=0)
    torch.testing.assert_close(after.norm(dim=1), before.norm(dim=1), rtol=0.01, atol=0)


def test_only_parameters_are_taken_and_only_real_numbers_turned() -> None:
    net, whole = nn.Linear(3, 2), nn.Parameter(torch.ones(3, 2, dtype=torch.int8), requires_grad=False)
    for given in (net.named_parameters(), [{"params": list(net.parameters())}]):
        with pytest.raises(TypeError, match="params must be parameters, got a"):
            RowNoise(given, 0.1)
    before = net.weight.detach().clone()
    with RowNoise([whole, nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], 0.1), RowNoise(net.weight, 0.1):
        assert not (net.weight == before).any()
        assert torch.equal(whole, torch.ones_like(whole))


@pytest.mark.parametrize("fuse", [False, pytest.param(True, marks=pytest.mark.filterwarnings("ignore:.*torch.jit"))])
def test_rows_go_further_along_their_last_step(fuse: bool) -> None:
    """In the plane of the last two places, beyond the later one by the angle; rows that stayed stay."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, 2, 2, dtype=torch.float64))
    ahead = RowAhead([weight], 0.2, fuse=fuse)
    first = weight.detach().clone()
    with ahead:
        assert torch.equal(weight, first)
    with torch.no_grad():
        weight[:3] += 0.05 * torch.randn(3, 3, 2, 2, dtype=torch.float64)
    second = weight.detach().clone()
    with ahead:
        third = weight.detach().clone()
    assert torch.equal(weight, second)
    assert torch.equal(third[3], first[3])
    for a, b, c in zip(*(w[:3].flatten(1) for w in (first, second, third)), strict=True):
        along = b / b.norm()
        across = (b - a) - along * (along @ (b - a))
        there = b.norm() * (math.cos(0.2) * along + math.sin(0.2) * across / across.norm())
        torch.testing.assert_close(c, there)
    with ahead:  # no step since
        assert torch.equal(weight, second)


def test_a_forgotten_step_is_not_gone_further() -> None:
    weight = nn.Parameter(torch.eye(3))
    ahead = RowAhead([weight], 0.2)
    with torch.no_grad():
        weight += 0.1
    ahead.forget()
    with ahead:
        assert torch.equal(weight, torch.eye(3) + 0.1)


def test_as_far_ahead_as_the_step_is_the_momentum_of_nesterov() -> None:
    """To first order in the step: angles of both are μ times the last one's."""
    torch.manual_seed(0)
    rate, momentum = 1e-4, 0.9
    a = torch.randn(6, 6, dtype=torch.float64)
    ends = []
    for kind in ("ahead", "nesterov", "plain"):
        weight = nn.Parameter(nn.functional.normalize(torch.arange(1.0, 7, dtype=torch.float64), dim=0)[None])
        optimizer = torch.optim.SGD([weight], lr=rate, momentum=momentum)
        ahead = RowAhead([weight], 0.0)
        before = weight.detach().clone()
        for step in range(6):
            optimizer.zero_grad()
            turn = nn.functional.normalize(weight.detach(), dim=1) @ nn.functional.normalize(before, dim=1).T
            ahead.angle = momentum * math.acos(min(1.0, turn.item())) if kind == "ahead" and step else 0.0
            before = weight.detach().clone()
            at = weight - rate * momentum * optimizer.state[weight].get("momentum_buffer", torch.zeros_like(weight))
            if kind == "nesterov":
                unit = nn.functional.normalize(at, dim=1)
                (unit @ a @ unit.T).sum().backward()
            else:
                with ahead:
                    unit = nn.functional.normalize(weight, dim=1)
                    (unit @ a @ unit.T).sum().backward()
            optimizer.step()
        ends.append(weight.detach())
    near, far = (ends[0] - ends[1]).norm(), (ends[2] - ends[1]).norm()
    assert near < 0.02 * far


def test_rows_that_weight_decay_has_only_made_shorter_are_not_turned_along_rounding_errors() -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(6, 50))
    ahead, opt = RowAhead([w], 0.3), torch.optim.SGD([w], lr=0.1, weight_decay=5e-4)
    for _ in range(2):
        with ahead:
            inside = w.detach().clone()
            opt.zero_grad()
            (w[:3] * torch.ones(50)).sum().backward()  # the other rows have no gradient
        before = w.detach().clone()
        opt.step()
    cosines = nn.functional.cosine_similarity(inside.double(), before.double())
    torch.testing.assert_close(cosines[:3], torch.full((3,), math.cos(0.3), dtype=torch.float64))
    assert torch.equal(inside[3:], before[3:])


class Stubborn(RowNoise):
    """Fails, or is interrupted, at the second weight."""

    def _directions(self, weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        if weight is self._weights[1]:
            raise KeyboardInterrupt
        return super()._directions(weight, kept)


def test_rows_are_back_where_the_turning_itself_is_cut_off() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    noise, before = Stubborn(net.parameters(), 0.2), net[0].weight.detach().clone()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), noise:
            pass
        assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize("kind", [RowNoise, RowAhead, RowAscent])
def test_a_model_that_is_cast_after_the_block_was_made_keeps_its_bits(
    kind: type[RowNoise | RowAhead | RowAscent],
) -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 4).bfloat16()
    turns = kind(net.parameters(), 0.2)
    net.float()
    nn.init.normal_(net.weight)
    before = net.weight.detach().clone()
    with turns:
        pass
    assert torch.equal(net.weight, before)
    net.weight.data = torch.randn(4, 6)
    if isinstance(turns, RowAhead):
        turns.forget()
    with turns:
        pass


def angles_between(before: list[torch.Tensor], after: list[torch.Tensor]) -> torch.Tensor:
    """Of all rows: 2 atan2(‖a - b‖, ‖a + b‖), exact for small ones too."""
    found = []
    for a, b in zip(before, after, strict=True):
        unit_a, unit_b = (nn.functional.normalize(w.detach().double().flatten(1), dim=1) for w in (a, b))
        found.append(2 * torch.atan2((unit_a - unit_b).norm(dim=1), (unit_a + unit_b).norm(dim=1)))
    return torch.cat(found)


def ascent_problem() -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)).double()
    with torch.no_grad():
        net[0].weight.mul_(torch.logspace(-1, 1, 5, dtype=torch.float64).reshape(5, 1, 1, 1))
    return net, torch.randn(16, 2, 4, 4, dtype=torch.float64), torch.randint(3, (16,))


def test_no_other_turn_of_the_same_size_makes_the_loss_grow_faster() -> None:
    """The angles have the given root mean square, and the growth of the loss is that of the dense solution."""
    net, x, y = ascent_problem()
    weights = [net[0].weight, net[4].weight]
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    before, gradients = [w.detach().clone() for w in weights], [w.grad.clone() for w in weights]
    theta = 1e-4
    with RowAscent(net.parameters(), theta):
        inside = [w.detach().clone() for w in weights]
        grown = nn.functional.cross_entropy(net(x), y)
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    angles = angles_between(before, inside)
    torch.testing.assert_close(angles.square().mean().sqrt(), torch.tensor(theta, dtype=torch.float64))
    # the slopes in the angles, one orthonormal basis of each row's tangent space after the other
    slopes = []
    for w, g in zip(before, gradients, strict=True):
        for row, slope in zip(w.flatten(1), g.flatten(1), strict=True):
            vectors = torch.cat([row[:, None], torch.randn(len(row), len(row) - 1).double()], dim=1)
            slopes.append((row.norm() * torch.linalg.qr(vectors)[0][:, 1:].T @ slope).norm())
    dense = torch.stack(slopes)
    torch.testing.assert_close(angles, theta * math.sqrt(len(dense)) * dense / dense.norm())
    expected = theta * math.sqrt(len(dense)) * dense.norm()
    torch.testing.assert_close((grown - loss).detach(), expected.detach(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("fuse", [False, pytest.param(True, marks=pytest.mark.filterwarnings("ignore:.*torch.jit"))])
def test_ascent_is_that_of_directions_alone(fuse: bool) -> None:
    """Lengths of rows before a batch norm, and units of the loss, change no angle."""
    net, x, y = ascent_problem()
    turns = []
    for scale, unit in ((1.0, 1.0), (7.0, 1.0), (1.0, 1e-100)):
        with torch.no_grad():
            net[0].weight.mul_(scale)
        net.zero_grad()
        (unit * nn.functional.cross_entropy(net(x), y)).backward()
        before = [net[0].weight.detach().clone(), net[4].weight.detach().clone()]
        with RowAscent(net.parameters(), 0.1, fuse=fuse):
            turns.append(angles_between(before, [net[0].weight, net[4].weight]))
        with torch.no_grad():
            net[0].weight.div_(scale)
    torch.testing.assert_close(turns[1], turns[0], rtol=3e-3, atol=0)  # the batch norm's ε knows lengths
    torch.testing.assert_close(turns[2], turns[0])


def test_rows_without_a_finite_gradient_stay() -> None:
    torch.manual_seed(0)
    lone, led = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5, 4))
    before = led.detach().clone()
    ascent = RowAscent([lone, led], 0.2)
    for gradient in (None, torch.zeros(5, 4), torch.full((5, 4), math.nan), torch.full((5, 4), math.inf)):
        led.grad = gradient
        with ascent:
            torch.testing.assert_close(led.detach(), before, rtol=0, atol=2e-6)
    led.grad = torch.randn(5, 4)
    with ascent:
        turns = angles_between([before], [led])
    torch.testing.assert_close(turns.square().mean().sqrt().item(), 0.2)
    led.grad = torch.zeros(5, 4)
    led.grad[2] = torch.randn(4)
    with RowAscent([led], 1.5):  # one row would turn by more than a half circle
        assert angles_between([before], [led])[2].item() == pytest.approx(math.pi / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [2, 50, 4608])
def test_gradients_along_the_rows_themselves_lead_nowhere(dtype: torch.dtype, columns: int) -> None:
    """What rounding leaves of them orthogonal to the rows is not made an ascent of the whole angle."""
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(6, columns, dtype=torch.float64).to(dtype))
    before = w.detach().clone()
    w.grad = before * torch.rand(6, 1, dtype=torch.float64).to(dtype)  # as of a penalty on lengths, row by row
    with RowAscent([w], 0.2):
        torch.testing.assert_close(w.detach(), before)

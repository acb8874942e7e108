"""PyTorch's helpers for checkpoints of several processes keep ``state`` and ``param_groups`` alone: enough to go on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import OPTIONS, net, run, through_a_file
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from fisherfold.optim import KFAC, MKFAC, SGDG

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import on_ranks  # isort: skip


def make(name: str) -> tuple[nn.Module, Any]:
    kind, options = OPTIONS[name]
    example = {} if kind is KFAC else {"example_input": torch.randn(8, 2, 4, 4)}
    model = net()
    return model, kind(model, **options, **example)


def carry(source: tuple[nn.Module, Any], target: tuple[nn.Module, Any], way: str, folder: Path) -> None:
    """Everything from one model and optimizer to another, as users of these helpers do it."""
    options = StateDictOptions(full_state_dict=way == "full")
    weights, state = get_state_dict(*source, options=options)
    if way == "files":
        checkpoint.save({"weights": weights, "state": state}, checkpoint_id=folder)
        weights, state = get_state_dict(*target, options=options)  # what is read is what has a place here
        checkpoint.load({"weights": weights, "state": state}, checkpoint_id=folder)
    else:
        weights, state = through_a_file(weights), through_a_file(state)
    set_state_dict(*target, model_state_dict=weights, optim_state_dict=state, options=options)


def assert_same_further_steps(*pairs: tuple[nn.Module, Any]) -> None:
    for pair in pairs:
        run(*pair, range(6, 10))
    for mine, theirs in zip(*(model.parameters() for model, _ in pairs), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("way", ["memory", "full", "files"])
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_new_optimizer_goes_on_to_the_bit(name: str, way: str, tmp_path: Path) -> None:
    first, second = make(name), make(name)
    run(*first, range(6))
    carry(first, second, way, tmp_path)
    assert_same_further_steps(first, second)
    assert int(first[1]._age) == int(second[1]._age)


@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_nothing_is_left_of_the_curvature_that_is_replaced(steps: int, tmp_path: Path) -> None:
    """``full_state_dict=True`` mixes a state into the old one: the base of a truncated basis must not stay."""
    model = net()
    first = model, MKFAC(model, damping=0.05, basis="full", example_input=torch.randn(8, 2, 4, 4))
    second = make("capturable")
    run(*first, range(steps))
    run(*second, range(4))
    assert second[1].curvature.layers["5.weight"].inverse.base is not None
    carry(first, second, "full", tmp_path)
    inverse, other = (optimizer.curvature.layers["5.weight"].inverse for _, optimizer in (first, second))
    assert (inverse is None) == (other is None) == (steps == 0)
    if steps:
        assert other.base is None
        assert torch.equal(other.left, inverse.left)


def test_layers_that_are_frozen_are_left_out_and_others_not(tmp_path: Path) -> None:
    first, second = make("kfac on all"), make("kfac on all")
    run(*first, range(2))
    second[0][8].weight.requires_grad_(False)
    carry(first, second, "memory", tmp_path)
    assert second[1].curvature.layers["8.weight"].inverse is None
    assert second[1].curvature.layers["5.weight"].inverse is not None
    _, state = get_state_dict(*first)
    del state["state"]["5.weight"]["curvature"]
    with pytest.raises(ValueError, match=r"only one of the two has curvature for 5.weight"):
        second[1].load_state_dict(state)


@pytest.mark.parametrize("way", ["memory", "full", "files"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_late_starts_and_rows_of_zero_are_gone_on_from(way: str, tmp_path: Path) -> None:
    """A new optimizer has no place for what came later, unless it keeps one from the start."""

    def late(zeros: int) -> tuple[nn.Module, MKFAC]:
        model = net()
        model[0].weight.data[:zeros] = 0.0
        model[5].weight.requires_grad_(False)
        optimizer = MKFAC(model, damping=0.05, balanced=True, example_input=torch.randn(8, 2, 4, 4))
        model[5].weight.requires_grad_(True)
        return model, optimizer

    first, second = late(2), late(0)
    run(*first, range(6))
    carry(first, second, way, tmp_path)
    assert_same_further_steps(first, second)
    # and weights that are still to be put on their spheres are so afterwards
    waiting, loaded = late(0), late(0)
    assert not waiting[1].state[waiting[0][5].weight]  # asked for, and there from now on, with nothing in it
    carry(waiting, loaded, way, tmp_path / "waiting")
    assert loaded[0][5].weight not in loaded[1].state
    run(*loaded, range(1))
    assert float((loaded[0][5].weight.norm(dim=1) - 1).abs().max()) < 1e-6


def test_flattened_states_are_refused() -> None:
    """At the latest when they are loaded, never without a word."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = make("mkfac")
    with pytest.raises(NotImplementedError, match="Flattening optimizer state_dict only supports tensor"):
        get_state_dict(model, optimizer, options=options)
    model, optimizer = make("sgdg")
    assert isinstance(optimizer, SGDG)
    weights, state = get_state_dict(model, optimizer, options=options)
    with pytest.raises(ValueError, match=r"no curvature: .* as flatten_optimizer_state_dict=True does"):
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)


def resume_rank(folder: str) -> list[dict[str, torch.Tensor]]:
    pairs = []
    for _ in range(3):
        wrapped = DistributedDataParallel(net())
        pairs.append((wrapped, MKFAC(wrapped, damping=0.05, euclidean="kfac", example_input=torch.randn(8, 2, 4, 4))))
    run(*pairs[0], range(6))
    carry(pairs[0], pairs[1], "files", Path(folder) / "files")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(*pairs[0], options=options)
    if distributed.get_rank():
        weights, state = {}, {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(pairs[2][0], weights, options=options)
    set_optimizer_state_dict(*pairs[2], state, options=options)
    for pair in pairs:
        run(*pair, range(6, 10))
    return [pair[0].module.state_dict() for pair in pairs]


def test_two_ranks_go_on_from_files_and_from_rank_zero(tmp_path: Path) -> None:
    for uninterrupted, *resumed in on_ranks(2, tmp_path, resume_rank, str(tmp_path)):
        for other in resumed:
            assert all(torch.equal(other[name], value) for name, value in uninterrupted.items())

"""What an engine does with weights after loading them is seen, whatever the operation, and refused unless a sync can
follow it."""
import pytest
import torch
from torch import nn

from mrl.receiver.mrl_receiver.watch import keeping_parameters, require_plain, seen_of, watched

REMEDY = "do this"


class Layer(nn.Module):
    """Stacked experts, or anything else with weights."""

    def __init__(self):
        super().__init__()
        self.w13 = nn.Parameter(torch.arange(24.0).view(2, 4, 3), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(2, 3, 2), requires_grad=False)


def processed(process) -> Layer:
    layer = Layer()
    watched(lambda: process(layer), layer)
    return layer


def refused(layer: Layer, refresh=lambda: None) -> str:
    with pytest.raises(RuntimeError, match=f"{REMEDY}$") as caught:
        require_plain({"experts": seen_of(layer)}, nn.ModuleDict({"experts": layer}), refresh, REMEDY)
    return str(caught.value)


def swap_halves(layer):
    layer.w13.data = torch.cat([layer.w13[:, 2:], layer.w13[:, :2]], 1)


def interleave_in_place(layer):
    for expert in range(2):
        layer.w13.data[expert] = layer.w13.data[expert][torch.tensor([0, 2, 1, 3])]


def transpose_zeros(layer):  # no value tells
    layer.w2 = nn.Parameter(layer.w2.transpose(1, 2).contiguous(), requires_grad=False)


def pack_for_a_kernel(layer):
    packed = layer.w13.to(torch.bfloat16)
    layer.kernel = lambda hidden: hidden @ packed[0].T


def shuffle_into_another(layer):
    layer.shuffled = torch.empty(2, 4, 3)
    layer.shuffled.copy_(layer.w13)


def drop(layer):
    layer.w2 = None


@pytest.mark.parametrize("process, name", [
    (swap_halves, "w13"), (interleave_in_place, "w13"), (transpose_zeros, "w2"), (pack_for_a_kernel, "w13"),
    (shuffle_into_another, "w13"), (drop, "w2")])
def test_weights_that_a_sync_would_not_reach_are_refused(process, name):
    assert f"experts.{name}: the engine rearranges or copies it after loading" in refused(processed(process))


def leave_alone(layer):
    layer.w13.data = layer.w13.data.contiguous()  # is contiguous
    layer.w13.data.copy_(layer.w13.data)
    layer.w2 = nn.Parameter(layer.w2.data, requires_grad=False)
    layer.workspace = torch.empty_like(layer.w2)
    layer.gate = layer.w13[:, :2].transpose(1, 2)  # a view


def test_what_leaves_the_weights_where_they_are_is_fine():
    layer = processed(leave_alone)
    require_plain({"experts": seen_of(layer)}, nn.ModuleDict({"experts": layer}), lambda: None, REMEDY)


def test_what_is_remade_after_every_sync_may_be_computed_from_weights():
    def absorb():
        layer.absorbed = layer.w2.transpose(1, 2) @ layer.w2

    layer = Layer()
    watched(absorb, layer)
    assert "experts.w2" in refused(layer)
    require_plain({"experts": seen_of(layer)}, nn.ModuleDict({"experts": layer}), absorb, REMEDY)


def test_what_was_not_watched_is_refused():
    assert "experts (of 1)" in refused(Layer())


def test_parameters_registered_anew_in_the_same_memory_are_put_back():
    layer = Layer()
    layer.w13.weight_loader, (w13, w2) = "loader", (layer.w13, layer.w2)

    def process():
        layer.w13 = nn.Parameter(layer.w13.data, requires_grad=False)
        layer.kernel = layer.w13

    watched(lambda: keeping_parameters(process, layer), layer)
    require_plain({"": seen_of(layer)}, layer, lambda: None, REMEDY)
    assert layer.w13 is w13 and layer.w13.weight_loader == "loader" and layer.w2 is w2
    layer.w13.fill_(7.0)
    assert (layer.kernel == 7.0).all()


@pytest.mark.parametrize("process, name", [(swap_halves, "w13"), (transpose_zeros, "w2"), (drop, "w2")])
def test_others_are_not_put_back_and_so_refused(process, name):
    assert f"experts.{name}: the engine rearranges" in refused(
        processed(lambda layer: keeping_parameters(lambda: process(layer), layer)))

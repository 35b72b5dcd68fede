"""Tracing finds the loader's copies, changes nothing, and is replayed exactly; what it cannot replay it says."""
import pytest
import torch

from mrl.receiver.mrl_receiver.trace import TraceError, trace, untouched
from mrl.receiver.mrl_receiver.wire import Plan
from tests.receiver.toy import ToyModel, expect, flat_of, parameter, tensors, wire_plan


def routes_of(model, plan: Plan, load=None):
    buffers = [torch.full((bucket.numel,), 7.0, dtype=bucket.torch_dtype) for bucket in plan.buckets]
    routes = [trace(bucket, flat, model, load or model.load_weights) for bucket, flat in zip(plan.buckets, buffers)]
    return routes, buffers


@pytest.mark.parametrize("tp", [1, 2])
def test_replay_is_what_the_loader_does_twice_in_a_row(tp):
    plan = Plan.from_wire(wire_plan())
    for rank in range(tp):
        model = ToyModel(rank, tp)
        before = {name: p.clone() for name, p in model.named_parameters()}
        routes, buffers = routes_of(model, plan)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters()), "tracing wrote something"
        assert [route.reason for route in routes] == [None] * 3 and untouched(model, routes) == []

        def no_loader(_):
            raise AssertionError("the loader ran on the hot path")

        for seed in (1, 2):
            for route, flat in zip(routes, buffers):
                flat.copy_(flat_of(route.bucket, tensors(seed)))
                route.apply(flat, no_loader)
            expect(model, tensors(seed))


def test_lattices_name_the_elements_held():
    routes, _ = routes_of(ToyModel(rank=1, tp=2), Plan.from_wire(wire_plan()))
    homes = {name: [lattice for lattice, _ in found] for route in routes for name, found in route.homes.items()}
    assert homes == {"embed": [(0, (5, 4), (4, 1))], "q": [(12, (2, 6), (6, 1))], "k": [(6, (1, 6), (6, 1))],
                     "norm": [(0, (6,), (1,))]}


@pytest.mark.parametrize("shapes, buckets, words", [
    ({"embed": (4, 5)}, (("embed",),), "embed of shape [4, 5]: AssertionError: vocabulary"),
    ({"norm": (7,)}, (("norm",),), "norm of shape [7]"),
    ({"typo": (3,)}, (("norm", "typo"),), "typo of shape [3]: KeyError"),
])
def test_a_plan_the_loader_refuses_names_the_tensor(shapes, buckets, words):
    with pytest.raises(TraceError) as caught:
        routes_of(ToyModel(), Plan.from_wire(wire_plan(shapes, buckets=buckets)))
    assert words in str(caught.value)


def test_a_narrower_engine_is_refused_and_a_wider_one_is_not():
    with pytest.raises(TraceError, match="embed is sent as torch.float32.*torch.bfloat16 in embed.*model.dtype"):
        routes_of(ToyModel(dtype=torch.bfloat16), Plan.from_wire(wire_plan()))
    routes, _ = routes_of(ToyModel(), Plan.from_wire(wire_plan(dtype="bfloat16")))
    assert [route.reason for route in routes] == [None] * 3


def test_parameters_left_out_are_named():
    model = ToyModel()
    routes, _ = routes_of(model, Plan.from_wire(wire_plan(buckets=(("embed", "q", "k"),))))
    assert untouched(model, routes) == ["norm"]


class Transposing(torch.nn.Module):
    """A loader that stores a transposed copy: not a copy of the buffer, so it must not be replayed as one."""

    def __init__(self):
        super().__init__()
        self.weight = parameter(6, 4)

    def load_weights(self, named):
        for _, tensor in named:
            self.weight.data.copy_(tensor.t().contiguous())


class Adding(Transposing):
    def load_weights(self, named):
        for _, tensor in named:
            self.weight.data.zero_()
            self.weight.data.add_(tensor.t())


@pytest.mark.parametrize("model, words", [(Transposing(), "converts what it copies to weight"), (Adding(), "add_")])
def test_what_is_not_a_copy_stays_on_the_loader(model, words):
    plan = Plan.from_wire(wire_plan(buckets=(("q",),)))
    (route,), (flat,) = routes_of(model, plan)
    assert words in route.reason
    assert untouched(model, [route]) == []
    for seed in (1, 2):
        flat.copy_(flat_of(plan.buckets[0], tensors(seed)))
        route.apply(flat, model.load_weights)
        assert torch.equal(model.weight, tensors(seed)["q"].t())


def test_a_transposing_view_is_a_copy_with_other_strides():
    class Viewing(Transposing):
        def load_weights(self, named):
            for _, tensor in named:
                self.weight.data.copy_(tensor.t())

    (route,), _ = routes_of(Viewing(), Plan.from_wire(wire_plan(buckets=(("q",),))))
    assert route.reason is None and [lattice for lattice, _ in route.homes["q"]] == [(0, (6, 4), (1, 6))]


def test_malformed_plans():
    wire = wire_plan()
    wire["buckets"][1]["items"][0]["name"] = "q"
    with pytest.raises(ValueError, match="q occurs twice"):
        Plan.from_wire(wire)
    wire = wire_plan()
    wire["buckets"][0]["items"][0]["numel"] = 21
    with pytest.raises(ValueError, match="embed of shape .* does not fit"):
        Plan.from_wire(wire)

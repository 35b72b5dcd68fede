"""Boxes of tensors end up exactly where the loader would have put them, however the tensors are cut."""
from itertools import product
from math import prod

import pytest
import torch

from mrl.receiver.mrl_receiver.routes import Routes, intersect, misfits
from mrl.receiver.mrl_receiver.trace import trace
from mrl.receiver.mrl_receiver.wire import Part, Plan
from tests.receiver.toy import EXPERTS, Draft, ToyMoe, flat_of, mixed_plan, rows, tensors
from tests.receiver.test_trace import Weight, kinds


def boxes(shape):
    """Some boxes of a tensor, the whole one among them."""
    sides = [[(0, size), (0, max(1, size // 2)), (size // 3, size - size // 4), (size - 1, size)] for size in shape]
    return product(*sides)


VIEWS = {
    "rows": lambda t: t[2:5], "columns": lambda t: t[:, 3:7], "transposed": lambda t: t.t(),
    "rows in heads": lambda t: t.view(4, 3, 8)[:, 1:], "every second row": lambda t: t[1::2],
    "heads side by side": lambda t: t.view(4, 3, 8).transpose(0, 1), "cells": lambda t: t.view(12, 4, 2)[3:, 1],
    "one row": lambda t: t[4], "one element": lambda t: t[4, 5], "flat": lambda t: t.view(-1)[:16],
}


@pytest.mark.parametrize("what", VIEWS)
def test_an_intersection_has_each_shared_element_once(what):
    tensor = torch.arange(96).view(12, 8)
    view = VIEWS[what](tensor)
    lattice = (view.storage_offset(), tuple(view.shape), tuple(view.stride()))
    for box in boxes((12, 8)):
        part = Part("t", (12, 8), box, 0)
        inside = tensor[tuple(slice(*span) for span in box)]
        flat = inside.clone(memory_format=torch.contiguous_format).view(-1)
        blocks = intersect(lattice, part)
        if blocks is None:
            assert what == "flat"
            continue
        found = torch.full(view.shape, -1)
        for block in blocks:
            source = flat.as_strided(block.shape, block.strides, block.start)
            assert (found[block.index] == -1).all(), "an element came twice"
            found[block.index] = source
        shared = torch.isin(view, inside)
        assert torch.equal(found, torch.where(shared, view, -1))
        assert sum(prod(block.shape) for block in blocks) == int(shared.sum())


def apply_all(plan: Plan, worker: int, model, seeds=(1, 2)):
    """Every bucket of `worker`, twice over, through a ring of two; yields the values after each time."""
    traced = trace(plan.tensor_kinds, model, model.load_weights)
    buckets = plan.of_worker(worker)
    ring = [torch.empty(max(b.numel for b in buckets)) for _ in range(2)]
    slots = [ring[i % 2][:b.numel] for i, b in enumerate(buckets)]
    routes = Routes(buckets, traced, model.load_weights)
    arrivals = [routes.arrival(position, flat) for position, flat in enumerate(slots)]
    for seed in seeds:
        values = tensors(seed)
        for position, bucket in enumerate(buckets):
            for place, one in enumerate(bucket.slices):
                start = place * bucket.slice_numel
                slots[position][start:start + one.numel] = flat_of(one, values, torch.float32)
            routes.apply(position, arrivals[position])
            slots[position].fill_(float("nan"))
        assert not routes.staging
        yield values


@pytest.mark.parametrize("cut", [2, 3, 5])
def test_a_lattice_that_no_box_cuts_is_staged_and_then_copied(cut):
    model = Weight(lambda weight, tensor: weight.copy_(tensor.reshape(-1)[:20].view(4, 5)), 4, 5)
    draft = Draft()
    draft.add("broadcast", [("q", rows(0, cut % 4, 6))]).add("broadcast", [("q", rows(cut % 4, 4, 6))])
    for values in apply_all(Plan.from_wire(draft.wire()), 0, model):
        assert torch.equal(model.weight, values["q"].reshape(-1)[:20].view(4, 5))


def test_shards_that_do_not_fit_are_named():
    plan = Plan.from_wire(mixed_plan())
    model = ToyMoe(0, 2)
    traced = trace(plan.tensor_kinds, model, model.load_weights)
    assert misfits(plan, 0, traced) == {}
    other = misfits(plan, 1, traced)  # what worker 1 gets is not what worker 0 holds
    assert other.keys() == {"q", "k", "o", *EXPERTS}
    assert "worker 1: it holds a block of 12 elements and is sent 0 of them" == other["q"]
    assert "worker 1: it is sent 24 elements and holds 0" == other["experts.3.up"]


def test_opaque_and_repeated_shards_do_not_fit():
    draft = Draft(workers=2, node=2)
    draft.add("direct", ["flipped", ("q", rows(0, 2, 6))], worker=0).add("direct", [("q", rows(1, 2, 6))], worker=0)
    plan = Plan.from_wire(draft.wire())
    model = ToyMoe(0, 2)
    traced = trace(kinds({"flipped": (3, 5), "q": (4, 6)}), model, model.load_weights)
    found = misfits(plan, 0, traced)
    assert "converts" in found["flipped"] and "some elements twice" in found["q"]

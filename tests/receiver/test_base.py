"""Changes applied to what a worker reads back of its own parameters: as a full sync leaves them, to the last bit.

The toy's loaders pad, fuse, transpose, and wait for each other; its plan cuts tensors over slices and buckets.
"""
import pytest
import torch

from mrl.receiver.mrl_receiver import transports
from mrl.receiver.mrl_receiver.base import Base, shared_names
from mrl.receiver.mrl_receiver.delta import WHOLE
from mrl.receiver.mrl_receiver.receive import Receiver, Refused
from mrl.receiver.mrl_receiver.trace import trace
from mrl.receiver.mrl_receiver.wire import Plan
from tests.receiver.memory import Hub
from tests.receiver.senders import Senders, sync
from tests.receiver.test_trace import kinds
from tests.receiver.toy import SHAPES, Draft, ToyMoe, mixed_plan, rows, tensors, wire_plan

NAN_BITS = 0x7FA1
"""A NaN of bfloat16 that is quieted, and loses its payload, when it goes through another dtype."""


class PaddedFirst(ToyMoe):
    """Fills all of a parameter before it copies any part of it."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            self.embed.data.fill_(0)
        super().load_one(name, tensor)


class TiedTwice(ToyMoe):
    """Two tensors end in the same place, and the later one stays."""

    def load_weights(self, named) -> None:
        super().load_weights(("base", tensor) if name == "head" else (name, tensor) for name, tensor in named)


def wire_in(dtype: str) -> dict:
    return {**mixed_plan(), "buckets": [{**bucket, "dtype": dtype} for bucket in mixed_plan()["buckets"]]}


def split_embedding() -> dict:
    """The embedding comes in two buckets."""
    draft = Draft(workers=2)
    draft.add("broadcast", [("embed", rows(0, 2, 4))]).add("broadcast", [("embed", rows(2, 5, 4))])
    return draft.add("broadcast", [name for name in SHAPES if name != "embed"]).wire()


def tied_twice() -> dict:
    return wire_plan({"head": (4, 3)}, buckets=(("base",), ("head",), [name for name in SHAPES if name != "base"]),
                     workers=2)


def values_of(wire: dict, step: int, before: dict | None = None) -> dict[str, torch.Tensor]:
    """New tensors, or those before with one element in seven changed, in each at other places."""
    dtype = getattr(torch, wire["buckets"][0]["dtype"])
    new = {name: tensor.to(dtype) for name, tensor in {**tensors(step), "head": torch.randn(4, 3)}.items()}
    if before is None:
        return new
    return {name: torch.where(((torch.arange(old.numel()) + number) % 7 == step).view(old.shape), new[name], old)
            for number, (name, old) in enumerate(before.items())}


@pytest.mark.parametrize("make_model, wire", [(ToyMoe, mixed_plan()), (ToyMoe, wire_in("bfloat16")),
                                              (PaddedFirst, split_embedding()), (TiedTwice, tied_twice())])
def test_changes_leave_every_parameter_as_a_full_sync_does(monkeypatch, make_model, wire):
    monkeypatch.setitem(transports.TRANSPORTS, "unkind", Hub().connect)
    changing, full = Senders(wire, "unkind"), Senders(wire, "unkind")
    ends = {}
    for senders in (changing, full):
        models = [make_model(rank, 2) for rank in range(2)]
        ends[senders] = [Receiver(model, model.load_weights, "run", 0, 1, rank, 2, model.refresh)
                         for rank, model in enumerate(models)]
    values = values_of(wire, 0)
    if wire["buckets"][0]["dtype"] == "bfloat16":
        for tensor in values.values():
            tensor.view(torch.int16).view(-1)[0] = NAN_BITS
    for step in range(1, 5):
        base = None if step == 1 else step - 1
        outcomes = [*sync(changing, ends[changing], changing.request(step, delta=True, base=base), values),
                    *sync(full, ends[full], full.request(step), values)]
        assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        assert (set(changing.kinds) == {WHOLE}) == (step == 1), changing.kinds
        for one, other in zip(ends[changing], ends[full]):
            theirs = dict(other.model.named_parameters())
            for name, parameter in one.model.named_parameters():
                assert torch.equal(parameter.view(torch.int32), theirs[name].view(torch.int32)), f"{name}, {step}"
            if make_model is ToyMoe:
                assert torch.equal(one.model.absorbed.view(torch.int32), other.model.absorbed.view(torch.int32))
        values = values_of(wire, step, values)


def test_only_what_cannot_be_read_back_is_kept():
    plan = Plan.from_wire(mixed_plan())
    model = ToyMoe(0, 2)
    traced = trace(kinds(SHAPES), model, model.load_weights)
    buckets = plan.of_worker(0)
    base = Base(buckets, [torch.empty(bucket.numel) for bucket in buckets], traced)
    assert base.nbytes == 4 * sum(torch.Size(SHAPES[name]).numel() for name in ("flipped", "pair.a", "pair.b"))
    assert shared_names(traced) == set()


def test_tensors_that_share_elements_are_found():
    model = TiedTwice()
    assert shared_names(trace(kinds({**SHAPES, "head": (4, 3)}), model, model.load_weights)) == {"base", "head"}


def test_changes_since_another_push_than_the_one_in_place_are_refused():
    senders, model = Senders(wire_plan()), ToyMoe()
    receiver = Receiver(model, model.load_weights, "run", 0, 1, 0, 1)
    request = senders.request(1, delta=True, base=0)
    receiver.prepared, receiver.prepared_link = object(), request.link
    with pytest.raises(Refused, match="changes since push 0 are of no use: push None is in place"):
        receiver.receive(request)
    receiver.held, receiver.dirty = 0, False
    receiver.forget()  # the weights, as an engine goes to sleep
    with pytest.raises(Refused, match="changes since push 0 are of no use: push None is in place"):
        receiver.receive(request)
    assert receiver.dirty

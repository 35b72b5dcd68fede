"""The proof finds the shards that would not do what the engine's loader does, and leaves the rest alone."""
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mrl.receiver.mrl_receiver.receive import Receiver
from tests.receiver.senders import Senders, sync
from tests.receiver.toy import ToyMoe, expect, mixed_plan, tensors


def proof_of(model: ToyMoe, rank: int = 0) -> tuple[Receiver, Senders, dict]:
    senders = Senders(mixed_plan())
    receiver = Receiver(model, model.load_weights, "run", 0, 1, rank, 2, model.refresh)
    request = senders.request(1)
    reply = receiver.prepare(request)
    assert reply["not_sharded"] == {} and not reply["proven"]
    return receiver, senders, receiver.prove(request)["not_sharded"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_of_copies_passes_and_need_not_do_so_again(rank):
    model = ToyMoe(rank, 2)
    padding = model.embed[5:]
    padding.fill_(0.25)
    receiver, senders, wrong = proof_of(model, rank)
    assert wrong == {} and receiver.dirty and not padding.any()
    assert receiver.prepare(senders.request(1, link="again"))["proven"]
    assert torch.equal(model.absorbed, model.base.t() * 2) and torch.equal(model.table, torch.arange(4.0))


class Blind(ToyMoe):
    """A loader that writes some of `o` behind the tracer's back."""

    def load_weights(self, named):
        named = list(named)
        super().load_weights(named)
        if "o" in dict(named) and _get_current_dispatch_mode() is None:
            self.o.data[0] += 1


class Stateful(ToyMoe):
    """What is derived depends on more than the weights: on how they came."""

    def refresh(self) -> None:
        super().refresh()
        self.refreshed = getattr(self, "refreshed", 0) + 1
        self.extra = [torch.full((2,), float(self.refreshed))]


def test_what_differs_names_the_shards_behind_it():
    _, _, wrong = proof_of(Blind(0, 2))
    assert wrong == {"o": "worker 0: o would differ from what the engine's loader makes of it"}


def test_a_derived_tensor_that_differs_concerns_all_shards_of_its_module():
    receiver, _, wrong = proof_of(Stateful(0, 2))
    assert wrong.keys() == receiver.prepared.plan.direct & receiver.traced.homes.keys()
    assert set(wrong.values()) == {"worker 0: extra.0 would differ from what the engine's loader makes of it"}


def test_what_the_loader_never_writes_is_left_as_it_was_and_syncs_follow():
    class Padded(ToyMoe):
        def load_one(self, name, tensor):
            if name == "embed":
                self.embed.data[:5].copy_(tensor)
            else:
                super().load_one(name, tensor)

    models = [Padded(rank, 2) for rank in range(2)]
    for model in models:
        model.embed[5:].zero_()
    senders = Senders(mixed_plan())
    receivers = [Receiver(m, m.load_weights, "run", 0, 1, rank, 2, m.refresh) for rank, m in enumerate(models)]
    for step in (1, 2):
        outcomes = sync(senders, receivers, senders.request(step), tensors(step))
        assert all(isinstance(outcome, dict) for outcome in outcomes), outcomes
        for model in models:
            expect(model, tensors(step))

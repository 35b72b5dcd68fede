"""Run by torchrun: a gang pushes to toy engines that live in rank 0, by every strategy from every layout it is given.

Arguments: a JSON file with {"models": {name: model directory}, "cases": [[model, layout, workers, workers on a node,
tensor that the engines hold otherwise than planned or ""]], "delta": sync.delta, "fp8": whether engines get fp8,
"transport": "gloo", or "cuda_ipc" for engines on the ranks' own GPUs, all workers together as many as ranks; then TCP
stands in for the GPUs}. Prints CASE and a JSON object for every case and strategy; asserts, on the way, what must hold
for all of them. Every buffer is poisoned as soon as it may be used again.
"""
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import pytest
import torch
import torch.distributed as dist

from mrl.engine.api import Version
from mrl.receiver.mrl_receiver.gloo import GlooTransport
from mrl.receiver.mrl_receiver.links import PendingAll
from mrl.receiver.mrl_receiver.transports import TRANSPORTS
from mrl.reshard.layout import Layout
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.gather import Gatherer
from mrl.stream.sync import WeightSync
from tests.receiver.poison import poison, poison_transport
from tests.stream.engines import RUN_ID
from tests.stream.tiny import FakeTrainer, make_experiment, quantised, weights
from tests.stream.toys import ToyEngine, ToyModel

ENGINES = 2
BUCKET_MB = 0.04
BUCKET_MB_FP8 = 0.3  # blocks have room in it


def poison_used_buffers() -> None:
    """Whatever was sent, packed or put in place is overwritten: nobody may still need it."""
    for transport in ("gloo", "cuda_ipc"):
        poison_transport(pytest.MonkeyPatch(), transport)
    fill = Gatherer.fill

    def poisoned_fill(gatherer, share):
        fill(gatherer, share)
        poison(gatherer.packed)
        poison(gatherer.gathered)
        poison(gatherer.weights)

    Gatherer.fill = poisoned_fill


class WithinGpus(GlooTransport):
    """Senders reach only the worker with their own place among the workers: the one on their GPU."""

    lending = False  # workers borrow
    lent = gathered = 0  # slices that rank 0 did not gather, and did

    def send(self, flat, peer, deadline, label=None):
        assert peer == self.world_size // 2 + self.rank, f"sender {self.rank} has no GPU with rank {peer} in common"
        WithinGpus.gathered += 1
        return self._send([flat], peer, deadline) if self.lending else super().send(flat, peer, deadline, label)

    def lend(self, held, peer, deadline):
        WithinGpus.lent += 1
        return self._send([torch.frombuffer(bytearray(held.description), dtype=torch.uint8),
                           *(torch.empty(0, dtype=torch.uint8).set_(storage) for storage in held.storages)],
                          peer, deadline)

    def _send(self, memory, peer, deadline):
        sizes = torch.zeros(MOST_STORAGES, dtype=torch.int64)
        sizes[:len(memory)] = torch.tensor([one.nbytes for one in memory])
        return PendingAll([super(WithinGpus, self).send(one, peer, deadline) for one in (sizes, *memory)])

    def borrow(self, nbytes, peer, deadline):
        return Borrowing(self, nbytes, peer)

    def let_go(self):
        pass


MOST_STORAGES = 100


@dataclass
class Borrowing:
    """Memory of one's own in the place of a GPU's that both see."""

    transport: WithinGpus
    nbytes: int
    peer: int

    def wait(self, deadline):
        def receive(size, dtype=torch.uint8):
            self.transport.receive(flat := torch.empty(size, dtype=dtype), self.peer, deadline).wait(deadline)
            return flat

        description, *memory = [receive(size) for size in receive(MOST_STORAGES, torch.int64).tolist() if size]
        if not memory:
            return Lent(description)
        return Lent(None, bytes(description.tolist()), tuple(one.untyped_storage() for one in memory))


@dataclass
class Lent:
    flat: Optional[torch.Tensor]
    description: bytes = b""
    storages: tuple = ()
    made: dict = field(default_factory=dict)

    def give_back(self):
        pass


def partitions(transport: str, workers: int) -> dict:
    if transport == "cuda_ipc":
        return {"loop": {"mode": "colocated_sync"},
                "cluster": {"trainer_gpus": None, "rollout_gpus": None, "gpus": dist.get_world_size()}}
    return {"cluster": {"rollout_gpus": ENGINES * workers}}


def engines_for(experiment, model: Path, workers: int, replicated: str) -> list[ToyEngine]:
    kv_heads, tensors = model_spec(read_config(model)).kv_heads, published(experiment, weights(model, 1))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def make_model(worker: int, workers: int) -> ToyModel:
        return ToyModel(shapes, kv_heads, worker, workers, replicated, dtypes)

    return [ToyEngine(experiment, index, make_model, workers) for index in range(experiment.engine_count)]


def published(experiment, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the engines must hold of these tensors."""
    return quantised(Path(experiment.model.path), tensors) if experiment.rollout.quantization else tensors


def holding(sync: WeightSync, engines: list[ToyEngine], tensors: dict[str, torch.Tensor]) -> list[bool]:
    """By engine, whether it holds what it must of these tensors."""
    expected = published(sync.experiment, tensors) if engines else {}
    return [engine.holds(expected) for engine in engines]


def run_case(case: list, strategy: str, order: dict) -> None:
    name, sizes, workers, node, replicated = case
    model, rank, delta, transport, fp8 = Path(order["models"][name]), dist.get_rank(), *(
        order[key] for key in ("delta", "transport", "fp8"))
    placed = partitions(transport, workers)
    placed["cluster"]["gpus_per_node"] = node
    experiment = make_experiment(
        model, "python", sync={"timeout_s": 300, "strategy": strategy, "verify_every": 0, "delta": delta,
                              "bucket_mb": BUCKET_MB_FP8 if fp8 else BUCKET_MB, "transport": transport},
        rollout={"parallel": {"tp": workers}, "quantization": "fp8" if fp8 else None}, **placed)
    WithinGpus.lending = transport == "cuda_ipc" and workers == 1 and not delta
    WithinGpus.lent = WithinGpus.gathered = 0
    layout = Layout(**sizes)
    trainer = FakeTrainer(model, layout, layout.coord(rank))
    engines = engines_for(experiment, model, workers, replicated) if rank == 0 else []
    sync = WeightSync(experiment, trainer, engines, RUN_ID)
    (push_changes if delta else push_three_times)(sync, trainer, engines)
    check_memory(sync)
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, sorted(sync.plan.options.not_sharded))
    assert everyones == [everyones[0]] * len(everyones), "ranks go by different plans"
    if rank == 0:
        senders = {sender for engine in range(len(engines)) for sender in sync.plan.senders(engine)}
        print("CASE", json.dumps({
            "case": case, "strategy": sync.plan.strategy, "not_sharded": everyones[0], "senders": len(senders),
            "modes": sorted({bucket.mode for bucket in sync.plan.outline}), "lent": WithinGpus.lent,
            "gathered": WithinGpus.gathered}), flush=True)
    sync.close()
    dist.barrier()
    for engine in engines:
        engine.stop()


def push_three_times(sync: WeightSync, trainer: FakeTrainer, engines: list[ToyEngine]) -> None:
    """To all engines, again, and to the last one alone."""
    count = sync.experiment.engine_count
    for step in (1, 2, 3):
        tensors = weights(trainer.model, step)
        trainer.become(tensors)
        targets = engines if step < 3 else engines[-1:]
        for engine in targets:
            engine.scramble()
        report = sync.push(Version(0, step), None if step < 3 else [count - 1])
        assert report.ok and report.verified == (step == 1) and not report.unverified, report
        assert len(report.errors) == (count if step < 3 else 1), report
        assert step == 3 or report.bytes == sum(sync.plan.bytes_by_sender.values()), report
        assert all(holding(sync, targets, tensors))
    assert all(holding(sync, engines[:-1], weights(trainer.model, 2))), "not asked, but touched"


def push_changes(sync: WeightSync, trainer: FakeTrainer, engines: list[ToyEngine]) -> None:
    """Everything, then one element in fifty twice to all engines, then to the last one alone and again to all."""
    tensors = weights(trainer.model, 1)
    for step in (1, 2, 3, 4, 5):
        for name, new in weights(trainer.model, step).items() if step > 1 else ():
            tensors[name].view(-1)[step::50] = new.view(-1)[step::50]
        trainer.become(tensors)
        report = sync.push(Version(0, step), [sync.experiment.engine_count - 1] if step == 4 else None)
        assert report.ok and report.verified == (step < 3), report
        full = step == 1 or step == 5 and sync.plan.strategy == "broadcast"  # where engines share the buckets
        assert report.sent_fraction > 1 if full else report.sent_fraction < 0.15, report
        assert all(holding(sync, engines[step == 4:], tensors))
    for engine in engines:
        engine.scramble()
    report = sync.push(Version(0, 6))
    assert report.ok and not any(holding(sync, engines, tensors)), "more than changes were sent"


def check_memory(sync: WeightSync) -> None:
    """Ring and staging of this rank stay within what docs/weight_sync.md promises."""
    bucket, buffers = sync.settings.bucket_mb * 2**20, sync.settings.buffers
    if sync.gatherer is not None:
        assert sync.gatherer.nbytes <= (buffers + 2) * bucket + 16 * (buffers + 3), sync.gatherer.nbytes
        assert sync.plan.options.fp8 or not sync.gatherer.weights.numel()
        assert sum(room.nbytes for room in sync.gatherer.ring) <= buffers * (bucket + 16)


def main(path: str) -> None:
    order = json.loads(Path(path).read_text())
    dist.init_process_group("gloo")
    TRANSPORTS["cuda_ipc"] = WithinGpus
    poison_used_buffers()
    strategies = ("auto",) if order["transport"] == "cuda_ipc" else ("broadcast", "multi_sender", "sharded")
    for case in order["cases"]:
        for strategy in strategies:
            run_case(case, strategy, order)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

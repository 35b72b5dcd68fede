"""Run by torchrun: a gang pushes to toy engines that live in rank 0, by every strategy from every layout it is given.

Arguments: a JSON file with {"models": {name: model directory}, "cases": [[model, layout, workers, workers on a node]]}.
Prints CASE and a JSON object for every case and strategy; asserts, on the way, what must hold for all of them. Every
buffer is poisoned as soon as it has been used.
"""
import json
import sys
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

from mrl.engine.api import Version
from mrl.receiver.mrl_receiver.routes import Routes
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors
from mrl.reshard.spec import model_spec, read_config
from mrl.stream import sync as sync_module
from mrl.stream.gather import Gatherer
from mrl.stream.links import Links
from mrl.stream.sync import WeightSync
from tests.stream.engines import RUN_ID
from tests.stream.tiny import FakeTrainer, make_experiment, weights
from tests.stream.toys import ToyEngine, ToyModel

ENGINES = 2
BUCKET_MB = 0.04
NAN = float("nan")


def poison_used_buffers() -> None:
    """Whatever was sent, packed or put in place is overwritten at once: nobody may still need it."""
    start, finish, fill, init, apply = Links.start, Links.finish, Gatherer.fill, Routes.__init__, Routes.apply
    under_way: deque[torch.Tensor] = deque()

    def poisoned_start(links, engines, flat, *arguments):
        under_way.append(flat)
        return start(links, engines, flat, *arguments)

    def poisoned_finish(links, transfers, deadline):
        finish(links, transfers, deadline)
        under_way.popleft().fill_(NAN)

    def poisoned_fill(gatherer, share):
        fill(gatherer, share)
        gatherer.packed.fill_(0xFF)
        gatherer.gathered.fill_(0xFF)

    def keep_slots(routes, buckets, slots, *arguments):
        init(routes, buckets, slots, *arguments)
        routes.to_poison = slots

    def poisoned_apply(routes, position):
        apply(routes, position)
        routes.to_poison[position].fill_(NAN)

    Links.start, Links.finish, Gatherer.fill = poisoned_start, poisoned_finish, poisoned_fill
    Routes.__init__, Routes.apply = keep_slots, poisoned_apply


def engines_for(experiment, model: Path, workers: int) -> list[ToyEngine]:
    spec = model_spec(read_config(model))
    shapes = dict(hf_tensors(spec))

    def make_model(worker: int, workers: int) -> ToyModel:
        return ToyModel(shapes, spec.kv_heads, worker, workers)

    return [ToyEngine(experiment, index, make_model, workers) for index in range(ENGINES)]


def push_twice(case: list, strategy: str, models: dict[str, str]) -> None:
    name, sizes, workers, node = case
    model, rank = Path(models[name]), dist.get_rank()
    experiment = make_experiment(
        model, "python", sync={"timeout_s": 60, "strategy": strategy, "bucket_mb": BUCKET_MB, "verify_every": 0},
        rollout={"parallel": {"tp": workers}}, cluster={"rollout_gpus": ENGINES * workers})
    sync_module.engine_layout = lambda _: EngineLayout("vllm", ENGINES, tp=workers, gpus_per_node=node)
    layout = Layout(**sizes)
    trainer = FakeTrainer(model, layout, layout.coord(rank))
    engines = engines_for(experiment, model, workers) if rank == 0 else None
    sync = WeightSync(experiment, trainer, engines, RUN_ID)
    for step in (1, 2):
        trainer.become(weights(model, step))
        for engine in engines or []:
            engine.scramble()
        report = sync.push(Version(0, step))
        assert report.ok and report.verified == (step == 1) and not report.unverified, report
        assert report.strategy == strategy
        for engine in engines or []:
            assert engine.holds(weights(model, step)), f"{case} {strategy}: engine {engine.gate._index}"
    check_memory(sync)
    senders = len({sender for engine in range(ENGINES) for sender in sync.plan.senders(engine)})
    modes = sorted({bucket.mode for bucket in sync.plan.outline})
    assert report.bytes == sum(sync.plan.bytes_by_sender.values()), report
    if rank == 0:
        print("CASE", json.dumps({"case": case, "strategy": strategy, "senders": senders, "modes": modes}), flush=True)
    sync.close()
    dist.barrier()
    for engine in engines or []:
        engine.stop()


def check_memory(sync: WeightSync) -> None:
    """Ring and staging of this rank stay within what docs/weight_sync.md promises."""
    bucket, buffers = BUCKET_MB * 2**20, sync.settings.buffers
    if sync.gatherer is not None:
        assert sync.gatherer.nbytes <= (buffers + 2) * bucket + 16 * (buffers + 2), sync.gatherer.nbytes
        assert sum(room.nbytes for room in sync.gatherer.ring) <= buffers * (bucket + 16)


def main(path: str) -> None:
    order = json.loads(Path(path).read_text())
    dist.init_process_group("gloo")
    poison_used_buffers()
    for case in order["cases"]:
        for strategy in ("broadcast", "multi_sender", "sharded"):
            push_twice(case, strategy, order["models"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

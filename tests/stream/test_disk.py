"""Pushes over files: that they arrive, that no file outlives its push, and a disk that is full.

Every buffer turns to garbage as soon as the transport says that it may be used again.
"""
import errno

import pytest

from mrl.engine.api import Version
from mrl.receiver.mrl_receiver import disk
from mrl.reshard.layout import Layout
from mrl.reshard.params import hf_tensors
from mrl.reshard.spec import model_spec, read_config
from mrl.stream.calls import EngineCalls
from mrl.stream.sync import WeightSync
from tests.receiver.poison import poison_transport
from tests.stream.engines import RUN_ID
from tests.stream.tiny import FakeTrainer, make_experiment, weights
from tests.stream.toys import ToyEngine, ToyModel

WORKERS, ENGINES = 2, 2


def files(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


class Gang:
    """One rank and its engines, joined by a directory."""

    def __init__(self, model, folder, strategy: str):
        spec = model_spec(read_config(model))
        shapes = dict(hf_tensors(spec))
        experiment = make_experiment(
            model, "python", cluster={"rollout_gpus": ENGINES * WORKERS}, rollout={"parallel": {"tp": WORKERS}},
            sync={"timeout_s": 300, "strategy": strategy, "transport": "disk", "bucket_mb": 0.05, "verify_every": 1})
        self.model, self.trainer = model, FakeTrainer(model, Layout(), Layout().coord(0))
        self.engines = [ToyEngine(experiment, index, lambda worker, workers: ToyModel(
            shapes, spec.kv_heads, worker, workers), WORKERS) for index in range(ENGINES)]
        self.sync = WeightSync(experiment, self.trainer, self.engines, RUN_ID, folder=folder)

    def push(self, step: int):
        self.trainer.become(weights(self.model, step))
        return self.sync.push(Version(0, step))

    def stop(self) -> None:
        self.sync.close()
        for engine in self.engines:
            engine.stop()


@pytest.fixture(params=["auto", "multi_sender", "sharded"])
def gang(model, one_rank, tmp_path, request, monkeypatch):
    poison_transport(monkeypatch, "disk")
    poison_transport(monkeypatch, "gloo")  # joins the slices
    (tmp_path / "weights" / "0/1/0").mkdir(parents=True)
    (tmp_path / "weights" / "0/1/0/left.safetensors").write_text("by a gang that died")
    gang = Gang(model, tmp_path / "weights", request.param)
    yield gang
    gang.stop()
    assert not (tmp_path / "weights").exists()


def test_pushes_arrive_and_their_files_go_when_the_engines_are_done_and_not_before(gang, tmp_path, monkeypatch):
    conclude, at_the_end = EngineCalls.conclude, []

    def watched(calls, *arguments):
        conclude(calls, *arguments)
        at_the_end.append(files(tmp_path / "weights"))

    monkeypatch.setattr(EngineCalls, "conclude", watched)
    for step in (1, 2):
        report = gang.push(step)
        assert report.ok and report.verified, report
        assert files(tmp_path / "weights") == []
        for engine in gang.engines:
            assert engine.holds(weights(gang.model, step))
            engine.scramble()
    assert all(each and all(name.endswith(".safetensors") for name in each) for each in at_the_end), at_the_end
    if gang.sync.plan.strategy == "broadcast":  # every engine reads the same files
        assert len(at_the_end[0]) == len(gang.sync.plan.outline)


def test_a_full_disk_costs_the_push_and_the_next_one_heals(gang, monkeypatch):
    assert gang.push(1).ok
    write, calls = disk.write, []

    def full(path, *arguments):
        calls.append(path)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write", full)
        report = gang.push(2)
    assert all("cannot write" in report.errors[index] and "/weights/0/2/1/0/" in report.errors[index]
               and "No space left on device" in report.errors[index] for index in range(ENGINES)), report
    report = gang.push(3)
    assert report.ok and report.verified, report
    assert all(engine.holds(weights(gang.model, 3)) for engine in gang.engines)

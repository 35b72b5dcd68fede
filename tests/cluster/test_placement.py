import pytest

from mrl.cluster.placement import assign, place, ranks_beside
from mrl.config.errors import UserError
from tests.rollout.experiments import experiment

SPLIT = experiment(cluster={"device": "cuda", "trainer_gpus": 3, "rollout_gpus": 4}, rollout={"parallel": {"tp": 2}})
SHARED = experiment(loop={"mode": "colocated_sync"},
                    cluster={"trainer_gpus": None, "rollout_gpus": None, "gpus": 2, "device": "cuda"})


def test_engines_take_the_gpus_after_the_trainers():
    placement = assign(SPLIT, None)
    assert placement.trainers == ("0", "1", "2")
    assert placement.engines == (("3", "4"), ("5", "6"))


def test_colocated_engines_share_the_trainers_gpus():
    placement = assign(SHARED, None)
    assert placement.trainers == ("0", "1")
    assert placement.engines == (("0",), ("1",))


def test_the_ranks_beside_engines_are_on_their_workers_gpus():
    shared = experiment(loop={"mode": "colocated_sync"}, rollout={"parallel": {"tp": 2}},
                        cluster={"trainer_gpus": None, "rollout_gpus": None, "gpus": 6, "device": "cuda"})
    placement, ranks = assign(shared, ["9", "8", "7", "3", "4", "5"]), ranks_beside(shared)
    assert ranks == ((0, 1), (2, 3), (4, 5))
    assert tuple(tuple(placement.trainers[rank] for rank in engine) for engine in ranks) == placement.engines


def test_evaluation_has_engines_alone_from_the_first_gpu_on():
    assert assign(SPLIT, None, trainers=False).engines == (("0", "1"), ("2", "3"))
    assert assign(SPLIT, None, trainers=False).trainers == ()
    assert assign(SHARED, ["5", "7"], trainers=False).engines == (("5",), ("7",))


def test_only_visible_gpus_are_dealt_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a,GPU-b")
    exp = experiment(cluster={"device": "cuda"})
    assert (place(exp).trainers, place(exp).engines) == (("2",), (("GPU-a",),))
    assert place(exp, trainers=False).engines == (("2",),)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert (place(exp).trainers, place(exp).engines) == (("0",), (("1",),))


def test_too_few_visible_gpus_are_refused():
    with pytest.raises(UserError, match=r"7 are needed, and CUDA_VISIBLE_DEVICES names 2 \(4,5\)"):
        assign(SPLIT, ["4", "5"])


def test_on_cpu_processes_are_counted_whatever_is_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    placement = place(experiment())
    assert (placement.trainers, placement.engines) == (("0",), (("1",),))

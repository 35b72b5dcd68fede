from mrl.cluster.placement import place
from tests.rollout.experiments import experiment


def test_engines_take_the_gpus_after_the_trainers():
    placement = place(experiment(cluster={"device": "cuda", "trainer_gpus": 3, "rollout_gpus": 4}, rollout={"parallel": {"tp": 2}}))
    assert placement.trainers == (0, 1, 2)
    assert placement.engines == ((3, 4), (5, 6))


def test_colocated_engines_share_the_trainers_gpus():
    placement = place(experiment(loop={"mode": "colocated_sync"},
                                 cluster={"trainer_gpus": None, "rollout_gpus": None, "gpus": 2, "device": "cuda"}))
    assert placement.trainers == (0, 1)
    assert placement.engines == ((0,), (1,))


def test_on_cpu_engines_have_no_gpus():
    assert place(experiment()).engines == ((),)

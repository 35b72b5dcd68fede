"""What is done with a batch that has nothing in it; batches with something in them are tested on Megatron."""
from types import SimpleNamespace

from mrl.learner import Learner
from mrl.observe.clock import Clock
from tests.rollout.experiments import experiment


def test_an_empty_batch_trains_nothing_and_still_renews_the_reference():
    renewed = []
    trainer = SimpleNamespace(layout=SimpleNamespace(replicas=2), update_reference=lambda: renewed.append(True))
    learner = Learner(experiment(algorithm={"kl": {"coef": 0.1, "reference_every": 2}}), trainer,
                      lambda shares: shares[0], Clock())
    for step in (0, 1):
        learner.receive([])
        assert learner.train(step) == {}
    assert renewed == [True]

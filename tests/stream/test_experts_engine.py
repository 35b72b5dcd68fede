"""An engine that deals out its experts over two workers: after a push it is what its own loader would make of it."""
import pytest
from safetensors.torch import load_file

from mrl.engine.api import Version
from tests.stream.conftest import gang_of_one
from tests.stream.engines import STRATEGIES
from tests.stream.tiny import weights

pytestmark = pytest.mark.slow


def fingerprints(bench) -> list[dict[str, int]]:
    """Checksums of everything in the model that may hold weights, by worker."""
    answers = bench.call("workers", "mrl_fingerprint")
    assert all(answer["error"] is None for answer in answers), answers
    return [answer["sums"] for answer in answers]


def test_every_strategy_leaves_what_the_engines_own_loader_does(bench_experts, one_rank):
    on_disk = load_file(bench_experts.model / "model.safetensors")
    assert bench_experts.log_prob_error(on_disk) < 1e-4  # its tables of experts are made when they are first needed
    own = fingerprints(bench_experts)
    assert len(own) == 2 and own[0] != own[1]
    for strategy in STRATEGIES:
        pushing = gang_of_one(bench_experts, strategy)
        trainer, sync = next(pushing)
        for tensors in (weights(bench_experts.model, bench_experts.step), on_disk):
            trainer.become(tensors)
            report = sync.push(Version(0, bench_experts.next_step()))
            assert report.errors == {0: None} and report.verified and report.unverified == ()
            changed = [name for before, now in zip(own, fingerprints(bench_experts), strict=True)
                       for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
            assert bool(changed) is (tensors is not on_disk), changed
            assert bench_experts.log_prob_error(tensors) < 1e-4
        assert sync.plan.strategy == strategy and not sync.plan.options.not_sharded
        next(pushing, None)

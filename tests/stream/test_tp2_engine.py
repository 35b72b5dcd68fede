"""An engine of two workers: each takes its shards, and the checksums of both make up the whole."""
import pytest

from mrl.engine.api import EngineClosed, GenerateRequest, Version
from tests.stream.engines import STRATEGIES, TOLERANCE, push_from_gang
from tests.stream.tiny import PROMPT, weights

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pushing_tp2", STRATEGIES, indirect=True)
def test_verified_syncs_in_a_row(bench_tp2, pushing_tp2):
    trainer, sync = pushing_tp2
    for verified in (True, False, True):
        if not verified:
            assert bench_tp2.call("workers", "mrl_scramble", "1") == [{"error": None}] * 2
        step = bench_tp2.next_step()
        tensors = weights(bench_tp2.model, step)
        trainer.become(tensors)
        report = sync.push(Version(0, step))
        assert report.errors == {0: None} and report.verified is verified and report.unverified == ()
        assert bench_tp2.log_prob_error(tensors) < TOLERANCE
    # SGLang on a CPU gives the workers shares of an MLP in multiples of 64 rows: no even cut of 80, so they go whole.
    uneven = {name for name in tensors if bench_tp2.experiment.rollout.engine == "sglang" and ".mlp." in name}
    assert sync.plan.options.not_sharded == (uneven if sync.plan.options.strategy == "sharded" else frozenset())

    # One worker whose link is gone spoils the sync for both, and the next push heals both.
    sync.links.close()
    step = bench_tp2.next_step()
    report = sync.push(Version(0, step))
    assert "link" in report.errors[0]
    with pytest.raises(EngineClosed, match=f"0:{step} was not received whole"):
        bench_tp2.call("generate", GenerateRequest(PROMPT, seed=1, max_tokens=2, temperature=1.0))
    assert sync.push(Version(0, step)).ok
    assert bench_tp2.log_prob_error(tensors) < TOLERANCE


def test_gangs_of_four_ranks(bench_tp2, tmp_path):
    """Two replicas of two tp ranks; two stages of two tp ranks."""
    for reports in push_from_gang(bench_tp2, tmp_path, 4, [(2, 1), (2, 2)]):
        assert [report.verified for report in reports] == [True, False] * len(STRATEGIES)
        assert all(report.ok and report.unverified == () for report in reports)

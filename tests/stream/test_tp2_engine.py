"""An engine of two workers: each takes its shards, and the checksums of both make up the whole."""
import pytest

from mrl.engine.api import EngineClosed, GenerateRequest, Version
from tests.stream.tiny import PROMPT, weights

pytestmark = pytest.mark.slow


def test_verified_syncs_in_a_row(bench_tp2, pushing_tp2):
    trainer, sync = pushing_tp2
    for step, verified in ((1, True), (2, False), (3, True)):
        if step > 1:
            assert bench_tp2.call("workers", "mrl_scramble", "1") == [{"error": None}] * 2
        tensors = weights(bench_tp2.model, step)
        trainer.become(tensors)
        report = sync.push(Version(0, step))
        assert report.errors == {0: None} and report.verified is verified
        assert bench_tp2.log_prob_error(tensors) < 1e-4

    # One worker whose link is gone spoils the sync for both, and the next push heals both.
    sync.links.close()
    report = sync.push(Version(0, 4))
    assert "link" in report.errors[0]
    with pytest.raises(EngineClosed, match="0:4 was not received whole"):
        bench_tp2.call("generate", GenerateRequest(PROMPT, seed=1, max_tokens=2, temperature=1.0))
    assert sync.push(Version(0, 4)).ok
    assert bench_tp2.log_prob_error(tensors) < 1e-4

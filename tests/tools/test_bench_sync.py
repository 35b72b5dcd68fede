"""The parts of the sync benchmark that need no engine: its experiments and its arithmetic."""
from argparse import Namespace

import pytest

from tools.bench_sync import Figure, experiment, shape_only, show

OPTIONS = dict(python="python", engine="vllm", engine_tp=1, engine_arg=[], buffers=2, verify=False, vllm_transfer=None,
               start_timeout=60)


@pytest.mark.parametrize("device, transport, mode", [
    ("cpu", "auto", "one_step_overlap"), ("cuda", "nccl", "one_step_overlap"), ("cuda", "cuda_ipc", "colocated_sync")])
def test_experiments_differ_by_where_the_engine_stands(device, transport, mode, tmp_path):
    options = Namespace(device=device, transport=transport, **OPTIONS)
    exp = experiment(options, shape_only(tmp_path / "model", "qwen2.5-1.5b"), 1, 12345)
    assert (exp.loop.mode, exp.trainer_ranks, exp.engine_count, exp.rollout.port) == (mode, 1, 1, 12345)
    assert "peers.worker.PeerReceiver" in exp.rollout.args


def test_the_first_round_is_not_counted_and_medians_are_shown(capsys):
    raw, mine = Figure("raw broadcast"), Figure("mrl")
    for turn, seconds in enumerate([9.0, 1.0, 3.0, 2.0]):
        raw.add(turn, seconds / 2)
        mine.add(turn, seconds, {"gather": seconds / 10})
    assert mine.seconds == [1.0, 3.0, 2.0]
    assert (mine.stage("gather"), mine.stage("send"), raw.stage("gather")) == ("0.200", "", "")
    show([raw, mine], 4 * 10**9)
    row = next(line for line in capsys.readouterr().out.splitlines() if "mrl" in line)
    assert all(text in row for text in ("2.000", "2.00", "0.200", "3.000"))

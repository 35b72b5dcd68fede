"""The parts of the sync benchmark that need no engine: its experiments, its arithmetic, and the plain copy."""
import pytest
import torch

from tools.bench_sync import Figure, experiment, parse, rows
from tools.peers.trainer import DeviceCopy
from tools.workload import shape_only


@pytest.mark.parametrize("words, mode, flag", [
    (["--device", "cpu"], "one_step_overlap", "--worker-extension-cls"),
    (["--device", "cpu", "--colocated", "--transport", "gloo"], "colocated_sync", None),
    (["--device", "cuda", "--transport", "nccl"], "one_step_overlap", "--worker-extension-cls"),
    (["--device", "cuda", "--transport", "cuda_ipc"], "colocated_sync", "--gpu-memory-utilization"),
    (["--device", "cuda", "--transport", "cuda_ipc", "--engine", "sglang"], "colocated_sync", "--mem-fraction-static")])
def test_experiments_differ_by_where_the_engine_stands(words, mode, flag, tmp_path):
    options = parse(["--python", "python", *words])
    exp = experiment(options, shape_only(tmp_path / "model", "qwen2.5-1.5b"), 1, 12345)
    assert (exp.loop.mode, exp.trainer_ranks, exp.engine_count, exp.rollout.port) == (mode, 1, 1, 12345)
    assert flag in exp.rollout.args if flag else not exp.rollout.args
    assert ("peers.worker.PeerReceiver" in exp.rollout.args) == ("PYTHONPATH" in exp.rollout.env)


def test_what_cannot_be_timed_is_refused(capsys):
    for words, said in ((["--transport", "cuda_ipc", "--strategy", "broadcast"], "one strategy"),
                        (["--device", "cuda", "--colocated", "--vllm-transfer", "nccl"], "GPUs of its own")):
        with pytest.raises(SystemExit):
            parse(["--python", "python", *words])
        assert said in capsys.readouterr().err


def test_the_first_round_is_not_counted_and_medians_are_compared():
    raw, mine = Figure("raw broadcast"), Figure("mrl")
    for turn, seconds in enumerate([9.0, 1.0, 3.0, 2.0]):
        raw.add(turn, seconds / 2)
        mine.add(turn, seconds, {"transfer": seconds / 4, "control": 3 * seconds / 4})
    assert mine.seconds == [1.0, 3.0, 2.0]
    first, whole, transfer = rows([raw, mine], 4 * 10**9)
    assert (first.value, first.ratio, whole.value, whole.ratio) == (1.0, 1.0, 2.0, 2.0)
    assert (transfer.value, transfer.ratio, transfer.to) == (0.5, 0.5, "raw broadcast")
    assert whole.notes == "2.0 GB/s, slowest 3.0000; transfer 0.5000, control 1.5000"


def test_a_device_copy_moves_every_byte_once():
    copy = DeviceCopy(1001, torch.device("cpu"))
    copy.source.copy_(torch.arange(1001, dtype=torch.int64).to(torch.uint8))
    assert copy.push() > 0 and torch.equal(copy.source, copy.target)

"""The tool that replays plans: its presets, its output, and the times it is there to promise."""
import json
from math import prod

import pytest

from mrl.reshard.params import hf_tensors
from mrl.reshard.spec import model_spec
from tools.simulate_sync import PRESETS, main

FROM_256_GPUS = ["--tp", "8", "--pp", "8", "--dp", "4", "--ep", "32", "--last-stage-layers", "5"]


def results(capsys, *arguments):
    main([*arguments, "--json"])
    return {result["strategy"]: result for result in json.loads(capsys.readouterr().out)}


def test_strategies_rank_as_their_bottlenecks_say(capsys):
    found = results(capsys, "qwen2.5-7b", "--tp", "4", "--dp", "2", "--engines", "2", "--engine-tp", "4")
    assert list(found) == ["broadcast", "multi_sender", "sharded"]
    assert found["sharded"]["seconds"] < found["multi_sender"]["seconds"] < found["broadcast"]["seconds"]
    for result in found.values():
        assert 15.2e9 < result["bytes"] < 15.3e9 and (result["trainer_gpus"], result["engine_gpus"]) == (8, 8)
        assert result["lower_bound_s"] <= result["seconds"] - 0.02 and result["receive_bound_s"] < result["seconds"]
    # one NIC sends everything to both engines
    assert found["broadcast"]["bottleneck"] == "trainer NIC out"
    assert found["broadcast"]["seconds"] == pytest.approx(0.02 + 2 * 15.23 / 50, rel=0.02)
    # eight NICs send two models
    assert found["multi_sender"]["seconds"] == pytest.approx(0.02 + 2 * 15.23 / 8 / 50, rel=0.1)


@pytest.mark.parametrize("workers", [16, 32])
def test_a_trillion_parameters_in_fp8_take_at_most_1_15_times_the_receive_bound(workers, capsys):
    engines = ["--engines", str(128 // workers), "--engine-tp", "16", "--engine-dp", str(workers // 16), "--engine-ep",
               str(workers)]  # a shared expert's 2048 rows are whole blocks for 16 workers, and not for 32
    result = results(capsys, "kimi-k2", "--fp8", *FROM_256_GPUS, *engines, "--strategy",
                     "sharded")["sharded"]
    assert (result["trainer_gpus"], result["engine_gpus"]) == (256, 128)
    assert result["receive_bound_s"] == pytest.approx(1.026e12 / workers / 50e9, rel=0.02)
    assert result["seconds"] <= 1.15 * result["receive_bound_s"]


def test_tables_name_the_bottleneck_and_every_kind_of_link(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    main(["qwen2.5-7b", "--engine-tp", "2", "--strategy", "multi_sender"])
    printed = capsys.readouterr().out
    for words in ("15.2 GB in bfloat16: 1 trainer GPUs to 2 engine GPUs", "trainer NIC out", "engine NIC in",
                  "engine NVLink", "receive bound 0.152 s"):
        assert words in printed


def test_what_cannot_be_planned_is_said_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="simulate_sync: .*tp 3"):
        main(["qwen2.5-7b", "--tp", "3"])
    with pytest.raises(SystemExit, match="config.json not found"):
        main([str(tmp_path)])


def test_every_preset_has_as_many_parameters_as_its_name_says():
    billions = {"qwen2.5-7b": 7.6, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "deepseek-v3": 671, "kimi-k2": 1026.4}
    for name, config in PRESETS.items():
        parameters = sum(prod(shape) for shape in hf_tensors(model_spec(config)).values())
        assert parameters == pytest.approx(1e9 * billions[name], rel=0.003)

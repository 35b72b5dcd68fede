"""Gangs of four real ranks push to toy engines: every strategy, from dense and expert layouts, bit for bit."""
import json

import pytest

from tests.stream.engines import ROOT
from tests.stream.tiny import make_moe
from tests.torchrun import torchrun

FP8 = dict(hidden_size=192, moe_intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
"""Sizes whose shards for two workers are whole blocks. The trainers' are not everywhere: a KV head has half a block of
rows, so k and v travel whole at tp 4. Hidden dimensions end within a block."""
REPLICATED_FP8 = "model.layers.1.self_attn.o_proj.weight"
REPLICATED = "model.layers.1.mlp.up_proj.weight"
DENSE = [
    # layout, workers of an engine, workers on one of its nodes, tensor that they hold whole although vLLM would not
    ({"tp": 4}, 2, 2, ""),
    ({"tp": 2, "pp": 2}, 4, 2, ""),
    ({"tp": 2, "dp": 2}, 1, 8, ""),
    ({"pp": 2, "dp": 2}, 2, 1, REPLICATED),
    ({"dp": 4}, 4, 8, ""),
]
EXPERTS = [
    ({"dp": 4, "ep": 4}, 2, 2, ""),
    ({"tp": 2, "dp": 2, "ep": 2}, 2, 2, ""),
    ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, 4, 2, ""),
    ({"tp": 2, "pp": 2, "etp": 2}, 1, 8, ""),
]


def run(tmp_path, models: dict, cases: list, delta: bool = False, transport: str = "gloo", fp8: bool = False
        ) -> list[dict]:
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"models": models, "cases": cases, "delta": delta, "transport": transport,
                                 "fp8": fp8}))
    output = torchrun(ROOT / "tests/stream/push_toys.py", 4, order)
    return [json.loads(line.split("CASE ", 1)[1]) for line in output.splitlines() if "CASE " in line]


def check(found: list[dict], cases: list) -> None:
    """Every case was done, by every strategy, and each strategy did what sets it apart."""
    assert [one["case"] for one in found] == [list(case) for case in cases for _ in range(3)]
    modes = {"broadcast": ["broadcast"], "multi_sender": ["slices"], "sharded": ["direct", "slices"]}
    for one in found:
        assert one["modes"] == modes[one["strategy"]], one
        replicated = one["case"][-1]
        assert one["not_sharded"] == ([replicated] if replicated and one["strategy"] == "sharded" else []), one


@pytest.mark.slow
def test_dense_models(tmp_path, model):
    cases = [["dense", *case] for case in DENSE]
    found = run(tmp_path, {"dense": str(model)}, cases)
    check(found, cases)
    idle = [one for one in found if one["strategy"] != "broadcast" and one["senders"] < 4]
    assert not idle, "ranks that hold weights send none"


@pytest.mark.slow
def test_experts_whose_layout_is_not_that_of_the_rest(tmp_path):
    cases = [["experts", *case] for case in EXPERTS]
    check(run(tmp_path, {"experts": str(make_moe(tmp_path / "experts"))}, cases), cases)


@pytest.mark.slow
def test_changes_alone(tmp_path, model):
    cases = [["dense", *DENSE[1]], ["dense", *DENSE[3]], ["experts", *EXPERTS[2]]]
    models = {"dense": str(model), "experts": str(make_moe(tmp_path / "experts"))}
    check(run(tmp_path, models, cases, delta=True), cases)


@pytest.mark.slow
@pytest.mark.parametrize("delta", [False, True])
def test_engines_on_the_ranks_own_gpus(delta, tmp_path, model):
    """Two engines of two workers beside four ranks: any layout reaches them, with every worker's own rank sending."""
    cases = [["dense", {"tp": 2, "pp": 2}, 2, 2, ""], ["experts", {"tp": 2, "dp": 2, "ep": 2, "etp": 2}, 2, 2, ""]]
    if not delta:
        cases += [["dense", {"pp": 2, "dp": 2}, 2, 2, ""], ["experts", {"dp": 4, "ep": 4}, 2, 2, ""]]
    models = {"dense": str(model), "experts": str(make_moe(tmp_path / "experts"))}
    found = run(tmp_path, models, cases, delta, "cuda_ipc")
    assert [one["case"] for one in found] == cases
    assert all((one["strategy"], one["modes"], one["senders"]) == ("multi_sender", ["slices"], 4) for one in found)


@pytest.mark.slow
def test_a_worker_reads_what_its_rank_holds_alone_where_that_lies(tmp_path, model):
    """Four engines of one worker beside four ranks. What other ranks hold, too, is gathered first."""
    layouts = [("dense", {"dp": 4}), ("dense", {"pp": 2, "dp": 2}), ("dense", {"tp": 2, "dp": 2}),
               ("experts", {"dp": 4, "ep": 4}), ("dense", {"tp": 4})]
    cases = [[name, layout, 1, 8, ""] for name, layout in layouts]
    models = {"dense": str(model), "experts": str(make_moe(tmp_path / "experts"))}
    found = run(tmp_path, models, cases, transport="cuda_ipc")
    assert [one["case"] for one in found] == cases
    assert [bool(one["lent"]) for one in found] == [True, True, False, True, False]
    assert [bool(one["gathered"]) for one in found] == [False, True, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("delta", [False, True])
def test_fp8_is_what_quantising_the_whole_tensors_would_be(delta, tmp_path):
    cases = [["experts", {"tp": 2, "dp": 2, "ep": 2}, 2, 2, ""],
             ["experts", {"tp": 2, "pp": 2, "etp": 2}, 2, 1, REPLICATED_FP8],
             ["experts", {"tp": 4, "ep": 2, "etp": 2}, 2, 2, ""]]
    cases = cases[-1:] if delta else cases
    models = {"experts": str(make_moe(tmp_path / "experts", **FP8))}
    check(run(tmp_path, models, cases, delta, fp8=True), cases)

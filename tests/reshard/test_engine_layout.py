"""Boxes that engine workers hold, cut by hand: query and KV heads, MLPs, experts, vocabulary, on vLLM and SGLang."""
from __future__ import annotations

import pytest

from mrl.reshard import EngineLayout, Layout, gather_groups, held_boxes, model_spec
from mrl.reshard.engine_layout import expert_block, shardable

from .simulate import hf_config, spec_of


def held(spec, layout: EngineLayout, name: str) -> list:
    """What every worker of an engine holds of one HF tensor."""
    for group in gather_groups(spec, Layout()):
        for at, entry in enumerate(group.entries):
            for number, tensor in enumerate(group.tensors(at)):
                if tensor.name == name:
                    return [held_boxes(entry.rule, number, tensor.shape, entry.expert, spec, layout, worker)
                            for worker in range(layout.world)]
    raise AssertionError(name)


def rows(*spans: tuple[int, int], width: int = 24) -> list:
    return [((span, (0, width)),) for span in spans]


# Hidden 24, 4 query heads and 2 KV heads of 10 rows, MLP 40, vocabulary 131, 8 experts of width 28.
QWEN3 = spec_of("qwen3")
MOE = model_spec({**hf_config("qwen3-moe"), "num_experts": 8})
ATTENTION, MLP, EXPERTS = "model.layers.1.self_attn.", "model.layers.1.mlp.", "model.layers.1.mlp.experts."


def test_heads():
    two, four = EngineLayout(tp=2), EngineLayout(tp=4)
    assert held(QWEN3, two, ATTENTION + "q_proj.weight") == rows((0, 20), (20, 40))
    assert held(QWEN3, two, ATTENTION + "k_proj.weight") == rows((0, 10), (10, 20))
    assert held(QWEN3, two, ATTENTION + "o_proj.weight") == [(((0, 24), (0, 20)),), (((0, 24), (20, 40)),)]
    assert held(QWEN3, four, ATTENTION + "q_proj.weight") == rows((0, 10), (10, 20), (20, 30), (30, 40))
    assert held(QWEN3, four, ATTENTION + "v_proj.weight") == rows((0, 10), (0, 10), (10, 20), (10, 20))
    assert held(spec_of("qwen2"), four, ATTENTION + "k_proj.bias") == [(((0, 6),),)] * 2 + [(((6, 12),),)] * 2
    assert held(QWEN3, EngineLayout(tp=8), ATTENTION + "q_proj.weight") == [None] * 8  # 4 heads do not divide


def test_mlps_and_what_is_whole():
    two = EngineLayout(tp=2)
    assert held(QWEN3, two, MLP + "up_proj.weight") == rows((0, 20), (20, 40))
    assert held(QWEN3, two, MLP + "down_proj.weight") == [(((0, 24), (0, 20)),), (((0, 24), (20, 40)),)]
    assert held(QWEN3, two, "model.norm.weight") == [(((0, 24),),)] * 2
    assert held(MOE, two, MLP + "gate.weight") == [(((0, 8), (0, 24)),)] * 2
    joined = held(spec_of("glm4"), two, MLP + "gate_up_proj.weight")  # 40 rows of gate, then 40 of up
    assert joined == [(((0, 20), (0, 24)), ((40, 60), (0, 24))), (((20, 40), (0, 24)), ((60, 80), (0, 24)))]


def test_vocabulary_rows_are_padded_to_64():
    """131 rows become 192: 48 a worker of four, and the third has 35 of them, the last none."""
    assert held(QWEN3, EngineLayout(tp=4), "lm_head.weight") == [*rows((0, 48), (48, 96), (96, 131)), ()]


def test_experts():
    gate, down = EXPERTS + "5.gate_proj.weight", EXPERTS + "5.down_proj.weight"
    cut = EngineLayout(tp=2)
    assert held(MOE, cut, gate) == rows((0, 14), (14, 28))
    assert held(MOE, cut, down) == [(((0, 24), (0, 14)),), (((0, 24), (14, 28)),)]
    dealt = EngineLayout(tp=4, ep=4)  # two experts a worker
    assert held(MOE, dealt, gate) == [(), (), *rows((0, 28)), ()]
    both = EngineLayout("sglang", tp=4, ep=2)  # four experts on each pair, each cut in two
    assert held(MOE, both, gate) == [(), (), *rows((0, 14), (14, 28))]


def test_attention_data_parallelism():
    vllm, sglang = EngineLayout("vllm", tp=2, dp=2, ep=4), EngineLayout("sglang", tp=4, dp=2, ep=4)
    for layout in (vllm, sglang):
        assert layout.world == 4
        assert held(MOE, layout, ATTENTION + "q_proj.weight") == rows((0, 20), (20, 40)) * 2
        assert held(MOE, layout, EXPERTS + "7.up_proj.weight") == [(), (), (), *rows((0, 28))]
    assert held(MOE, EngineLayout("vllm", tp=2, dp=2), EXPERTS + "7.up_proj.weight") \
        == rows((0, 7), (7, 14), (14, 21), (21, 28))
    assert held(QWEN3, vllm, MLP + "up_proj.weight") == rows((0, 20), (20, 40)) * 2
    assert held(QWEN3, sglang, MLP + "up_proj.weight") == rows((0, 10), (10, 20), (20, 30), (30, 40))


def test_latent_attention():
    spec, two = spec_of("deepseek-v3"), EngineLayout(tp=2)  # 4 heads of 10 + 6 rows, behind a latent of 12
    assert held(spec, two, ATTENTION + "q_b_proj.weight") == rows((0, 32), (32, 64), width=12)
    assert held(spec, two, ATTENTION + "q_a_proj.weight") == [(((0, 12), (0, 24)),)] * 2
    sharded = {rule.hf[0][0].rpartition(".self_attn.")[2] for rule in spec.family.layer
               if ".self_attn." in rule.hf[0][0] and shardable(rule)}
    assert sharded == {"q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"}


def test_tensors_this_table_does_not_know():
    spec = spec_of("gpt-oss")
    assert held(spec, EngineLayout(tp=2), EXPERTS + "gate_up_proj") == [None, None]


@pytest.mark.parametrize("experts, ep, blocks", [
    (8, 4, [0, 0, 1, 1, 2, 2, 3, 3]), (7, 3, [0, 0, 0, 1, 1, 2, 2]), (3, 4, [0, 1, 2]),
])
def test_blocks_of_experts(experts, ep, blocks):
    assert [expert_block(expert, experts, ep) for expert in range(experts)] == blocks


def test_workers_that_share_a_node():
    assert EngineLayout(tp=32).node == 8 and EngineLayout(tp=2).node == 2
    assert EngineLayout(tp=12).node == 4 and EngineLayout(tp=8, gpus_per_node=1).node == 1

"""plan → pack → gather → assemble → broadcasts, slices and shards: every worker gets its elements, bit for bit."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.reshard import (
    EngineLayout, Layout, SyncOptions, direct_views, gather_groups, held_boxes, hf_tensors, model_spec, pack_views,
    plan_sync, read_config,
)

from .simulate import CASES, ENGINES, Sync, hf_config, load_everywhere, spec_of

STRATEGIES = ("broadcast", "multi_sender", "sharded")


def options(strategy: str, te: bool = False, bucket_bytes: int = 12_000, **more) -> SyncOptions:
    return SyncOptions(bucket_bytes, "float32", te, strategy, smallest_bytes=more.pop("smallest_bytes", 400), **more)


def holdings(spec, layout: Layout, engines: EngineLayout, worker: int) -> dict[str, tuple]:
    """Boxes that a worker holds, by HF tensor."""
    return {
        tensor.name: held_boxes(entry.rule, number, tensor.shape, entry.expert, spec, engines, worker)
        for group in gather_groups(spec, layout) for at, entry in enumerate(group.entries)
        for number, tensor in enumerate(group.tensors(at))
    }


def sent_tensors(directory: Path, variant: str) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, less those that the model is without by option."""
    expected = hf_tensors(spec_of(variant, read_config(directory)))
    return {name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if name in expected}


def expect(expected: dict[str, torch.Tensor], received: dict[str, torch.Tensor], held: dict[str, tuple]) -> set[str]:
    """Every tensor came whole, or exactly the boxes that are held of it. Returns the names of the latter."""
    sharded = set()
    for name, tensor in expected.items():
        wanted = torch.full(tensor.shape, float("nan"))
        for box in held[name] or ():
            index = tuple(slice(*span) for span in box)
            wanted[index] = tensor[index]
        got = received.get(name, torch.full(tensor.shape, float("nan")))
        if not torch.equal(got, tensor):
            assert torch.equal(got.nan_to_num(7e7), wanted.nan_to_num(7e7)), name
            sharded.add(name)
    return sharded


@pytest.mark.parametrize("variant, layout", CASES[::7], ids=str)
def test_a_sync_reproduces_the_checkpoint(variant, layout, model_dir):
    """Every variant and every layout (7 divides neither's number of cases), each with all strategies."""
    directory = model_dir(variant)
    spec, expected = spec_of(variant, read_config(directory)), sent_tensors(directory, variant)
    te = layout.tp == 2
    params = load_everywhere(directory, spec, layout, te)
    for turn, strategy in enumerate(STRATEGIES, start=CASES.index((variant, layout))):
        engines = ENGINES[turn % len(ENGINES)]
        sync = Sync(plan_sync(spec, layout, engines, options(strategy, te)), params)
        held = [holdings(spec, layout, engines, worker) for worker in range(engines.world)]
        for sign in (1, -1):  # the second sync uses the views of the first, after an in-place update
            wanted = {name: sign * tensor for name, tensor in expected.items()}
            for (engine, worker), received in sync.run().items():
                sharded = expect(wanted, received, held[worker])
                assert not sharded or strategy == "sharded"
            for rank in params:
                torch._foreach_neg_(list(rank.values()))


def sync_of(variant: str, layout: Layout, engines: EngineLayout, options: SyncOptions, model_dir) -> tuple:
    """Plan, checkpoint, and what every worker received."""
    directory = model_dir(variant)
    spec = spec_of(variant, read_config(directory))
    plan = plan_sync(spec, layout, engines, options)
    received = Sync(plan, load_everywhere(directory, spec, layout, options.te)).run()
    return plan, sent_tensors(directory, variant), received


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensors_larger_than_a_bucket_are_cut(strategy, model_dir):
    """Buckets of 20 elements: less than a row of 24, which is cut too."""
    engines = EngineLayout(tp=2, gpus_per_node=2)
    plan, expected, received = sync_of("qwen2", Layout(tp=2), engines, options(strategy, bucket_bytes=80), model_dir)
    assert plan.max_bucket_bytes <= 80
    for tensors in received.values():
        for name, tensor in expected.items():
            assert torch.equal(tensors[name].nan_to_num(7e7), tensor) or strategy == "sharded" and "_proj" in name, name


def test_sharded_sends_only_what_a_worker_holds(model_dir):
    engines = EngineLayout("vllm", tp=2, ep=2)
    plan, expected, received = sync_of("qwen3-moe", Layout(tp=2, dp=2, ep=4), engines, options("sharded"), model_dir)
    first, second = received[0, 0], received[0, 1]
    for name, tensor in expected.items():
        if ".experts." in name:  # experts 0 … 3 on worker 0, the others on worker 1
            there, elsewhere = (first, second) if int(name.split(".experts.")[1].split(".")[0]) < 4 else (second, first)
            assert torch.equal(there[name], tensor) and name not in elsewhere
        elif "o_proj" in name:
            half = tensor.shape[1] // 2
            assert torch.equal(first[name][:, :half], tensor[:, :half]) and first[name][:, half:].isnan().all()
            assert torch.equal(second[name][:, half:], tensor[:, half:]) and second[name][:, :half].isnan().all()
    sizes = [sum(int((~tensor.isnan()).sum()) for tensor in tensors.values()) * 4 for tensors in (first, second)]
    passed_on = [sum(bucket.nbytes for bucket in plan.of_engine(0, worker) if bucket.mode == "slices")
                 for worker in (0, 1)]
    assert max(plan.bytes_by_worker) < max(sizes) and min(sizes) <= max(plan.bytes_by_worker) + max(passed_on)


def test_tensors_that_are_not_sharded_go_whole(model_dir):
    refused = frozenset({"model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"})
    _, expected, received = sync_of("qwen3-moe", Layout(tp=2, dp=2, ep=2), EngineLayout(tp=2),
                                    options("sharded", not_sharded=refused), model_dir)
    for tensors in received.values():
        assert all(torch.equal(tensors[name], expected[name]) for name in refused)
        assert tensors["model.layers.0.self_attn.k_proj.weight"].isnan().any()


def test_a_shard_of_another_shape_is_refused():
    spec = model_spec(hf_config("llama"))
    plan = plan_sync(spec, Layout(tp=2), EngineLayout(), options("broadcast", bucket_bytes=4))
    one = plan.bucket(0).slices[0]
    with pytest.raises(ValueError, match=r"word_embeddings.weight has shape \(131, 24\), the plan says \(128"):
        pack_views(one.shards[0], {"embedding.word_embeddings.weight": torch.empty(131, 24)}, torch.empty(1))


def test_a_shard_of_another_dtype_is_refused():
    spec = model_spec(hf_config("qwen3-moe"))
    plan = plan_sync(spec, Layout(), EngineLayout(), SyncOptions(1 << 20, "bfloat16", False, "broadcast"))
    params = {given.param: torch.empty(given.param_shape, dtype=torch.float32 if "router" in given.param else
                                       torch.bfloat16) for given in plan.bucket(0).slices[0].shards[0]}
    with pytest.raises(ValueError, match="router.weight is torch.float32, its bucket torch.bfloat16"):
        direct_views(plan.bucket(0).slices[0], params, torch.empty(plan.bucket(0).numel, dtype=torch.bfloat16))

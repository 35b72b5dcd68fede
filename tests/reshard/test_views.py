"""plan → pack → gather → assemble over all ranks gives the Hugging Face tensors, bit for bit, twice in a row."""
from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from mrl.reshard import Layout, assemble_views, model_spec, pack_views, plan_sync, read_config

from .simulate import CASES, assert_same, hf_config, load_all, spec_of


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("variant, layout", CASES, ids=str)
def test_a_sync_reproduces_the_checkpoint(variant, layout, te, model_dir):
    directory = model_dir(variant)
    spec = spec_of(variant, read_config(directory))
    shards = load_all(directory, spec, layout, te, torch.float32)
    plan = plan_sync(spec, layout, 12_000, "float32", te)
    assert len(plan.buckets) > layout.pp

    gathered = [torch.empty(plan.max_local_numel) for _ in range(max(len(bucket.shards) for bucket in plan.buckets))]
    message = torch.empty(plan.max_bucket_numel)
    copies = []
    for bucket in plan.buckets:
        flats, first = gathered[:len(bucket.shards)], layout.sender(bucket.stage)
        ranks = [shards[layout.coord(first + m)] for m in range(len(flats))]
        copies.append([pack_views(bucket, params, flat) for params, flat in zip(ranks, flats)]
                      + [assemble_views(bucket, flats, message)])
    for bucket, (*_, (_, dsts)) in zip(plan.buckets, copies):
        assert sum(dst.numel() for dst in dsts) == bucket.numel  # with the comparison below: each element once
    expected = load_file(directory / "model.safetensors")
    for sign in (1, -1):  # the second sync uses the views of the first, after an in-place update
        received = {}
        for bucket, steps in zip(plan.buckets, copies):
            message.fill_(float("nan"))
            for srcs, dsts in steps:
                torch._foreach_copy_(dsts, srcs)
            for item in bucket.items:
                received[item.name] = message[item.offset:item.offset + item.numel].view(item.shape).clone()
        assert_same(received, {name: sign * tensor for name, tensor in expected.items()})
        for rank in shards.values():
            torch._foreach_neg_(list(rank.values()))


def test_a_shard_of_another_shape_is_refused():
    spec = model_spec(hf_config("llama"))
    bucket = plan_sync(spec, Layout(tp=2), 1, "float32", te=False).buckets[0]
    with pytest.raises(ValueError, match=r"word_embeddings.weight has shape \(131, 24\), the plan says \(128"):
        pack_views(bucket, {"embedding.word_embeddings.weight": torch.empty(131, 24)}, torch.empty(bucket.local_numel))


def test_a_shard_of_another_dtype_is_refused():
    spec = model_spec(hf_config("qwen3-moe"))
    plan = plan_sync(spec, Layout(), 1, "bfloat16", te=False)
    (bucket,) = [bucket for bucket in plan.buckets if bucket.params == ("decoder.layers.0.mlp.router.weight",)]
    router = {"decoder.layers.0.mlp.router.weight": torch.empty(8, 24)}
    with pytest.raises(ValueError, match="router.weight is torch.float32, its bucket torch.bfloat16"):
        pack_views(bucket, router, torch.empty(bucket.local_numel, dtype=torch.bfloat16))

"""Models whose tensors vLLM stacks, or derives others from: right after every sync, whole or as shards."""
from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from mrl.engine.api import GenerateRequest
from mrl.engine.server import EngineServer
from tests.receiver.senders import Senders
from tests.receiver.toy import Draft
from tests.stream.tiny import PROMPT, VOCAB, make_experiment, make_model

pytestmark = pytest.mark.slow

COMMON = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
              num_attention_heads=4, num_experts_per_tok=2, max_position_embeddings=128, tie_word_embeddings=False,
              eos_token_id=VOCAB - 1)
# SGLang knows no other positions for this family on the CPU.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**COMMON, num_key_value_heads=2, head_dim=32, num_experts=4),
    # vLLM's CPU kernel for MLA knows one size: 512 latent and 64 rotated dimensions
    "deepseek_v3": DeepseekV3Config(**COMMON, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
                                    n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=512,
                                    qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, topk_method="noaux_tc",
                                    scoring_func="sigmoid", moe_layer_freq=1, rope_parameters=YARN),
}
LIKE_TRANSFORMERS = {"qwen3_moe"}
"""vLLM's CPU backend computes MLA otherwise than transformers does, whatever loads its weights."""


def make(name: str, path: Path) -> Path:
    """A model directory with the tokenizer of the tiny model."""
    make_model(path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(path)
    return path


def weights(path: Path, version: int) -> dict[str, torch.Tensor]:
    """Every HF tensor, random by version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(tensor.shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
            for name, tensor in load_file(path / "model.safetensors").items()}


def reference(path: Path, tensors: dict[str, torch.Tensor], answer: list[int]) -> torch.Tensor:
    """Log-probs that transformers gives the answer to PROMPT."""
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + answer])).logits[0, len(PROMPT) - 1:-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def plan_of(tensors: dict[str, torch.Tensor], sharded: bool) -> dict:
    """One worker; weights of two dimensions cut in two, or whole and direct if `sharded`."""
    draft = Draft(shapes={name: list(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        rest = [(0, size) for size in tensor.shape[1:]]
        if sharded and tensor.dim() == 2 and "proj" in name:
            draft.add("direct", [name], worker=0)
        else:
            half = (tensor.shape[0] + 1) // 2
            draft.add("broadcast", [(name, [(0, half), *rest])])
            draft.add("broadcast", [(name, [(half, tensor.shape[0]), *rest])])
    return draft.wire()


@pytest.fixture
def loop():
    """An event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


class Engine:
    """An EngineServer that is called from another thread."""

    def __init__(self, loop, path: Path, run_dir: Path, load_weights: bool = False):
        python = Path(os.environ.get("MRL_HOME", Path.cwd() / ".mrl")) / "vllm/bin/python"
        self.loop = loop
        self.server = EngineServer(make_experiment(path, str(python)), 0, "run", run_dir, load_weights=load_weights)

    def begin(self, method: str, *arguments):
        return asyncio.run_coroutine_threadsafe(getattr(self.server, method)(*arguments), self.loop)

    def call(self, method: str, *arguments):
        return self.begin(method, *arguments).result(400)

    def sample(self):
        return self.call("generate", GenerateRequest(PROMPT, seed=3, max_tokens=12, temperature=1.0))

    def sync(self, senders: Senders, step: int, tensors: dict[str, torch.Tensor]):
        """One verified sync; the answer to PROMPT after it."""
        request = senders.request(step, verify=True, link=str(id(senders)), deadline_s=60.0)
        if request.connect:
            assert self.call("prepare", request).not_sharded == {}
        done = self.begin("receive", replace(request, plan={}))
        senders.send(request, tensors)
        result = done.result(120)
        assert result.verified and result.unverified == ()
        return self.sample()


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_and_sharded_syncs_do_what_loading_from_disk_does(name, tmp_path, loop):
    path = make(name, tmp_path / "model")
    versions = [weights(path, 1), weights(path, 2)]
    engine = Engine(loop, path, tmp_path)
    engine.call("start")
    try:
        whole, sharded = (
            [engine.sync(senders, step + i, tensors) for i, tensors in enumerate(versions)]
            for step, senders in ((1, Senders(plan_of(versions[0], False))), (3, Senders(plan_of(versions[0], True)))))
    finally:
        engine.call("stop")
    for one, other, tensors in zip(whole, sharded, versions):
        assert one.token_ids == other.token_ids and one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        if name in LIKE_TRANSFORMERS:
            assert torch.allclose(torch.tensor(one.log_probs), reference(path, tensors, one.token_ids), atol=1e-4)
    assert whole[0].log_probs != pytest.approx(whole[1].log_probs, abs=0.1)
    save_file(versions[1], path / "model.safetensors", metadata={"format": "pt"})
    from_disk = Engine(loop, path, tmp_path, load_weights=True)
    from_disk.call("start")
    try:
        loaded = from_disk.sample()
    finally:
        from_disk.call("stop")
    assert (loaded.token_ids, loaded.log_probs) == (whole[1].token_ids, pytest.approx(whole[1].log_probs, abs=1e-5))

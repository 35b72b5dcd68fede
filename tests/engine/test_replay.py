"""A real engine's choice of experts, replayed by a real trainer."""
import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.engine.api import GenerateRequest
from mrl.engine.sglang import SglangServer
from tests.stream.engines import engine_python
from tests.stream.tiny import EXPERTS, make_experiment, make_model, weights
from tests.torchrun import torchrun
from tests.trainer.tiny import TEMPERATURE

pytestmark = pytest.mark.slow


def sampled(model: Path, log: Path, prompts: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """What SGLang answers, as fields of a trainer's samples, and which tokens it sampled."""
    experiment = make_experiment(model, engine_python("sglang"), rollout={"engine": "sglang"},
                                 trainer={"moe_routing": "replay"})
    server = SglangServer(experiment, 0, "run", 1, log, (), load_weights=True)

    async def ask():
        try:
            await server.start()
            # Twice: the second time, prompts come from the prefix cache.
            requests = [GenerateRequest(prompt, seed=seed, max_tokens=20, temperature=TEMPERATURE)
                        for seed in range(2) for prompt in prompts]
            return [await server.generate(request) for request in requests]
        finally:
            await server.stop()

    samples = []
    for prompt, (token_ids, log_probs, _, experts) in zip(prompts * 2, asyncio.run(ask()), strict=True):
        chosen = torch.from_numpy(experts)
        tokens = torch.tensor([*prompt, *token_ids])
        samples.append({"tokens": tokens, "sampled": torch.arange(len(tokens)) >= len(prompt),
                        "log_probs": torch.tensor([0.0] * len(prompt) + log_probs),
                        "experts": torch.cat([chosen, torch.full_like(chosen[:1], -1)])})
    return samples


def test_replay_leaves_of_the_difference_what_weights_make(tmp_path):
    model, other = make_model(tmp_path / "model", EXPERTS), tmp_path / "other"
    tensors = weights(model, 1)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(model, other)
    # As rounding moves scores, only further, so that a few dozen tokens are enough to see experts change.
    noise = torch.Generator().manual_seed(2)
    save_file({name: tensor + 0.02 * torch.randn(tensor.shape, generator=noise) if name.endswith("mlp.gate.weight")
               else tensor for name, tensor in load_file(model / "model.safetensors").items()},
              other / "model.safetensors", metadata={"format": "pt"})
    prompts = [torch.randint(0, 60, (length,), generator=noise).tolist() for length in (5, 11, 17, 30)]
    torch.save(sampled(model, tmp_path / "log", prompts), tmp_path / "samples.pt")
    script = Path(__file__).with_name("run_replay.py")
    output = torchrun(script, 1, model, other, tmp_path / "samples.pt", timeout_s=600)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("FOUND")).removeprefix("FOUND"))
    assert found["same"] > 0.99, "layers or tokens are mixed up"
    assert found["replay"] < 0.5 * found["own"], found

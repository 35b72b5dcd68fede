"""A real engine's choice of experts, replayed by a real trainer."""
import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrl.engine.api import GenerateRequest
from mrl.engine.sglang import SglangServer
from tests.stream.engines import TOLERANCE, engine_python
from tests.stream.tiny import EXPERTS, make_experiment, make_model, weights
from tests.torchrun import torchrun
from tests.trainer.tiny import TEMPERATURE

pytestmark = pytest.mark.slow
PROMPTS = (5, 11, 17, 30)


def sampled(model: Path, log: Path, prompts: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """What SGLang answers, as fields of a trainer's samples, and which tokens it sampled."""
    experiment = make_experiment(model, engine_python("sglang"), rollout={"engine": "sglang"},
                                 trainer={"moe_routing": "replay"})
    server = SglangServer(experiment, 0, "run", 1, log, (), load_weights=True)

    async def ask():
        try:
            await server.start()
            # Twice: the second time, prompts come from the prefix cache.
            return [await server.generate(GenerateRequest(prompt, seed=seed, max_tokens=20, temperature=TEMPERATURE))
                    for seed in range(2) for prompt in prompts]
        finally:
            await server.stop()

    samples = []
    for prompt, (token_ids, log_probs, _, experts) in zip(prompts * 2, asyncio.run(ask()), strict=True):
        chosen, tokens = torch.from_numpy(experts), torch.tensor([*prompt, *token_ids])
        samples.append({"tokens": tokens, "sampled": torch.arange(len(tokens)) >= len(prompt),
                        "log_probs": torch.tensor([0.0] * len(prompt) + log_probs),
                        "experts": torch.cat([chosen, torch.full_like(chosen[:1], -1)])})
    return samples


def test_the_engines_choice_makes_the_engines_log_probs_and_another_does_not(tmp_path):
    model = make_model(tmp_path / "model", EXPERTS)
    save_file(weights(model, 1), model / "model.safetensors", metadata={"format": "pt"})
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 60, (length,), generator=draw).tolist() for length in PROMPTS]
    torch.save(sampled(model, tmp_path / "log", prompts), tmp_path / "samples.pt")
    output = torchrun(Path(__file__).with_name("run_replay.py"), 1, model, tmp_path / "samples.pt", timeout_s=600)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("FOUND")).removeprefix("FOUND"))
    assert found["same"] > 0.99, "layers or tokens are mixed up"
    assert found["engine"] < TOLERANCE < 0.01 * found["neighbours"], found

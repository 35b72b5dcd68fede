"""The critic's section, its model and its memory."""
import json

import pytest

from mrl import check as plans
from mrl.config.load import load_experiment
from mrl.preflight import preflight_plan

PPO = "algorithm.name=gae"


def found(experiment_file, *overrides) -> dict:
    """Texts of the problems by key, without the engine's Python."""
    problems, _ = preflight_plan(load_experiment(experiment_file, overrides), None)
    return {problem.key: str(problem) for problem in problems}


@pytest.fixture
def critic(folder, hf_config):
    """Writes a model directory with a changed config.json; returns the override that names it."""
    def make(**changes) -> str:
        (folder / "critic").mkdir()
        (folder / "critic" / "config.json").write_text(json.dumps({**hf_config, **changes}))
        (folder / "critic" / "model.safetensors").touch()
        (folder / "critic" / "tokenizer.json").write_text("{}")
        return f"algorithm.critic.path={folder}/critic"
    return make


def test_a_smaller_critic_is_fine(experiment_file, critic):
    assert found(experiment_file, PPO) == {}
    assert found(experiment_file, PPO, critic(num_hidden_layers=2, hidden_size=32, vocab_size=80)) == {}


def test_a_critic_whose_embedding_is_padded_less_is_fine(experiment_file, critic):
    assert found(experiment_file, PPO, critic(vocab_size=69)) == {}


@pytest.mark.parametrize(("overrides", "key", "words"), [
    ([PPO, "algorithm.critic.warmup_steps=4"], "algorithm.critic.warmup_steps", "less than loop.steps (4)"),
    (["algorithm.critic.value_clip=0.5"], "algorithm.critic.value_clip", "nothing with algorithm.name grpo"),
    (["algorithm.critic.optimizer.lr=1e-4"], "algorithm.critic.optimizer.lr", "set algorithm.name: gae"),
    ([PPO, "algorithm.critic.optimizer.min_lr=1"], "algorithm.critic.optimizer.min_lr",
     "at most algorithm.critic.optimizer.lr (1e-05)"),
    ([PPO, "algorithm.critic.optimizer={schedule: linear, warmup_steps: 4}"],
     "algorithm.critic.optimizer.warmup_steps", "less than the run's 4 optimizer steps"),
    # The policy has 3 optimizer steps of its own then.
    ([PPO, "algorithm.critic.warmup_steps=1", "trainer.optimizer={schedule: linear, warmup_steps: 3}"],
     "trainer.optimizer.warmup_steps", "less than the run's 3 optimizer steps"),
    ([PPO, "algorithm.critic.path=./nowhere"], "algorithm.critic.path", "no such directory"),
])
def test_refused(experiment_file, overrides, key, words):
    assert words in found(experiment_file, *overrides)[key]


@pytest.mark.parametrize(("changes", "words"), [
    (dict(num_attention_heads=3, num_key_value_heads=3), "tp 2 does not divide num_attention_heads 3"),
    (dict(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    (dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40),
     "its experts need trainer.parallel.sequence_parallel: true"),
])
def test_a_critic_that_does_not_fit(experiment_file, critic, changes, words):
    assert words in found(experiment_file, PPO, critic(**changes))["algorithm.critic.path"]


@pytest.mark.parametrize(("file", "words"), [
    ("model.safetensors", "model directory without weights"), ("tokenizer.json", "a model directory with a tokenizer")])
def test_a_critic_that_lacks_a_file(experiment_file, critic, folder, file, words):
    override = critic()
    (folder / "critic" / file).unlink()
    assert words in found(experiment_file, PPO, override)["algorithm.critic.path"]


def test_its_memory_counts(experiment_file, hf_config):
    def memory(*overrides, critic_config=None):
        exp = load_experiment(experiment_file, overrides)
        return plans.rank_memory(plans.resolve_plan(exp, hf_config, 0, critic_config), 0)

    alone, both = memory(), memory(PPO)
    assert both.weights == 2 * alone.weights and both.optimizer == 2 * alone.optimizer  # the output is the embedding
    assert both.sync == alone.sync
    smaller = memory(PPO, critic_config={**hf_config, "tie_word_embeddings": False, "num_hidden_layers": 2})
    layers = 4 * 4 * ((128 * 48 + 64 * 48 + 3 * 112 * 48) // 2 + 48 + 48 + 16 + 16)
    assert smaller.weights == 2 * alone.weights - layers // 2

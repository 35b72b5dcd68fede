"""Checks of how the trainers save memory and time."""
import pytest

from mrl import check as plans
from mrl.config.checks import check_experiment
from mrl.config.load import load_experiment
from mrl.config.resume import resume_problems

SELECTIVE = "trainer.recompute=selective"


def found(experiment_file, hf_config, *overrides) -> dict:
    problems = check_experiment(load_experiment(experiment_file, overrides), hf_config)
    return {problem.key: str(problem) for problem in problems}


@pytest.mark.parametrize(("overrides", "key", "words"), [
    (["trainer.optimizer.grad_dtype=bfloat16"], "trainer.optimizer.grad_dtype", "float32 with model.dtype float32"),
    (["trainer.optimizer.cpu_offload=true"], "trainer.optimizer.cpu_offload", "false with cluster.device cpu"),
    (["algorithm.name=gae", "algorithm.critic.optimizer.cpu_offload=true"],
     "algorithm.critic.optimizer.cpu_offload", "false with cluster.device cpu"),
    (["algorithm.name=gae", "algorithm.critic.optimizer.grad_dtype=bfloat16"],
     "algorithm.critic.optimizer.grad_dtype", "float32 with model.dtype float32"),
    (["trainer.overlap_param_gather=true"], "trainer.overlap_param_gather", "trainer.overlap_grad_reduce: true"),
    (["trainer.recompute_layers=2"], "trainer.recompute_layers", "with trainer.recompute none"),
    ([SELECTIVE, "trainer.recompute_modules=[mlp, mla_up_proj]"], "trainer.recompute_modules.1",
     "Qwen3ForCausalLM"),
    ([SELECTIVE, "trainer.recompute_modules=[shared_experts]"], "trainer.recompute_modules.0", "Qwen3ForCausalLM"),
])
def test_what_cannot_work(experiment_file, hf_config, overrides, key, words):
    problem, = found(experiment_file, hf_config, *overrides).items()
    assert problem[0] == key and words in problem[1]


def test_experts_are_computed_again_once(experiment_file, hf_config):
    hf_config |= {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40}
    sequence_parallel = "trainer.parallel.sequence_parallel=true"
    parts = "trainer.recompute_modules=[{}shared_experts]"
    assert found(experiment_file, hf_config, sequence_parallel, SELECTIVE, parts.format("")) == {}
    (key, text), = found(experiment_file, hf_config, sequence_parallel, SELECTIVE, parts.format("moe, ")).items()
    assert key == "trainer.recompute_modules" and "moe or shared_experts" in text


def test_replay_takes_experts_and_an_engine_that_tells_them(experiment_file, hf_config):
    replay, sglang = "trainer.moe_routing=replay", "rollout.engine=sglang"
    (key, text), = found(experiment_file, hf_config, replay, sglang).items()
    assert key == "trainer.moe_routing" and "the model has no experts" in text
    hf_config |= {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 40}
    experts = [replay, "trainer.parallel.sequence_parallel=true"]
    assert found(experiment_file, hf_config, *experts, sglang) == {}
    (key, text), = found(experiment_file, hf_config, *experts).items()
    assert key == "trainer.moe_routing" and "rollout.engine: sglang, or GPUs" in text


def test_what_can(experiment_file, hf_config):
    assert found(experiment_file, hf_config, "trainer.overlap_grad_reduce=true", "trainer.overlap_param_gather=true",
                 "trainer.recompute=full", "trainer.recompute_layers=2") == {}
    assert found(experiment_file, hf_config, SELECTIVE) == {}


def test_gradients_in_bfloat16_take_half_the_memory(experiment_file, hf_config):
    def gradients(*overrides) -> int:
        exp = load_experiment(experiment_file, ["model.dtype=bfloat16", *overrides])
        return plans.rank_memory(plans.resolve_plan(exp, hf_config, 0), 0).gradients

    assert 2 * gradients("trainer.optimizer.grad_dtype=bfloat16") == gradients()


def test_an_optimizer_on_the_host_takes_none_of_the_device(invoke, experiment_file, hf_config):
    def memory(*overrides: str) -> plans.RankMemory:
        exp = load_experiment(experiment_file, ["model.dtype=bfloat16", "cluster.device=cuda", *overrides])
        return plans.rank_memory(plans.resolve_plan(exp, hf_config, None), 0)

    offload, gae = "trainer.optimizer.cpu_offload=true", "algorithm.name=gae"
    there, here = memory(), memory(offload)
    assert there.host == here.optimizer == 0 and here.weights == there.weights
    assert here.host == here.weights // 2 * 16  # fp32: two moments, master, gradient
    assert memory(gae, offload).optimizer == memory(gae).optimizer // 2, "the critic's stays"
    assert memory(gae, offload).host == here.host
    result = invoke("check", experiment_file, "model.dtype=bfloat16", "cluster.device=cuda", offload)
    assert result.exit_code == 0 and "cpu_offload adds" in result.output, result.output


def test_a_run_may_be_resumed_with_other_activations_kept_but_not_with_other_shards(experiment_file):
    before = load_experiment(experiment_file)
    assert resume_problems(before, load_experiment(experiment_file, [SELECTIVE])) == []
    problem, = resume_problems(before, load_experiment(experiment_file, ["trainer.overlap_grad_reduce=true"]))
    assert problem.key == "trainer.overlap_grad_reduce"

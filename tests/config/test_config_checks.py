"""Checks across keys: one case each, found by key and by the words a user needs."""
from dataclasses import replace

import pytest

from mrl.config.checks import check_evaluation, check_experiment, resolved_device
from mrl.config.context import context_limit
from mrl.config.load import load_experiment
from mrl.reshard.families.qwen3 import QWEN3

OVERLAP = ["loop.mode=one_step_overlap"]
COLOCATED = ["loop.mode=colocated_sync", "cluster.trainer_gpus=null", "cluster.rollout_gpus=null"]


def found(experiment_file, hf_config, *overrides, visible_gpus=None) -> dict:
    """Texts of the problems by key."""
    exp = load_experiment(experiment_file, overrides)
    texts = {}
    for problem in check_experiment(exp, hf_config, visible_gpus):
        texts[problem.key] = texts.get(problem.key, "") + str(problem)
    return texts


def test_the_valid_experiment_has_no_problems(experiment_file, hf_config):
    assert found(experiment_file, hf_config) == {}
    assert found(experiment_file, hf_config, *COLOCATED, "cluster.gpus=2") == {}


# The model has 4 heads, 2 KV heads of 16, 4 layers, intermediate size 112, vocabulary 70 (padded by engines to 128).
@pytest.mark.parametrize("overrides, key, words", [
    (["trainer.parallel.tp=3", "cluster.trainer_gpus=3"], "trainer.parallel.tp", "divide num_attention_heads 4"),
    (["trainer.parallel.tp=3", "cluster.trainer_gpus=3"], "trainer.parallel.tp", "num_key_value_heads 2"),
    (["trainer.parallel.tp=3", "cluster.trainer_gpus=3"], "trainer.parallel.tp", "intermediate_size 112"),
    (["trainer.parallel.pp=3", "cluster.trainer_gpus=6"], "trainer.parallel.pp", "num_hidden_layers 4"),
    (["trainer.parallel.cp=3"], "cluster.trainer_gpus", "(trainer.parallel.tp * cp * pp)"),
    (["rollout.parallel.tp=3", "cluster.rollout_gpus=3"], "rollout.parallel.tp", "divide num_attention_heads 4"),
    (["rollout.parallel.tp=7", "cluster.rollout_gpus=7"], "rollout.parallel.tp", "padded vocabulary (128)"),
    (["trainer.parallel.tp=1", "trainer.parallel.sequence_parallel=true"], "trainer.parallel.sequence_parallel",
     "trainer.parallel.tp 1"),
    (["data.max_prompt_tokens=200", "rollout.sampling.max_response_tokens=57", "batch.max_tokens_per_microbatch=512"],
     "rollout.sampling.max_response_tokens", "at most 56"),
    (["trainer.parallel.tp=3", "cluster.trainer_gpus=3"], "trainer.parallel.tp", "use one of 1, 2, 4\n"),
    (["trainer.parallel.pp=3", "cluster.trainer_gpus=6"], "trainer.parallel.pp", "use one of 1, 2, 4\n"),
    (["rollout.sampling.stop_token_ids=[3, 70]"], "rollout.sampling.stop_token_ids", "= 70"),
])
def test_against_the_model(experiment_file, hf_config, overrides, key, words):
    assert words in found(experiment_file, hf_config, *overrides)[key] + "\n"


def test_more_tp_ranks_than_kv_heads_are_fine(experiment_file, hf_config):
    assert found(experiment_file, hf_config, "trainer.parallel.tp=4", "cluster.trainer_gpus=4",
                 "rollout.parallel.tp=4", "cluster.rollout_gpus=4") == {}


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 40}


@pytest.mark.parametrize("engine, sizes, key, words", [
    ("vllm", "{tp: 4, ep: 2}", "rollout.parallel.ep", "1 or rollout.parallel.tp (4) with rollout.engine vllm"),
    ("vllm", "{tp: 4, ep: 3}", "rollout.parallel.ep", "a divisor of rollout.parallel.tp (4)"),
    ("vllm", "{tp: 4, dp: 2}", "rollout.parallel.dp", "rollout.engine: sglang"),
    ("sglang", "{tp: 4, dp: 3}", "rollout.parallel.dp", "use one of 1, 2, 4"),
    ("sglang", "{tp: 8, ep: 8, dp: 2}", "rollout.parallel.ep", "ep 8 does not divide the number of experts 4"),
    ("sglang", "{tp: 8, ep: 8, dp: 2}", "rollout.parallel.ep", "use one of 1, 2, 4"),
    ("sglang", "{tp: 16, ep: 1, dp: 4}", "rollout.parallel.tp", "etp 16 does not divide moe_intermediate_size 40"),
    ("sglang", "{tp: 16, ep: 4, dp: 2}", "rollout.parallel.tp", "tp 8 does not divide num_attention_heads 4"),
])
def test_an_engine_is_split_as_it_can_be(experiment_file, hf_config, engine, sizes, key, words):
    gpus = sizes.split(",")[0].split()[1]
    problems = found(experiment_file, {**hf_config, **MOE}, f"rollout.engine={engine}", f"rollout.parallel={sizes}",
                     f"cluster.rollout_gpus={gpus}", "cluster.device=cuda")
    assert words in problems[key] and [name for name in problems if name.startswith("rollout.parallel")] == [key]


@pytest.mark.parametrize("engine, sizes", [
    ("vllm", "{tp: 4, ep: 4}"), ("sglang", "{tp: 4, ep: 2}"), ("sglang", "{tp: 4, ep: 4, dp: 4}"),
    ("sglang", "{tp: 8, ep: 4, dp: 2}")])
def test_engines_of_experts(experiment_file, hf_config, engine, sizes):
    gpus = sizes.split(",")[0].split()[1]
    assert found(experiment_file, {**hf_config, **MOE}, f"rollout.engine={engine}", f"rollout.parallel={sizes}",
                 "trainer.parallel.sequence_parallel=true", f"cluster.rollout_gpus={gpus}", "cluster.device=cuda") == {}


def test_attention_is_not_repeated_on_the_cpu(experiment_file, hf_config):
    problems = found(experiment_file, hf_config, "rollout.engine=sglang", "rollout.parallel={tp: 2, dp: 2}",
                     "cluster.rollout_gpus=2")
    assert "1 with cluster.device cpu" in problems["rollout.parallel.dp"]


def test_a_model_without_experts_has_none_to_deal_out(experiment_file, hf_config):
    assert "the model has none" in found(experiment_file, hf_config, "rollout.engine=sglang",
                                         "rollout.parallel={tp: 2, ep: 2}", "cluster.rollout_gpus=2")[
        "rollout.parallel.ep"]


def test_a_model_that_cannot_be_trained(experiment_file, hf_config, monkeypatch):
    untrainable = replace(QWEN3, untrainable="it is too large")
    monkeypatch.setattr("mrl.reshard.spec.family_of", lambda hf_config: untrainable)
    assert "Qwen3ForCausalLM cannot: it is too large" in found(experiment_file, hf_config)["model.path"]
    exp = load_experiment(experiment_file, ["eval.datasets.heldout.path=heldout.jsonl"])
    assert check_evaluation(exp, hf_config, visible_gpus=0) == []


PARALLEL = "trainer.parallel."


@pytest.mark.parametrize("overrides, key, words", [
    (["vpp=2"], "vpp", "vpp 2 needs pp of at least 2"),
    (["pp=2", "vpp=3"], "vpp", "vpp 3 does not divide the 2 layers of a stage"),
    (["pp=2", "vpp=3"], "vpp", "use one of 1, 2\n"),
    (["first_stage_layers=1"], "pp", "first_stage_layers 1 needs pp of at least 2"),
    (["pp=3", "first_stage_layers=1"], "pp", "3 layers, what first_stage_layers 1 leave of num_hidden_layers 4, do"),
    (["pp=3", "first_stage_layers=1"], "pp", "use one of 2, 4\n"),
    (["pp=2", "last_stage_layers=4"], "pp", "change the layers of the other stages"),
    (["ep=2"], "ep", "ep 2 divides experts, and the model has none"),
], ids=str)
def test_pipelines_and_dense_models(experiment_file, hf_config, overrides, key, words):
    changes = [PARALLEL + change for change in overrides]
    problems = found(experiment_file, hf_config, "cluster.trainer_gpus=12", *changes)
    assert list(problems) == [PARALLEL + key]
    assert words in problems[PARALLEL + key] + "\n"


@pytest.mark.parametrize("overrides, key, words", [
    ([], PARALLEL + "sequence_parallel", "the experts of Qwen3MoeForCausalLM: each rank routes its own tokens"),
    (["ep=3", "sequence_parallel=true"], PARALLEL + "ep", "ep 3 does not divide the number of experts 4"),
    (["etp=3", "sequence_parallel=true"], PARALLEL + "etp", "etp 3 does not divide moe_intermediate_size 40"),
    (["ep=4", "etp=4", "sequence_parallel=true"], "cluster.trainer_gpus",
     "a multiple of 16 (of trainer.parallel.tp * cp * pp and of trainer.parallel.ep * etp * pp)"),
], ids=str)
def test_experts(experiment_file, hf_config, overrides, key, words):
    hf_config.update(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2,
                     moe_intermediate_size=40)
    changes = [PARALLEL + change for change in overrides]
    problems = found(experiment_file, hf_config, "cluster.trainer_gpus=12", *changes)
    assert list(problems) == [key]
    assert words in problems[key]


def test_a_balancing_loss_needs_experts(experiment_file, hf_config):
    problems = found(experiment_file, hf_config, "trainer.moe.aux_loss_coef=0.01")
    assert "the model has no experts to balance" in problems["trainer.moe.aux_loss_coef"]


def test_unsupported_architecture_lists_known_ones(experiment_file, hf_config):
    hf_config["architectures"] = ["GPT2LMHeadModel"]
    text = found(experiment_file, hf_config)["model.path"]
    assert "GPT2LMHeadModel" in text and "Qwen3ForCausalLM" in text


@pytest.mark.parametrize("rope, words", [
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic' is not supported"),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "scales attention by 1.139"),
])
def test_rotary_embeddings_that_are_not_supported(experiment_file, hf_config, rope, words):
    hf_config["rope_scaling"] = rope
    assert words in found(experiment_file, hf_config)["model.path"]


@pytest.mark.parametrize("overrides, key, words", [
    (["cluster.trainer_gpus=null"], "cluster.trainer_gpus", "loop.mode is one_step_overlap"),
    (["cluster.rollout_gpus=null"], "cluster.rollout_gpus", "loop.mode is one_step_overlap"),
    (["cluster.gpus=4"], "cluster.gpus", "uses cluster.trainer_gpus and cluster.rollout_gpus"),
    (["loop.mode=colocated_sync"], "cluster.gpus", "loop.mode is colocated_sync"),
    (["loop.mode=colocated_sync"], "cluster.rollout_gpus", "remove cluster.rollout_gpus"),
    (["cluster.trainer_gpus=3"], "cluster.trainer_gpus", "a multiple of 2"),
    (["rollout.parallel.tp=2"], "cluster.rollout_gpus", "a multiple of 2"),
    ([*COLOCATED, "cluster.gpus=3"], "cluster.gpus", "a multiple of 2"),
    ([*COLOCATED, "cluster.gpus=2", "rollout.parallel.tp=4"], "cluster.gpus", "a multiple of 4 (rollout.parallel.tp)"),
    (["rollout.port=65535", "cluster.rollout_gpus=2"], "rollout.port", "at most 65534"),
])
def test_partitions(experiment_file, hf_config, overrides, key, words):
    assert words in found(experiment_file, hf_config, *overrides)[key]


def test_too_few_gpus(experiment_file, hf_config):
    cuda = ["cluster.device=cuda"]
    assert found(experiment_file, hf_config, *cuda, visible_gpus=3) == {}
    text = found(experiment_file, hf_config, *cuda, visible_gpus=2)["cluster.trainer_gpus"]
    assert "too few GPUs" in text and "need 3, 2 are visible" in text
    assert "need 3, 0 are visible" in found(experiment_file, hf_config, *cuda, visible_gpus=0)["cluster.device"]
    assert found(experiment_file, hf_config, *cuda, visible_gpus=None) == {}  # planned for another machine
    assert found(experiment_file, hf_config, visible_gpus=0) == {}  # on cpu the counts are processes


def test_auto_is_the_cpu_only_without_gpus(experiment_file, hf_config):
    exp = load_experiment(experiment_file, ["cluster.device=auto"])
    assert [resolved_device(exp, gpus) for gpus in (0, 2, None)] == ["cpu", "cuda", "cuda"]


@pytest.mark.parametrize("overrides", [["cluster.device=cpu"], [*COLOCATED, "cluster.gpus=2", "cluster.device=cuda"]])
def test_nccl_needs_a_gpu_on_each_side(experiment_file, hf_config, overrides):
    assert "use auto or gloo" in found(experiment_file, hf_config, *overrides, "sync.transport=nccl")["sync.transport"]


@pytest.mark.parametrize("overrides", [["cluster.device=cuda"], [*COLOCATED, "cluster.gpus=2", "cluster.device=cpu"]])
def test_cuda_ipc_needs_a_shared_gpu(experiment_file, hf_config, overrides):
    ipc = [*overrides, "sync.transport=cuda_ipc"]
    assert "trainers and engines share none" in found(experiment_file, hf_config, *ipc)["sync.transport"]
    assert "sync.transport" not in found(experiment_file, hf_config, *COLOCATED, "cluster.gpus=2",
                                         "cluster.device=cuda", "sync.transport=cuda_ipc")


@pytest.mark.parametrize("key, override, words", [
    ("sync.strategy", "sync.strategy=broadcast", "multi_sender with sync.transport cuda_ipc"),
    ("sync.strategy", "sync.strategy=sharded", "use auto, or another sync.transport"),
    ("cluster.gpus_per_node", "cluster.gpus_per_node=3", r"a multiple of rollout.parallel.tp (2)"),
])
def test_with_cuda_ipc_a_worker_receives_from_its_own_gpu(key, override, words, experiment_file, hf_config):
    ipc = [*COLOCATED, "cluster.gpus=4", "cluster.device=cuda", "sync.transport=cuda_ipc", "rollout.parallel.tp=2"]
    assert words in found(experiment_file, hf_config, *ipc, override)[key]
    assert not found(experiment_file, hf_config, *ipc, "sync.strategy=multi_sender").keys() & {key, "sync.transport"}


def test_changes_alone_do_not_go_through_files(experiment_file, hf_config):
    assert "set sync.delta: false" in found(experiment_file, hf_config, "sync.delta=true",
                                            "sync.transport=disk")["sync.delta"]
    assert found(experiment_file, hf_config, "sync.delta=true") == {}


def test_a_directory_for_weights_goes_with_the_disk_transport(experiment_file, hf_config):
    assert "writes no files" in found(experiment_file, hf_config, "sync.disk_dir=/somewhere")["sync.disk_dir"]
    assert found(experiment_file, hf_config, "sync.disk_dir=/somewhere", "sync.transport=disk") == {}


def test_bfloat16_on_cpu(experiment_file, hf_config):
    assert "float32 on cpu" in found(experiment_file, hf_config, "model.dtype=bfloat16")["model.dtype"]
    assert found(experiment_file, hf_config, "model.dtype=bfloat16", "cluster.device=cuda") == {}


@pytest.mark.parametrize("overrides, key, words", [
    (["batch.minibatches=3"], "batch.minibatches", "use one of 1, 2, 4, 8"),
    (["batch.minibatches=8", "cluster.trainer_gpus=16"], "batch.minibatches", "at least 8 samples"),
    (["batch.max_tokens_per_microbatch=31"], "batch.max_tokens_per_microbatch", "at least 32"),
    (["rollout.sampling.temperature=0"], "rollout.sampling.temperature", "that of eval.datasets may be 0"),
    (["rollout.sampling.top_p=0.95"], "rollout.sampling.top_p", "full distribution"),
    (["rollout.sampling.top_k=20"], "rollout.sampling.top_k", "-1 (all tokens)"),
    (["batch.samples_per_prompt=1"], "batch.samples_per_prompt", "group of one"),
    (["algorithm.old_log_prob=recompute", "algorithm.correction.kind=none"], "algorithm.correction.kind", "truncate"),
    (["algorithm.correction.cap=3.0"], "algorithm.correction.cap", "change algorithm.old_log_prob"),
    (["algorithm.old_log_prob=recompute", "algorithm.correction.floor=2.0"], "algorithm.correction.floor",
     "correction.cap (2.0)"),
    (["algorithm.name=rloo", "batch.samples_per_prompt=1"], "batch.samples_per_prompt", "algorithm.name rloo"),
    (["algorithm.name=pass_at_k", "algorithm.std=biased", "batch.samples_per_prompt=4"], "algorithm.pass_k", "smaller"),
    (["algorithm.name=pass_at_k"], "algorithm.std", "set algorithm.std: biased"),
    (["algorithm.name=rloo", "algorithm.std=biased"], "algorithm.std", "algorithm.name rloo"),
    (["algorithm.pass_k=2"], "algorithm.pass_k", "algorithm.name grpo"),
    (["algorithm.gae.lam=0.9"], "algorithm.gae.lam", "algorithm.name grpo"),
    (["algorithm.policy_loss=reinforce"], "algorithm.old_log_prob", "set algorithm.old_log_prob: recompute"),
    (["algorithm.policy_loss=reinforce", "batch.epochs=2"], "batch.epochs", "algorithm.policy_loss: ppo"),
    (["algorithm.policy_loss=reinforce", "batch.minibatches=2"], "batch.minibatches", "algorithm.policy_loss: ppo"),
    (["algorithm.policy_loss=reinforce", "algorithm.clip.high=0.3"], "algorithm.clip.high", "it has no ratio"),
    (["algorithm.policy_loss=cispo", "algorithm.clip.dual=3.0"], "algorithm.clip.dual", "always bounded"),
    (["algorithm.clip.dual=1.2"], "algorithm.clip.dual", "1.2): it bounds"),
    (["algorithm.constant_tokens=100"], "algorithm.constant_tokens", "algorithm.aggregation token_mean"),
    (["algorithm.kl={coef: 0.1, estimator: k1}"], "algorithm.kl.estimator", "averages to 0"),
    (["algorithm.kl={coef: 0.1, straight_through: true, place: reward}"], "algorithm.kl.straight_through",
     "no gradient"),
    (["algorithm.kl={coef: 0.1, straight_through: true, estimator: k2}"], "algorithm.kl.straight_through", "by itself"),
    (["algorithm.kl.target=0.1"], "algorithm.kl.target", "adapting multiplies it"),
    (["algorithm.kl={coef: 0.1, horizon: 100}"], "algorithm.kl.horizon", "coef is fixed"),
    (["algorithm.kl.reference_every=10"], "algorithm.kl.reference_every", "no reference"),
    (["algorithm.kl.place=reward"], "algorithm.kl.place", "no reference"),
    (["rollout.args=[--seed-oss, --dtype=half]"], "rollout.args.1", "it comes from model.dtype"),
    (["rollout.args=[-tp, '2']"], "rollout.args.0", "it comes from rollout.parallel.tp"),
    (["rollout.args=['--max_model_len', '64']"], "rollout.args.0", "--max-model-len is mrl's own"),
    (['rollout.engine=sglang', "rollout.args=[--tp, '2']"], "rollout.args.0", "it comes from rollout.parallel.tp"),
    (["algorithm.clip.low=1.5"], "algorithm.clip.low", "at most 1"),
    (["trainer.optimizer.lr=1e-5", "trainer.optimizer.min_lr=1e-4"], "trainer.optimizer.min_lr", "lr (1e-05)"),
    (["trainer.optimizer.schedule=cosine", "trainer.optimizer.warmup_steps=4"], "trainer.optimizer.warmup_steps",
     "4 optimizer steps"),
    (["eval.datasets.long={path: x, sampling: {max_response_tokens: 250}}"],
     "eval.datasets.long.sampling.max_response_tokens", "at most 240"),
    (["eval.datasets.own={path: x, reward: {kind: custom, function: mine}}"],
     "eval.datasets.own.reward.parts.custom.function", "'path.py:function'"),
    (["eval.every=2"], "eval.datasets", "eval.every is 2"),
])
def test_settings_against_each_other(experiment_file, hf_config, overrides, key, words):
    assert words in found(experiment_file, hf_config, *overrides)[key]


def test_recompute_without_correction_is_fine_on_fresh_samples(experiment_file, hf_config):
    assert found(experiment_file, hf_config, *COLOCATED, "cluster.gpus=2", "algorithm.old_log_prob=recompute",
                 "algorithm.correction.kind=none") == {}


def test_correction_as_a_resolved_file_spells_it_out_is_fine(experiment_file, hf_config):
    assert found(experiment_file, hf_config, "algorithm.correction={kind: truncate, cap: 2.0}") == {}
    assert found(experiment_file, hf_config, "algorithm.correction.cap=3.0", "algorithm.old_log_prob=recompute") == {}


@pytest.mark.parametrize("algorithm", [
    "{name: grpo, std: none, aggregation: constant, constant_tokens: 100}",
    "{name: pass_at_k, std: biased, pass_k: 2}",
    "{name: reinforce_plus_plus, kl: {coef: 0.01, estimator: k1, place: reward, target: 0.1, horizon: 100}}",
    "{name: reinforce_plus_plus_baseline, kl: {coef: 0.01, estimator: k1, straight_through: true}}",
    "{name: rloo, policy_loss: gspo, clip: {low: 3e-4, high: 4e-4, dual: 3.0}, aggregation: sequence_mean}",
    "{name: grpo, policy_loss: cispo, clip: {low: 1.0, high: 2.0}, whiten: true}",
    "{policy_loss: reinforce, old_log_prob: recompute, correction: {kind: mask, level: sequence, cap: 5.0}}",
    "{kl: {coef: 0.01, estimator: k2, reference_every: 100}}",
])
def test_algorithms_that_work(experiment_file, hf_config, algorithm):
    assert found(experiment_file, hf_config, f"algorithm={algorithm}") == {}


def test_sharing_gpus_needs_a_share(experiment_file, hf_config):
    alone = [*COLOCATED, "cluster.gpus=2", "cluster.device=cuda"]
    assert found(experiment_file, hf_config, *alone) == {}  # they take turns
    for kept in ("loop.sleep_engines=false", "loop.offload_trainers=false"):
        assert "--gpu-memory-utilization=0.35" in found(experiment_file, hf_config, *alone, kept)["rollout.args"]
    shared = [*alone[:-1], "loop.sleep_engines=false", alone[-1]]
    for arguments in ("[--gpu-memory-utilization=0.3]", "[--gpu_memory_utilization, '0.3']"):
        assert found(experiment_file, hf_config, *shared, f"rollout.args={arguments}") == {}
    sglang = [*shared, "rollout.engine=sglang"]
    assert "--mem-fraction-static=0.35" in found(experiment_file, hf_config, *sglang)["rollout.args"]
    assert found(experiment_file, hf_config, *sglang, "rollout.args=[--mem-fraction-static=0.3]") == {}
    assert found(experiment_file, hf_config, *shared[:-1]) == {}  # on cpu
    assert found(experiment_file, hf_config, "cluster.device=cuda") == {}  # partitions of their own


@pytest.mark.parametrize("key", ["loop.sleep_engines", "loop.offload_trainers"])
def test_memory_is_handed_over_only_where_it_is_shared(experiment_file, hf_config, key):
    shared = [*COLOCATED, "cluster.gpus=2"]
    assert found(experiment_file, hf_config, *shared, "cluster.device=cuda", f"{key}=true") == {}
    for alone in ([*shared, "cluster.device=cpu"], ["cluster.device=cuda"]):
        assert key in found(experiment_file, hf_config, *alone, f"{key}=true")
        assert found(experiment_file, hf_config, *alone, f"{key}=false") == {}


def test_what_does_not_go_with_engines_that_sleep(experiment_file, hf_config):
    shared = [*COLOCATED, "cluster.gpus=2", "cluster.device=cuda", "rollout.args=[--gpu-memory-utilization=0.3]"]
    expandable = 'rollout.env={PYTORCH_CUDA_ALLOC_CONF: "max_split_size_mb:64,expandable_segments:True"}'
    problems = found(experiment_file, hf_config, *shared, "sync.delta=true", expandable)
    assert problems.keys() == {"sync.delta", "rollout.env.PYTORCH_CUDA_ALLOC_CONF"}
    assert found(experiment_file, hf_config, *shared, "sync.delta=true", expandable, "loop.sleep_engines=false") == {}


def test_all_at_once(experiment_file, hf_config):
    texts = found(experiment_file, hf_config, "batch.minibatches=3", "rollout.sampling.top_p=0.9",
                  "trainer.parallel.pp=3", "loop.mode=colocated_sync", "model.dtype=bfloat16")
    assert {"batch.minibatches", "rollout.sampling.top_p", "trainer.parallel.pp", "cluster.gpus",
            "model.dtype"} <= set(texts)


def test_context_limit_with_yarn():
    yarn = {"max_position_embeddings": 32768, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    assert context_limit(yarn) == 131072
    assert context_limit({"max_position_embeddings": 8192, "rope_scaling": None}) == 8192
    assert context_limit({}) is None


def test_fp8_needs_gpus_and_bfloat16_and_whole_blocks_for_every_worker(experiment_file, hf_config):
    fp8 = ["rollout.quantization=fp8", "cluster.device=cuda", "model.dtype=bfloat16"]
    hf_config.update(head_dim=64, intermediate_size=256)  # 4 heads, 2 KV heads
    assert found(experiment_file, hf_config, *fp8) == {}
    assert "model.dtype float32: engines compute" in found(experiment_file, hf_config, *fp8[:2], "model.dtype=float32")[
        "rollout.quantization"]
    assert "cluster.device cpu" in found(experiment_file, hf_config, fp8[0])["rollout.quantization"]
    two = found(experiment_file, hf_config, *fp8, "rollout.parallel.tp=2", "cluster.rollout_gpus=2")
    assert "would have k_proj in parts of 64 x 48, v_proj in parts of 64 x 48\n" in two["rollout.parallel.tp"]
    hf_config.update(intermediate_size=200)
    assert "gate_proj in parts of 200 x 48" in found(experiment_file, hf_config, *fp8)["rollout.parallel.tp"]

"""The command line: help, check, and how commands hand over and fail. The numbers are derived by hand."""
import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from mrl import check as plans
from mrl.config.keys import leaf_keys
from mrl.config.source import read_file
from mrl.config.load import load_experiment
from mrl.engine.versions import TESTED

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
EXPERIMENTS = [path for path in CONFIGS if "sft" not in path.name]


def row(output: str, first: str) -> list[str]:
    """Cells of the first table row that starts with `first`."""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if cells[0] == first and len(cells) > 1:
            return cells
    raise AssertionError(f"no row {first!r} in\n{output}")


def fake_module(monkeypatch, name: str, **members) -> None:
    """Stands in for a module that a command imports, so that the hand-over can be seen."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(parent), child, module, raising=False)


def test_help_lists_the_commands(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("train", "check", "export", "eval"):
        assert command in result.output
    for command in ("train", "check", "export", "eval"):
        assert invoke(command, "--help").exit_code == 0


def test_check_prints_the_plan(invoke, experiment_file):
    result = invoke("check", experiment_file, "cluster.nic_gb_s=0.001")
    assert result.exit_code == 0, result.output
    # 70*48 embedding; a layer: q 64*48, k and v 32*48, o 48*64, gate, up, down 112*48, norms 48+48+16+16; 48 at the end
    assert "105,296 parameters" in result.output
    assert row(result.output, "trainer")[1:] == ["CPU process 0-1", "2 trainer rank(s)"]
    assert row(result.output, "rollout")[1] == "CPU process 2"
    assert row(result.output, "samples a step")[1] == "8 prompts × 4 = 32"
    assert row(result.output, "longest sample")[1] == "32 tokens"
    assert row(result.output, "tokens a step")[1] == "at most 1,024"
    assert row(result.output, "microbatches")[1].startswith("at most 8 ")  # 128 tokens hold 4 of the 32 samples
    assert row(result.output, "bytes an engine worker receives")[1] == "411.31 KiB"  # 105296 * 4
    assert row(result.output, "lower bound")[1].startswith("0.421 s with 0.001 GB/s a GPU")
    assert row(result.output, "strategy")[1].startswith("broadcast (auto); predicted: broadcast 0.42")


def test_memory_of_a_rank(experiment_file, hf_config):
    plan = plans.resolve_plan(load_experiment(experiment_file), hf_config, visible_gpus=0)
    # half of 256 padded rows * 48; 4 layers of half of qkv 128*48, o 64*48, gate and up, down, and whole norms; 48
    held = 128 * 48 + 4 * ((128 * 48 + 64 * 48 + 3 * 112 * 48) // 2 + 48 + 48 + 16 + 16) + 48
    memory = plans.rank_memory(plan, 1)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * held, 4 * held, 8 * held)
    assert memory.sync == 105296 * 4  # it packs its half of the one bucket, at most all of it
    assert plans.rank_memory(plan, 0).sync == 3 * 105296 * 4  # the bucket twice, and what is gathered for it


def test_memory_of_what_is_kept_for_changes(invoke, experiment_file, hf_config):
    plan = plans.resolve_plan(load_experiment(experiment_file, ["sync.delta=true"]), hf_config, visible_gpus=0)
    assert plans.rank_memory(plan, 1).sync == 105296 * 4  # it sends nothing
    assert plans.rank_memory(plan, 0).sync == 4 * 105296 * 4  # once more than without
    result = invoke("check", str(experiment_file), "sync.delta=true")
    assert row(result.output, "kept for sync.delta")[1] == "what a rank sends, on the busiest 411.31 KiB"
    assert "kept for" not in invoke("check", str(experiment_file)).output


def test_check_shows_what_leaves_in_fp8(invoke, experiment_file, hf_config, folder):
    hf_config.update(head_dim=64, num_key_value_heads=4, intermediate_size=512)
    (folder / "model" / "config.json").write_text(json.dumps(hf_config))
    overrides = ["rollout.quantization=fp8", "model.dtype=bfloat16", "cluster.device=cuda", "sync.strategy=sharded",
                 "rollout.parallel.tp=2", "cluster.rollout_gpus=2", "trainer.parallel.tp=4", "cluster.trainer_gpus=4"]
    result = invoke("check", experiment_file, *overrides)
    assert result.exit_code == 0, result.output
    assert row(result.output, "fp8")[1].startswith("28 tensors, ") and "bfloat16; 16 travel whole" in "".join(
        result.output.replace("│", "").split("\n")).replace("  ", "")  # heads of 64 rows
    plan = plans.resolve_plan(load_experiment(experiment_file, overrides), hf_config, visible_gpus=None)
    plain = plans.resolve_plan(load_experiment(experiment_file, overrides[1:]), hf_config, visible_gpus=None)
    # A byte less for each element, and scales: two each for q, k, v and o, four each for gate, up and down.
    projections, scales = 4 * (4 * 256 + 3 * 512) * 48, 4 * (4 * 2 + 3 * 4)
    assert plain.sync.total_bytes - plan.sync.total_bytes == projections - 4 * scales
    assert plans.engine_weights(plain, 0) - plans.engine_weights(plan, 0) == (projections - 4 * scales) // 2
    assert "fp8" not in invoke("check", experiment_file, *overrides[1:]).output


def test_memory_in_bfloat16_with_two_replicas(experiment_file, hf_config):
    exp = load_experiment(experiment_file, ["model.dtype=bfloat16", "cluster.device=cuda", "cluster.trainer_gpus=4"])
    memory = plans.rank_memory(plans.resolve_plan(exp, hf_config, visible_gpus=None), 3)
    assert memory.gradients == 2 * memory.weights
    assert memory.optimizer == memory.weights // 2 * 12 // 2  # two moments and master weights, over two replicas


def test_check_shows_pipeline_stages_and_colocation(invoke, experiment_file):
    result = invoke("check", experiment_file, "trainer.parallel.pp=2", "loop.mode=colocated_sync", "cluster.gpus=4",
                 "cluster.trainer_gpus=null", "cluster.rollout_gpus=null", "rollout.parallel.tp=2")
    assert result.exit_code == 0, result.output
    assert row(result.output, "shared")[1] == "CPU process 0-3"
    assert row(result.output, "2")[:5] == ["2", "0", "1", "0", "2-3"]  # rank tp pp dp layers
    assert row(result.output, "links")[1].endswith("sender(s) to each engine's 2 worker(s)")


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_of_a_shared_gpu_by_turn(invoke, experiment_file, hf_config, tp):
    """Workers that join slices have buffers for them; others read the ranks' memory."""
    shared = [f"rollout.parallel.tp={tp}", "loop.mode=colocated_sync", "cluster.gpus=2", "cluster.trainer_gpus=null",
              "cluster.rollout_gpus=null",
              "cluster.device=cuda", "model.dtype=bfloat16", "rollout.args=[--gpu-memory-utilization=0.3]"]
    plan = plans.resolve_plan(load_experiment(experiment_file, shared), hf_config, visible_gpus=None)
    memory, turns = plans.rank_memory(plan, 0), plans.turn_memory(plan)
    ring = 2 * plan.sync.max_bucket_bytes if tp == 2 else 0
    worker = ring + plans.engine_weights(plan, 0)
    assert plan.exp.sync.transport == "cuda_ipc"
    assert turns == {"train": (memory.total, ring), "push": (memory.weights + memory.sync, worker),
                     "generate": (memory.sync, worker)}
    kept = load_experiment(experiment_file, [*shared, "loop.sleep_engines=false", "loop.offload_trainers=false"])
    turns = plans.turn_memory(plans.resolve_plan(kept, hf_config, visible_gpus=None))
    assert set(turns.values()) == {(memory.total, worker)}
    result = invoke("check", experiment_file, *shared)
    assert result.exit_code == 0, result.output
    assert row(result.output, "generate")[2].endswith(" + cache") and "cache" not in row(result.output, "push")[2]


def test_with_cuda_ipc_each_worker_has_the_rank_on_its_gpu_for_a_sender(invoke, experiment_file, hf_config):
    overrides = ["trainer.parallel.pp=2", "loop.mode=colocated_sync", "cluster.gpus=4", "cluster.trainer_gpus=null",
                 "cluster.rollout_gpus=null", "rollout.parallel.tp=2", "cluster.device=cuda",
                 "sync.transport=cuda_ipc", "rollout.args=[--gpu-memory-utilization=0.3]"]
    sync = plans.resolve_plan(load_experiment(experiment_file, overrides), hf_config, visible_gpus=None).sync
    assert {(brief.engines, tuple(one.sender for one in brief.slices)) for brief in sync.outline} == {
        ((0,), (0, 1)), ((1,), (2, 3))}
    result = invoke("check", experiment_file, *overrides)
    assert result.exit_code == 0, result.output
    strategy = row(result.output, "strategy")[1]  # and no other is considered
    assert strategy.startswith("multi_sender (auto); predicted: multi_sender ") and "," not in strategy


def test_check_shows_chunks_and_experts(invoke, experiment_file, folder):
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["Qwen3MoeForCausalLM"],
                                  "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}))
    parallel = "trainer.parallel={tp: 1, pp: 2, vpp: 2, ep: 2, etp: 2}"
    result = invoke("check", experiment_file, parallel, "cluster.trainer_gpus=8")
    assert result.exit_code == 0, result.output
    # rank tp pp dp layers sends experts: the second expert rank of the second stage, its second slice
    assert row(result.output, "7") == ["7", "0", "1", "3", "1-1, 3-3", "", "2-3 (slice 2 of 2)"]


def test_memory_of_experts_is_sharded_over_their_repetitions(experiment_file, hf_config):
    hf_config.update(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2,
                     moe_intermediate_size=40)
    overrides = ["trainer.parallel={tp: 1, ep: 2}", "cluster.trainer_gpus=4"]
    memory = plans.rank_memory(plans.resolve_plan(load_experiment(experiment_file, overrides), hf_config, 0), 0)
    experts = 4 * 2 * 3 * 40 * 48  # 4 layers, 2 of 4 experts, gate, up and down
    assert memory.optimizer == (memory.weights // 4 - experts) * 8 // 4 + experts * 8 // 2


def test_check_says_what_dynamic_sampling_may_draw(invoke, experiment_file):
    result = invoke("check", experiment_file, "rollout.filters.zero_variance=true", "rollout.oversample=2",
                    "rollout.dynamic_sampling.max_gen_batches=3")
    assert row(result.output, "prompts drawn a step")[1] == "10 from the start, at most 24"
    assert "prompts drawn" not in invoke("check", experiment_file).output


def test_check_reports_everything_and_exits_with_2(invoke, experiment_file):
    result = invoke("check", experiment_file, "trainer.parallel.tp=3", "batch.minibatches=5", "data.train=gone.jsonl")
    assert result.exit_code == 2
    for words in ("num_attention_heads 4", "batch.prompts_per_step (8)", "gone.jsonl",
                  "override 'batch.minibatches=5'"):
        assert words in result.output
    assert "Traceback" not in result.output


QWEN2_5_MATH_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
}


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_shipped_configs_have_a_plan(invoke, path, folder, hf_config, monkeypatch):
    shape = QWEN2_5_MATH_7B if "math_7b" in path.name else {**hf_config, "max_position_embeddings": 2048}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    monkeypatch.setenv("MRL_VLLM_PYTHON", "python")
    content = read_file(path).data
    here = [f"eval.datasets.{name}.path={folder}/heldout.jsonl" for name in content.get("eval", {}).get("datasets", {})]
    here += [f"teacher.path={folder}/model"] if "teacher" in content else []
    result = invoke("check", path, f"model.path={folder}/model", f"data.train={folder}/train.jsonl", *here,
                    "data.answer_key=answer", f"rollout.python={folder}/python")
    assert result.exit_code == 0, result.output
    for first in ("trainer", "rollout") if "colocated" not in path.name else ("shared",):
        assert row(result.output, first)[1]
    for first in ("samples a step", "links"):
        assert row(result.output, first)[1]
    assert "warning" not in result.output


def test_the_dapo_experiments_differ_only_in_engine_and_partition():
    loaded = [load_experiment(path) for path in EXPERIMENTS if "dapo" in path.name]
    assert {(exp.rollout.engine, exp.loop.mode, exp.trainer_ranks, exp.engine_count) for exp in loaded} == {
        ("vllm", "one_step_overlap", 12, 4), ("sglang", "one_step_overlap", 12, 4),
        ("vllm", "colocated_sync", 16, 16), ("sglang", "colocated_sync", 16, 16)}
    same = {exp.model_copy(update={"name": "", "loop": None, "cluster": None, "rollout": exp.rollout.model_copy(
        update={"engine": "vllm", "python": "", "args": []})}).model_dump_json() for exp in loaded}
    assert len(same) == 1


def test_check_shows_the_engines_version(invoke, experiment_file, folder):
    result = invoke("check", experiment_file, "rollout.engine=sglang")
    assert f"engine: sglang {TESTED['sglang'][-1]}" in result.output and "warning" not in result.output
    about, = (folder / "site").glob("sglang-*.dist-info")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.1\n")
    result = invoke("check", experiment_file, "rollout.engine=sglang")
    assert result.exit_code == 0 and "engine: sglang 0.4.1" in result.output
    assert f"warning: sglang 0.4.1 is not tested with mrl; tested are {' and '.join(TESTED['sglang'])}" in " ".join(
        result.output.split())


def test_check_without_an_engine_only_warns(invoke, experiment_file):
    result = invoke("check", experiment_file, "rollout.python=nopython-anywhere")
    assert result.exit_code == 0, result.output
    assert "warning: not on this machine: rollout.python = nopython-anywhere" in result.output
    for command in ("train", "eval"):
        result = invoke(command, experiment_file, "rollout.python=nopython-anywhere")
        assert result.exit_code == 2 and "no such file or command" in result.output


def test_check_for_a_machine_with_fewer_gpus(invoke, experiment_file):
    arguments = ("check", experiment_file, "cluster.device=cuda")
    assert invoke(*arguments).exit_code == 0
    result = invoke(*arguments, "--gpus", "2")
    assert result.exit_code == 2 and "too few GPUs" in result.output


def test_check_keys(invoke):
    result = invoke("check", "--keys")
    assert result.exit_code == 0
    assert row(result.output, "loop.steps")[1:] == ["an integer > 0", "required", "training steps"]
    for key in leaf_keys():
        assert key.name in result.output


def test_every_key_is_described():
    assert [key.name for key in leaf_keys() if not key.description] == []


def test_check_without_a_file(invoke):
    result = invoke("check")
    assert result.exit_code == 2 and "EXPERIMENT" in result.output


def test_check_needs_no_torch(experiment_file):
    code = ("import sys; from mrl.cli import app\n"
            f"try: app(['check', {str(experiment_file)!r}])\n"
            "except SystemExit as end: assert end.code in (0, None), end.code\n"
            "assert 'torch' not in sys.modules and 'ray' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, stdout=subprocess.DEVNULL)


def test_train_hands_over_the_checked_experiment(invoke, experiment_file, monkeypatch):
    calls = []
    fake_module(monkeypatch, "mrl.cluster.launch", train=lambda exp, run_dir: calls.append((exp, run_dir)) or 7)
    result = invoke("train", experiment_file, "loop.steps=9", "--run-dir", "here")
    assert result.exit_code == 7
    ((exp, run_dir),) = calls
    assert exp.loop.steps == 9 and run_dir == Path("here")


def test_train_refuses_before_it_starts_anything(invoke, experiment_file, monkeypatch):
    fake_module(monkeypatch, "mrl.cluster.launch", train=lambda *_: pytest.fail("it started"))
    result = invoke("train", experiment_file, "rollout.sampling.top_k=5")
    assert result.exit_code == 2 and "rollout.sampling.top_k" in result.output


def test_export_hands_over(invoke, monkeypatch):
    calls = []
    fake_module(monkeypatch, "mrl.trainer.export",
                export_run=lambda *arguments: calls.append(arguments) or arguments[2])
    result = invoke("export", "run", "--step", "4", "--out", "hf")
    assert result.exit_code == 0 and "wrote hf" in result.output
    assert invoke("export", "run", "--out", "hf").exit_code == 0
    assert calls == [(Path("run"), 4, Path("hf")), (Path("run"), None, Path("hf"))]


def test_export_of_no_checkpoint(invoke, monkeypatch):
    def refuse(*_):
        raise FileNotFoundError("no checkpoint of step 4 in run/checkpoints; there are [2]")
    fake_module(monkeypatch, "mrl.trainer.export", export_run=refuse)
    result = invoke("export", "run", "--step", "4", "--out", "hf")
    assert result.exit_code == 2 and "there are [2]" in result.output and "Traceback" not in result.output


def test_eval_of_a_model_and_of_a_checkpoint(invoke, experiment_file, folder, monkeypatch):
    seen = []
    fake_module(monkeypatch, "mrl.evaluation.command",
                evaluate=lambda exp, model: seen.append((exp.model.path, model)) or 0)
    fake_module(monkeypatch, "mrl.trainer.export",
                export_run=lambda run, step, out: out.mkdir() or out)
    other = folder / "other"
    (folder / "model").rename(other)
    heldout = f"eval.datasets.heldout.path={folder}/heldout.jsonl"
    assert invoke("eval", experiment_file, heldout, "--model", other).exit_code == 0
    other.rename(folder / "model")
    run = folder / "run"
    run.mkdir()
    assert invoke("eval", experiment_file, heldout, "--run", run, "--step", "3").exit_code == 0
    (first, second) = seen
    assert first == (str(other), None)
    assert second[1].parent.parent == run
    assert list(run.iterdir()) == []  # the exported copy is gone


def test_eval_refuses_contradictions(invoke, experiment_file, folder):
    result = invoke("eval", experiment_file, "--model", "x", "--run", "y")
    assert result.exit_code == 2 and "exclude each other" in result.output
    result = invoke("eval", experiment_file, "--step", "3")
    assert result.exit_code == 2 and "needs --run" in result.output
    result = invoke("eval", experiment_file, "--run", folder / "gone")
    assert result.exit_code == 2 and "no such directory" in result.output

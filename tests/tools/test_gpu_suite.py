"""The suite's own rules, with a stand-in for Python that only notes how it was called."""
import os
import subprocess
from pathlib import Path

SUITE = Path(__file__).parents[2] / "tools" / "gpu_suite.sh"
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *count_gpus*) echo "$GPUS" ;;
    *--shape\\ qwen3-0.6b*) echo "it broke"; exit 3 ;;
    *--shape\\ qwen2.5-7b*) sleep 60 ;;
    *) echo "$*" >> "$CALLS" ;;
esac
"""


def run(tmp_path, *parts, gpus=1, **variables):
    """(exit code, what it said, how Python was called)."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    calls.write_text("")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MRL_")}
    done = subprocess.run(["bash", SUITE, *parts], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={
        **kept, "PYTHON": str(python), "CALLS": str(calls), "GPUS": str(gpus), "MRL_SUITE_OUT": str(tmp_path / "out"),
        **variables}, timeout=60)
    return done.returncode, done.stdout, calls.read_text()


def test_a_failure_does_not_stop_what_comes_after_it(tmp_path):
    code, said, calls = run(tmp_path, "trainer")
    assert code == 1 and "FAILED   trainer-qwen3-0.6b: exit code 3" in said and "    it broke" in said
    assert "ok       trainer-qwen2.5-1.5b" in said and "failed: trainer-qwen3-0.6b" in said
    assert "tools/bench_trainer.py --shape qwen2.5-1.5b --json" in calls


def test_what_takes_too_long_is_ended(tmp_path):
    code, said, _ = run(tmp_path, "ipc", MRL_VLLM_PYTHON="vllm-python", MRL_SUITE_LIMIT_S="1")
    assert code == 1 and "FAILED   ipc-qwen2.5-7b-vllm: exit code 124" in said
    assert "ok       ipc-qwen2.5-1.5b-vllm" in said and "$MRL_SGLANG_PYTHON is not set" in said


def test_what_cannot_run_is_skipped_with_its_reason(tmp_path):
    code, said, calls = run(tmp_path, "nccl", "learning", MRL_VLLM_PYTHON="vllm-python")
    assert code == 0 and not calls
    assert "skipped  nccl-qwen2.5-1.5b-vllm: needs 2 GPUs, there are 1" in said
    assert "skipped  learning: $MRL_SMOLLM2 is not set" in said


def test_learning_runs_both_engines_and_on_two_gpus_both_modes(tmp_path):
    code, said, calls = run(tmp_path, "learning", gpus=2, MRL_VLLM_PYTHON="v-python", MRL_SGLANG_PYTHON="s-python",
                            MRL_SMOLLM2="a-model", MRL_SUITE_STEPS="7")
    assert code == 0 and said.count("ok ") == 4
    runs = [line for line in calls.splitlines() if "gpu_colocated_learning.yaml" in line]
    assert len(runs) == 4 and all("model.path=a-model" in line and "loop.steps=7" in line for line in runs)
    assert sum("loop.mode=one_step_overlap" in line for line in runs) == 2
    assert sum("rollout.python=s-python" in line and "--mem-fraction-static" in line for line in runs) == 2


def test_steps_are_compared_on_two_gpus_with_each_engine_there_is(tmp_path):
    code, said, calls = run(tmp_path, "step", gpus=2, MRL_SGLANG_PYTHON="s-python")
    assert code == 0 and "ok       step-sglang" in said and "$MRL_VLLM_PYTHON is not set" in said
    assert "tools/bench_step.py --engine sglang --python s-python --prompts" in calls
    assert "needs 2 GPUs" in run(tmp_path, "step", MRL_SGLANG_PYTHON="s-python")[1]


def test_unknown_parts_are_named(tmp_path):
    code, said, _ = run(tmp_path, "trainers")
    assert code == 2 and "unknown part 'trainers'" in said

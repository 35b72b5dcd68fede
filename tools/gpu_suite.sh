#!/usr/bin/env bash
# Runs the GPU tests and all benchmarks, and prints one table of the figures:  bash tools/gpu_suite.sh [PART…]
#   tests     the tests marked gpu                                                  (engines: $MRL_HOME/{vllm,sglang})
#   trainer   the trainer beside a bare megatron-core loop, packed and padded: 0.6B and 1.5B; its way to the host
#   ipc       syncs by CUDA IPC, trainer and engine on one GPU: 1.5B and 7B, verified and not; each engine
#   nccl      syncs from one GPU to another, and vLLM's own: 1.5B and 7B; each engine                         (2 GPUs)
#   logprobs  log-probs of trainer and engine over 10,000 tokens; each engine
#   rollout   sampling through mrl beside a bare client, 1.5B; each engine
#   step      steps of one_step_overlap beside colocated_sync, and their bound; each engine                    (2 GPUs)
#   learning  configs/gpu_colocated_learning.yaml: each engine in colocated_sync and, on 2 GPUs, in one_step_overlap
#   moe       syncs by CUDA IPC of Qwen3-30B-A3B's shape, twice 61 GB on one GPU; each engine
# Without PARTs: all of them, in this order. A piece that fails or takes too long does not stop the others; the exit
# code then is 1. What needs more GPUs than there are, or what is not named below, is skipped with a line that says so.
# Environment:
#   PYTHON              the trainers' Python (default: python3)
#   MRL_VLLM_PYTHON     the Python of an environment with vLLM's CUDA build
#   MRL_SGLANG_PYTHON   the same for SGLang
#   MRL_SMOLLM2         the Hugging Face directory of SmolLM2-135M-Instruct, for logprobs and learning
#   MRL_SUITE_OUT       where logs, runs and figures go (default: a new folder beside this script's project)
#   MRL_SUITE_LIMIT_S   seconds that one piece may take (default: 900)
#   MRL_SUITE_STEPS     steps of one run of learning (default: those of the file)
set -uo pipefail
cd "$(dirname "$0")/.."
PARTS=(tests trainer ipc nccl logprobs rollout step learning moe)
python=${PYTHON:-python3}
limit=${MRL_SUITE_LIMIT_S:-900}
out=${MRL_SUITE_OUT:-$PWD/../gpu_suite-$(date +%Y%m%d-%H%M%S)}
smollm2=${MRL_SMOLLM2:-}
mkdir -p "$out" && out=$(cd "$out" && pwd)
figures=$out/figures.jsonl
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0}  # as SGLang sets it; NCCL links only ends that agree
gpus=$("$python" -c 'from mrl.preflight import count_gpus; print(count_gpus())') || exit 2
failed=()

for part in "$@"; do
    [[ " ${PARTS[*]} " == *" $part "* ]] || { echo "gpu_suite: unknown part '$part': ${PARTS[*]}" >&2; exit 2; }
done

# piece NAME GPUS COMMAND...: run it if there are as many GPUs; its output goes to a log.
piece() {
    local name=$1 needed=$2 began=$SECONDS code=0; shift 2
    if [ "$gpus" -lt "$needed" ]; then
        echo "skipped  $name: needs $needed GPUs, there are $gpus"
        return
    fi
    timeout --kill-after=60 "$limit" "$@" > "$out/$name.log" 2>&1 || code=$?
    if [ "$code" -eq 0 ]; then
        echo "ok       $name ($((SECONDS - began)) s)"
    else
        failed+=("$name")
        echo "FAILED   $name: exit code $code after $((SECONDS - began)) s; the end of $out/$name.log:"
        tail -n 15 "$out/$name.log" | cut -c 1-300 | sed 's/^/    /'
    fi
}

ranks() { echo "$python" -m torch.distributed.run --standalone --nproc-per-node "$1"; }

# engine_python ENGINE: its Python; says so and fails where none is named.
engine_python() {
    local variable=MRL_${1^^}_PYTHON
    [ -n "${!variable:-}" ] || { echo "skipped  $2 with $1: \$$variable is not set" >&2; return 1; }
    echo "${!variable}"
}

model_of() { [ -n "$smollm2" ] || { echo "skipped  $1: \$MRL_SMOLLM2 is not set"; return 1; }; }

run_tests() { piece tests 1 "$python" -m pytest tests/gpu -m gpu -s -q; }

run_trainer() {
    local shape
    for shape in qwen3-0.6b qwen2.5-1.5b; do
        piece "trainer-$shape" 1 $(ranks 1) tools/bench_trainer.py --shape $shape --json "$figures"
    done
    piece offload 1 $(ranks 1) tools/bench_offload.py --json "$figures"
}

# run_sync NAME GPUS SHAPE MEMORY_VLLM MEMORY_SGLANG OPTIONS...
run_sync() {
    local name=$1 needed=$2 shape=$3 engine its memory; shift 3
    declare -A memory=([vllm]=$1 [sglang]=$2); shift 2
    for engine in vllm sglang; do
        its=$(engine_python $engine "$name") || continue
        piece "$name-$shape-$engine" "$needed" $(ranks 1) tools/bench_sync.py --shape "$shape" --engine $engine \
            --python "$its" --engine-memory "${memory[$engine]}" --json "$figures" "$@"
    done
}

run_ipc() {
    local shape
    for shape in qwen2.5-1.5b qwen2.5-7b; do
        run_sync ipc 1 $shape 0.5 0.5 --transport cuda_ipc --bucket-mb 256 512 1024 --verify off on --rounds 5
    done
}

run_nccl() {
    local shape
    for shape in qwen2.5-1.5b qwen2.5-7b; do
        run_sync nccl 2 $shape 0.5 0.5 --bucket-mb 512 1024 --verify off on --rounds 5
    done
    local its
    its=$(engine_python vllm nccl-own) || return
    piece nccl-own 2 $(ranks 1) tools/bench_sync.py --shape qwen2.5-7b --python "$its" --engine-memory 0.5 \
        --vllm-transfer nccl --rounds 5 --json "$figures"
}

run_moe() { run_sync moe 1 qwen3-30b-a3b 0.53 0.85 --transport cuda_ipc --rounds 3; }

run_logprobs() {
    local engine its
    model_of logprobs || return
    for engine in vllm sglang; do
        its=$(engine_python $engine logprobs) || continue
        piece "logprobs-$engine" 1 $(ranks 1) tools/logprob_diff.py --model "$smollm2" --engine $engine \
            --python "$its" --engine-memory 0.4 --json "$figures"
    done
}

run_rollout() {
    local engine its
    for engine in vllm sglang; do
        its=$(engine_python $engine rollout) || continue
        piece "rollout-$engine" 1 "$python" tools/bench_rollout.py --engine $engine --python "$its" --json "$figures"
    done
}

run_step() {
    local engine its
    for engine in vllm sglang; do
        its=$(engine_python $engine step) || continue
        piece "step-$engine" 2 "$python" tools/bench_step.py --engine $engine --python "$its" --prompts 256 512 1536 \
            --out "$out/step-$engine" --json "$figures"
    done
}

run_learning() {
    local engine its memory
    model_of learning || return
    "$python" tools/make_quickstart.py --out "$out/problems" > "$out/problems.log" 2>&1 || return
    for engine in vllm sglang; do
        its=$(engine_python $engine learning) || continue
        memory=--gpu-memory-utilization; [ $engine = sglang ] && memory=--mem-fraction-static
        learn $engine-colocated_sync 1 "rollout.args=[$memory, \"0.4\"]"
        learn $engine-one_step_overlap 2 loop.mode=one_step_overlap cluster.gpus=null cluster.trainer_gpus=1 \
            cluster.rollout_gpus=1 sync.transport=auto "rollout.args=[$memory, \"0.8\"]"
    done
}

# learn NAME GPUS OVERRIDES...; uses `engine` and `its` of run_learning.
learn() {
    local name=$1 needed=$2; shift 2
    piece "learning-$name" "$needed" "$python" -c "from mrl.cli import main; main()" \
        train configs/gpu_colocated_learning.yaml "model.path=$smollm2" "data.train=$out/problems/train.jsonl" \
        "eval.datasets.heldout.path=$out/problems/heldout.jsonl" "rollout.engine=$engine" "rollout.python=$its" \
        "log.dir=$out/learning/$name" ${MRL_SUITE_STEPS:+"loop.steps=$MRL_SUITE_STEPS"} "$@"
    if compgen -G "$out/learning/$name/*/metrics.jsonl" > /dev/null; then
        "$python" tools/runs.py "learning $name=$(ls -d "$out/learning/$name"/*/ | tail -n 1)" --json "$figures" \
            > "$out/learning-$name-summary.log" 2>&1 || failed+=("summary of learning-$name")
    fi
}

echo "$gpus GPUs; logs and figures in $out"
[ $# -gt 0 ] && PARTS=("$@")
for part in "${PARTS[@]}"; do
    run_"$part"
done
[ -s "$figures" ] && "$python" tools/measure.py "$figures"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi

#!/usr/bin/env bash
# From nothing to a model trained by RL, on a CPU: environments, a small warm-started model, then `mrl train`.
#   bash launch/quickstart.sh [key=value ...]      overrides go to configs/quickstart_cpu.yaml, e.g. loop.steps=20 seed=3
# MRL_HOME (default: .mrl in the project) holds environments, model and data; they are reused on the next run.
set -euo pipefail
cd "$(dirname "$0")/.."
export MRL_HOME=${MRL_HOME:-$PWD/.mrl}
bin=$MRL_HOME/trainer/bin

bash launch/setup.sh trainer vllm

if [ ! -e "$MRL_HOME/quickstart/model/config.json" ]; then
    echo "making the addition problems and an untrained model"
    "$bin/python" tools/make_quickstart.py --out "$MRL_HOME/quickstart"
    echo "warm start: supervised training on addition (1-2 minutes)"
    OMP_NUM_THREADS=1 "$bin/torchrun" --standalone --nproc-per-node 2 -m mrl.sft configs/quickstart_sft.yaml
fi

exec "$bin/mrl" train configs/quickstart_cpu.yaml "$@"

#!/usr/bin/env bash
# From nothing to a model trained by RL, on a CPU: environments, a small warm-started model, then `mrl train`.
#   bash launch/quickstart.sh [--engine vllm|sglang] [key=value ...]
# Overrides go to configs/quickstart_cpu.yaml, e.g. loop.steps=20 seed=3; without --engine the engine is vLLM.
# MRL_HOME (default: .mrl in the project) holds environments, model and data; they are reused on the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

engine=vllm overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --engine) engine=${2:-}; shift; [ $# -eq 0 ] || shift ;;
        --engine=*) engine=${1#*=}; shift ;;
        -h|--help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0"; exit ;;
        -*) echo "launch/quickstart.sh: unknown option '$1': --engine or --help" >&2; exit 2 ;;
        *) overrides+=("$1"); shift ;;
    esac
done
case $engine in
    vllm|sglang) ;;
    *) echo "launch/quickstart.sh: --engine '$engine': vllm or sglang" >&2; exit 2 ;;
esac

export MRL_HOME=${MRL_HOME:-$PWD/.mrl}
bin=$MRL_HOME/trainer/bin

bash launch/setup.sh trainer "$engine"

if [ ! -e "$MRL_HOME/quickstart/model/config.json" ]; then
    echo "making the addition problems and an untrained model"
    "$bin/python" tools/make_quickstart.py --out "$MRL_HOME/quickstart"
    echo "warm start: supervised training on addition (1-2 minutes)"
    "$bin/mrl" sft configs/quickstart_sft.yaml
fi

exec "$bin/mrl" train configs/quickstart_cpu.yaml \
    "rollout.engine=$engine" "rollout.python=$MRL_HOME/$engine/bin/python" \
    ${overrides[@]+"${overrides[@]}"}

#!/usr/bin/env bash
# Installs what the tests need and runs them all:  bash tests/run.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
export MRL_HOME=${MRL_HOME:-$PWD/.mrl}
bash launch/setup.sh trainer tests vllm sglang
# Two processes, for two cores; tests/conftest.py says what stays together and begins first. -n 0: one process.
exec "$MRL_HOME/trainer/bin/python" -m pytest tests -n 2 --no-loadscope-reorder "$@"

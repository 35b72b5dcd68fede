#!/usr/bin/env bash
# Installs what the tests need and runs them all:  bash tests/run.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
export MRL_HOME=${MRL_HOME:-$PWD/.mrl}
bash launch/setup.sh trainer tests vllm sglang
exec "$MRL_HOME/trainer/bin/python" -m pytest tests "$@"

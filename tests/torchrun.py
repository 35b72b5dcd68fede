"""Runs a script of the tests under torchrun, as the trainers run, in processes of their own."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def torchrun(script: Path, ranks: int, *args: str | Path, timeout_s: float = 300.0, gpus: bool = False) -> str:
    """Output of `script` on `ranks` processes, which see no GPU unless `gpus`. AssertionError with the end of the
    output when one of them fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
           "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    env |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if gpus else {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               str(script), *map(str, args)]
    process = subprocess.Popen(command, env=env, cwd=ROOT, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks are in torchrun's process group
        raise
    assert process.returncode == 0, f"{script.name} on {ranks} ranks failed:\n{output[-6000:]}"
    return output

"""A reward that kills the engine in the middle of a rollout, once, when it finds itself armed."""
import os
import signal
from pathlib import Path


SERVERS = (b"vllm.entrypoints", b"sglang_cpu_server.py")


def exact_and_deadly(prompt, response, answer, **row):
    armed = Path(os.environ["MRL_TEST_ARMED"])
    try:
        run_id = armed.read_text()
        armed.unlink()
    except FileNotFoundError:
        return float(response.strip() == answer)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        server = any(name in command for name in SERVERS) and b"guard.py" not in command
        if server and f"MRL_RUN_ID={run_id}".encode() in environment:
            os.kill(int(folder.name), signal.SIGKILL)
            armed.with_suffix(".done").touch()
    return float(response.strip() == answer)

"""Where a trainer rank's output goes, and how the launcher learns why it failed."""
from __future__ import annotations

import os
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator


@contextmanager
def recorded(run_dir: Path, rank: int) -> Iterator[None]:
    """From here on this process writes to logs/rank_<rank>.log; what the block raises goes to logs/failure.txt, too."""
    log = os.open(run_dir / "logs" / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        yield
    except Exception:
        with open(run_dir / "logs" / "failure.txt", "a", encoding="utf-8") as file:
            file.write(f"rank {rank}:\n{traceback.format_exc()}\n")
        raise

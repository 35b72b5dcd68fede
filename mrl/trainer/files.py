"""Where weights lie on disk: model directories, a run's checkpoints, their files. Needs neither torch nor Megatron."""
from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from mrl.config.load import is_hub_id
from mrl.reshard import Coord, Layout

META = "meta.json"
CRITIC = "critic"
"""Name of the folder with the critic in a checkpoint."""
REFERENCE = "reference"
"""Name of the folder with the reference's weights in a checkpoint."""
PARTIAL, REPLACED = ".tmp", ".old"
"""Behind the name of a checkpoint: the one that is being written, and the one whose place it is about to take."""


def model_directory(path: str) -> Path:
    """The directory of `model.path`; a hub id is downloaded into the Hugging Face cache first."""
    if not is_hub_id(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path))


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of a run's complete checkpoints, oldest first."""
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in (run_dir / "checkpoints").glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def tidy_checkpoints(run_dir: Path) -> None:
    """Undo what a save did that was killed half way: drop what it had written, and put back what it would replace.

    Nothing may be saving into the run meanwhile.
    """
    for replaced in (run_dir / "checkpoints").glob(f"step_*{REPLACED}"):
        directory = replaced.with_suffix("")
        if directory.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(directory)
    for partial in (run_dir / "checkpoints").glob(f"step_*{PARTIAL}"):
        shutil.rmtree(partial)


def weights_file(coord: Coord) -> str:
    """Name of the file with the weights of one (tp, pp) shard, all but experts'."""
    return f"weights_tp{coord.tp}_pp{coord.pp}.safetensors"


def experts_file(layout: Layout, coord: Coord) -> str:
    """Name of the file with the experts' weights of one (ep, etp, pp) shard."""
    at = layout.expert_coord(coord)
    return f"experts_ep{at.ep}_etp{at.etp}_pp{coord.pp}.safetensors"


def optimizer_file(rank: int) -> str:
    """Name of the file with a rank's optimizer shard."""
    return f"optimizer_rank{rank}.pt"


def random_file(rank: int) -> str:
    """Name of the file with a rank's random state."""
    return f"random_rank{rank}.pt"


def read_meta(directory: Path) -> tuple[Layout, dict[str, Any]]:
    """Layout and the other entries of meta.json. FileNotFoundError when `directory` holds no complete checkpoint."""
    file = directory / META
    if not file.is_file():
        raise FileNotFoundError(f"{directory} is not a checkpoint: it has no {META}")
    meta = json.loads(file.read_text(encoding="utf-8"))
    return Layout(**meta.pop("layout")), meta

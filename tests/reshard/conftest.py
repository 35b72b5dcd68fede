"""Model directories shared by the tests of this folder: written once per session."""
from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest
import torch

from .simulate import save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model_dir(variant, dtype, shard_size): a read-only Hugging Face directory."""
    made: dict[tuple, Path] = {}

    def make(variant: str, dtype: torch.dtype = torch.float32, shard_size: str = "1GB") -> Path:
        key = (variant, dtype, shard_size)
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp("hf"), *key)
        return made[key]

    return make

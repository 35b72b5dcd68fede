"""Tiny models of every family with what transformers computes from them, made once."""
import pytest
import torch

from tests.trainer.tiny import CONFIGS, make_batch, make_model, truth


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Folder with a model directory and FAMILY.pt (the truth) per family, and batch.pt."""
    folder = tmp_path_factory.mktemp("tiny")
    batch = make_batch()
    torch.save(batch, folder / "batch.pt")
    for family in CONFIGS:
        torch.save(truth(make_model(family, folder), batch), folder / f"{family}.pt")
    return folder

"""Optimizer steps, NaN, reference parameters, checkpoints and their export."""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrl.config.load import dump_experiment
from mrl.trainer.export import export_run
from tests.torchrun import torchrun
from tests.trainer.gang import experiment
from tests.trainer.run_training import RUNS
from tests.trainer.tiny import TEMPERATURE

SCRIPT = Path(__file__).parent / "run_training.py"


@pytest.fixture(scope="module")
def trained(tiny_models):
    """Runs of four steps each, with a checkpoint after two: see run_training.first."""
    for ranks, runs in RUNS.items():
        torchrun(SCRIPT, ranks, tiny_models, "first")
        for name, (family, settings) in runs.items():
            dump_experiment(experiment(tiny_models / family, **settings), tiny_models / f"run_{name}" / "config.yaml")
    return tiny_models


@pytest.mark.parametrize("ranks", RUNS)
def test_resumed_in_a_new_process_every_bit_is_the_same(trained, ranks):
    torchrun(SCRIPT, ranks, trained, "resume")


@pytest.mark.parametrize(("name", "files"), [
    ("dealt", ["experts_ep0_etp0_pp0", "experts_ep1_etp0_pp0", "weights_tp0_pp0"]),
    ("grid", ["experts_ep0_etp0_pp0", "experts_ep0_etp0_pp1", "experts_ep0_etp1_pp0", "experts_ep0_etp1_pp1",
              "weights_tp0_pp0", "weights_tp0_pp1", "weights_tp1_pp0", "weights_tp1_pp1"]),
])
def test_every_shard_is_saved_once(trained, name, files):
    saved = trained / f"run_{name}" / "checkpoints" / "step_000002"
    assert sorted(path.stem for path in saved.glob("*.safetensors")) == files
    assert all((".mlp.experts." in key) == path.stem.startswith("experts")
               for path in saved.glob("*.safetensors") for key in load_file(path))


@pytest.mark.parametrize("name", ["tensor", "pipeline", "chunks", "grid", "dealt"])
def test_export_is_the_model_that_was_trained(trained, name, tmp_path):
    run = trained / f"run_{name}"
    out = export_run(run, None, tmp_path / "hf")
    samples, log_probs = torch.load(run / "log_probs0.pt")
    assert (run / "checkpoints" / "step_000002" / "loop").read_bytes() == b"batch"
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["checkpoints", "exported"]
    assert (run / "exported" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    # Tied: the embedding leaves once.
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) != model.config.tie_word_embeddings
    for sample, expected in zip(samples, log_probs, strict=True):
        log_p = (model(sample["tokens"][None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        got = log_p.gather(1, sample["tokens"][1:, None])[:, 0]
        torch.testing.assert_close(got, expected[1:], atol=1e-4, rtol=0)


def test_export_of_a_step_that_is_not_there(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7 in .*there are \[2\]"):
        export_run(trained / "run_data", 7, tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match="holds no checkpoints"):
        export_run(tmp_path, None, tmp_path / "hf")

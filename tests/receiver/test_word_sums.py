"""Sums over words: the one with torch against the definition, the kernel against that one."""
import os
import subprocess
from pathlib import Path

import pytest
import torch

from mrl.receiver.mrl_receiver import word_sums
from tests.torchrun import ROOT

BLOCKS = Path(__file__).with_name("word_blocks.py")


def test_marginals_are_what_the_definition_says():
    words = torch.randint(-2**62, 2**62, (3, 4, 5))
    adder = word_sums.Marginals(torch.device("cpu"))
    adder.add(0, words[:, 1:3], 7, (40, 10, 1))
    total = sum(value * (2 * (7 + 40 * i + 10 * j + k) + 1) for i, plane in enumerate(words[:, 1:3].tolist())
                for j, row in enumerate(plane) for k, value in enumerate(row))
    assert sum(found for _, found in adder.totals()) % 2**64 == total % 2**64


def test_the_kernel_agrees_on_every_kind_of_block():
    """In an engine's Python: the trainers' torch for CPUs has no Triton."""
    python = Path(os.environ.get("MRL_HOME", ROOT / ".mrl")) / "vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python}")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "mrl" / "receiver"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, BLOCKS], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=600)
    assert done.returncode == 0 and "12 blocks agree" in done.stdout, done.stdout


def test_without_a_gpu_torch_alone_is_used():
    assert isinstance(word_sums.adder(torch.device("cpu")), word_sums.Marginals)

"""Choosing a platform, and what the CPU one changes."""
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrl.platform import get_platform
from mrl.platform.cuda import CudaPlatform
from tests.torchrun import torchrun


def test_auto_is_cpu_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_platform("auto").name == "cpu"
    assert get_platform("cpu").backend == "gloo"
    with pytest.raises(RuntimeError, match="cluster.device is 'cuda' but no GPU is visible"):
        get_platform("cuda")


def test_auto_is_cuda_with_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    platform = get_platform("auto")
    assert (platform.name, platform.backend) == ("cuda", "nccl")


@pytest.mark.parametrize(("modules", "packages", "expected"), [
    ((), (), False),
    (("transformer_engine",), (), False),
    (("transformer_engine",), ("transformer_engine_torch",), True),
    (("transformer_engine", "transformer_engine_torch"), (), True),
])
def test_transformer_engine_needs_both_halves(monkeypatch, modules, packages, expected):
    def distribution(name):
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in modules else None)
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert CudaPlatform().uses_te is expected


def test_unknown_device():
    with pytest.raises(ValueError, match="cluster.device is 'tpu'; allowed: auto, cpu, cuda"):
        get_platform("tpu")


def test_host_buffer_and_memory():
    platform = get_platform("cpu")
    like = torch.zeros(3, 5, dtype=torch.bfloat16)
    buffer = platform.host_buffer(like)
    assert buffer.shape == like.shape and buffer.dtype == like.dtype
    memory = platform.memory()
    platform.start_peak()
    platform.release_cache()  # no-ops: the peak is that of the process, and nothing is shared
    assert 0 < memory["allocated"] <= memory["peak"] <= platform.memory()["peak"] and platform.used_beside() == 0


def test_random_state_round_trip():
    platform = get_platform("cpu")
    state = platform.rng_state()
    first = torch.rand(3)
    platform.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))


INSTALLED = """
import torch
from mrl.platform import get_platform
platform = get_platform("cpu")
platform.install()
compiled = torch.compile
platform.install()
assert torch.compile is compiled
assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
with torch.device("meta"):
    assert torch.zeros(1).is_meta and torch.tensor([1]).is_meta
import torch._dynamo
assert not torch.cuda.is_available()
from megatron.core.pipeline_parallel import schedules
assert schedules.torch.zeros(2, device="cuda").device.type == "cpu"
"""


def test_gathers_and_sums_of_unequal_parts():
    torchrun(Path(__file__).with_name("run_unequal.py"), 2)


def test_install_leaves_torch_itself_usable():
    result = subprocess.run([sys.executable, "-c", INSTALLED], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr

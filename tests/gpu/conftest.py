"""Tests of this folder need GPUs: `gpus(n)` skips where there are fewer. Engines: $MRL_HOME/{vllm,sglang}."""
import pytest

from mrl.preflight import count_gpus


@pytest.fixture(scope="session")
def gpus():
    """Skips the test unless this machine has `count` GPUs."""
    def need(count: int) -> None:
        if count_gpus() < count:
            pytest.skip(f"needs {count} GPUs, {count_gpus()} visible")

    return need

"""SGLang's plugin: found where mrl/receiver is on the path, gives each request its seed, leaves other updates alone."""
import subprocess
import sys
from types import SimpleNamespace

import torch

from mrl.engine.http import RECEIVER_DIR
from mrl.receiver.mrl_receiver.sglang import answer_call, seed_batch


def test_it_is_found_on_the_path_alone():
    code = ("from importlib.metadata import entry_points; "
            "print(*[(entry.value, entry.load().__name__) for entry in entry_points(group='sglang.srt.plugins')])")
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(RECEIVER_DIR)}, capture_output=True,
                           text=True, cwd="/", check=True)
    assert found.stdout.strip() == "('mrl_receiver.sglang:register', 'register')"


def request(seed):
    return SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed))


def test_every_request_gets_its_seed():
    batch = SimpleNamespace(reqs=[request(5), request(None), request(2**62)], device="cpu")
    info = seed_batch(SimpleNamespace(sampling_seed=None), object, batch)
    assert info.sampling_seed.dtype == torch.int64 and info.sampling_seed.tolist() == [5, 0, 2**62]
    theirs = torch.tensor([1, 2, 3])  # in SGLang's deterministic mode
    assert seed_batch(SimpleNamespace(sampling_seed=theirs), object, batch).sampling_seed is theirs


def test_other_updates_are_sglangs_own():
    update = SimpleNamespace(load_format="flattened_bucket")
    assert answer_call(lambda *arguments: arguments, "updater", update) == ("updater", update)

"""SGLang's plugin: found where mrl/receiver is on the path, gives each request its seed, leaves other updates alone."""
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from mrl.engine.http import RECEIVER_DIR
from mrl.receiver.mrl_receiver.sglang import (
    answer_call, cache_scales, clear_table, register, require_plain_layers, seed_batch, watch_layer,
)


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


def test_work_ends_before_memory_is_given_up(monkeypatch):
    """In the order in which SGLang's registry applies hooks."""
    hooks, done = {}, []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookType = SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around")
    registry.HookRegistry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: (kind, hook)}))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setattr(torch.get_device_module(), "synchronize", lambda: done.append("finished"))
    register()
    kind, hook = next(found for target, found in hooks.items() if target.endswith(".release_memory_occupation"))
    assert kind == "before" and hook("updater", SimpleNamespace(tags=["weights"])) is None and done == ["finished"]


def test_the_table_of_the_cache_is_cleared_when_it_comes_back():
    pool = SimpleNamespace(req_to_token=torch.full((2, 3), 7))
    updater = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=pool)))
    assert clear_table("result", updater, SimpleNamespace(tags=["weights"])) == "result" and pool.req_to_token.all()
    assert clear_table("result", updater, SimpleNamespace(tags=["kv_cache"])) == "result"
    assert not pool.req_to_token.any()


def experts(process=None) -> nn.Module:
    """A model with a layer of experts that SGLang has processed so after loading; None: by a method of another kind."""
    layer = nn.Module()
    layer.w13_weight = nn.Parameter(torch.arange(24.0).view(2, 4, 3), requires_grad=False)
    layer.quant_method = "its method"
    if process is not None:
        watch_layer(lambda method, layer: process(layer), layer.quant_method, layer)
    return nn.ModuleDict({"norm": nn.LayerNorm(3), "experts": layer})


def interleave(layer) -> None:
    for expert in range(2):
        layer.w13_weight.data[expert] = layer.w13_weight.data[expert][torch.tensor([0, 2, 1, 3])]


@pytest.mark.parametrize("process, words", [
    (interleave, "experts.w13_weight: the engine rearranges"), (None, r"experts \(of 1\): .* not known to mrl")])
def test_rearranged_experts_are_refused(process, words):
    with pytest.raises(RuntimeError, match=f"{words}.*--moe-runner-backend=triton"):
        require_plain_layers(experts(process), lambda: None)


def test_experts_that_are_as_they_were_loaded_are_fine():
    require_plain_layers(experts(lambda layer: None), lambda: None)


def test_the_scales_of_a_cache_are_no_weights():
    """Attention of a quantised model has them, by a method that is not watched and sets them itself."""
    model = experts(lambda layer: None)
    model["attention"] = attention = nn.Module()
    attention.quant_method = "for the cache"
    attention.k_scale, attention.v_scale = (nn.Parameter(torch.tensor(-1.0), requires_grad=False) for _ in range(2))
    require_plain_layers(model, lambda: None)
    assert cache_scales(model) == {"attention.k_scale", "attention.v_scale"}

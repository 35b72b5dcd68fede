"""Under torchrun: what options of the trainer may not change, and what they must. Argument: folder of the models."""
from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.trainer import routing
from tests.trainer.gang import experiment, gang, whole_gradients
from tests.trainer.host import apart_from_the_device
from tests.trainer.tiny import LENGTHS, loss_fn

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EVERY_PART = ["core_attn", "mla_up_proj", "mlp", "moe", "shared_experts"]
OPTIONS = {
    "overlap": OVERLAP,
    "overlap_grad_reduce": {"overlap_grad_reduce": True},
    "full": {"recompute": "full"},
    "first_layers": {"recompute": "full", "recompute_layers": 1},
    "selective": {"recompute": "selective"},
    "logits_chunk": {"logits_chunk": 7},
    "everything": {**OVERLAP, "recompute": "full", "logits_chunk": 7},
}
# Name -> family, layout of four ranks, options that are compared with none.
CASES = {
    "dense": ("qwen3", {"pp": 2, "vpp": 2}, OPTIONS),
    "experts": ("qwen2_moe", {"tp": 2, "ep": 2, "sequence_parallel": True}, {
        **OPTIONS, "parts": {"recompute": "selective", "recompute_modules": ["core_attn", "shared_experts"]}}),
    "latent": ("deepseek_v3", {"ep": 2}, {
        "parts": {**OVERLAP, "recompute": "selective", "recompute_modules": ["mla_up_proj", "mlp"]}}),
}
BUCKET_ELEMENTS = 3000  # of gradients summed at once: several buckets in a tiny model
LAYERS_OF_A_CHUNK = {"dense": 1, "experts": 4, "latent": 4}


def build(folder: Path, family: str, parallel: dict, options: dict, dtype: str = "float32", **optimizer):
    from mrl.trainer.trainer import Trainer

    settings = experiment(folder / family, parallel, {"kl": {"coef": 0.1}}, dtype=dtype,
                          **{"lr": 0.01, **optimizer})
    section = settings.trainer.model_validate({**settings.trainer.model_dump(), **options})
    return Trainer(settings.model_copy(update={"trainer": section}), PLATFORM, 4)


def poisoned(log_probs, entropy, fields):
    loss, metrics = loss_fn(log_probs, entropy, fields)
    return loss * torch.nan, metrics


def observe(trainer, rows) -> dict[str, Any]:
    """Three steps, the last of which is skipped, with all that reads weights in between."""
    seen: dict[str, Any] = {"losses": [], "counts": []}
    for function in (loss_fn, loss_fn, poisoned):
        counted = count_forwards(trainer)
        report = trainer.train(rows, function)
        seen["counts"] = counted()
        seen["losses"].append(torch.tensor([report["loss"], report["grad_norm"]]))
        incomplete = [param.clone() for param in trainer.local_params().values()]
        with trainer.use_reference():
            seen["reference"] = torch.cat(trainer.log_probs(rows))
        seen["fetched"] = seen.get("fetched", False) or not all(
            map(torch.equal, incomplete, trainer.local_params().values()))
        seen["log_probs"] = torch.cat(trainer.log_probs(rows))
    # Once more without anything in between, up to the weights that a sync would send.
    trainer.train(rows, loss_fn)
    trainer.gather_params()
    return {**seen, "params": {name: param.clone() for name, param in trainer.local_params().items()}}


def count_forwards(trainer):
    """Counts, until the function returned is called, forward passes of each layer's feed-forward part or experts."""
    counter: Counter[str] = Counter()
    handles = [getattr(layer.mlp, "experts", layer.mlp).register_forward_hook(
                   lambda *_, name=f"{index}.{layer.layer_number}": counter.update([name]))
               for index, chunk in enumerate(trainer.chunks) for layer in chunk.module.decoder.layers]

    def finish() -> Counter[str]:
        for handle in handles:
            handle.remove()
        return counter

    return finish


def check(name: str, option: str, options: dict, plain: dict, seen: dict) -> None:
    # Gradients of chunks, and of parts beside each other, are summed in another order, which Adam makes much of where
    # one is next to nothing.
    tolerance = 1e-3 if {"logits_chunk", "recompute_modules"} & options.keys() else 1e-6
    for key in ("losses", "reference", "log_probs", "params"):
        torch.testing.assert_close(seen[key], plain[key], rtol=tolerance, atol=tolerance, equal_nan=True,
                                   msg=lambda text: f"{name}, {option}, {key}: {text}")
    assert seen["fetched"] == bool(options.get("overlap_param_gather")), (name, option)
    recompute, parts = options.get("recompute", "none"), options.get("recompute_modules", ["mlp", "moe"])
    for place, times in seen["counts"].items():
        chunk_layer = plain["order"].index(place) % LAYERS_OF_A_CHUNK[name]
        again = {"none": False, "full": chunk_layer < options.get("recompute_layers", 4),
                 "selective": ("mlp" if place.endswith(plain["dense_layers"]) else "moe") in parts}[recompute]
        assert times == (1 + again) * plain["counts"][place], (name, option, place, times)


def check_all(folder: Path) -> None:
    batch = torch.load(folder / "batch.pt")
    for name, (family, parallel, options) in CASES.items():
        rows, plain = None, None
        for option, chosen in {"none": {}, **options}.items():
            trainer = build(folder, family, parallel, chosen)
            rows = rows or microbatches(trainer, batch)
            seen = observe(trainer, rows)
            if plain is None:
                plain = {**seen, "order": [*seen["counts"]], "dense_layers": dense_layers(trainer)}
            check(name, option, chosen, plain, seen)
            if dist.get_rank() == 0:
                print("ok", name, option, flush=True)


def dense_layers(trainer) -> tuple[str, ...]:
    count = trainer.spec.moe.dense_layers if trainer.spec.moe else trainer.spec.num_layers
    return tuple(f".{layer + 1}" for layer in range(count))


def microbatches(trainer, batch):
    from mrl.trainer.microbatch import assign

    mine = assign(LENGTHS, trainer.layout.replicas, 40)[trainer.layout.replica(trainer.coord)]
    return [[batch[index] for index in microbatch] for microbatch in mine]


def check_grad_dtype(folder: Path) -> None:
    """Gradients summed in bfloat16 are those summed in float32 but for rounding; a float32 model's are not touched."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        trainer = build(folder, "qwen2_moe", {}, OVERLAP, dtype="bfloat16", grad_dtype=dtype)
        rows = microbatches(trainer, torch.load(folder / "batch.pt"))
        trainer.train(rows, loss_fn)
        found[dtype] = whole_gradients(trainer)
        assert {buffer.grad_data.dtype for chunk in trainer.chunks
                for buffer in chunk.buffers + chunk.expert_parallel_buffers} == {getattr(torch, dtype)}
        assert trainer.train(rows, loss_fn)["update_skipped"] == 0.0
    different = 0
    for name, exact in found["float32"].items():
        error = (found["bfloat16"][name].float() - exact).norm() / exact.norm().clamp(min=1e-6)
        assert error < 0.02, (name, error)
        different += int(error > 0)
    if dist.get_rank() == 0:  # which has the gradients
        assert different, "nothing was rounded"
        print("ok grad_dtype", flush=True)


def check_cpu_offload(folder: Path) -> None:
    """Masters that are stepped in host memory are those stepped on the device, but for the order of Adam's sums."""
    found = []
    for offload in (False, True):
        trainer = build(folder, "qwen2_moe", {"ep": 2}, OVERLAP, dtype="bfloat16", clip_grad=0.05, weight_decay=0.1,
                        cpu_offload=offload)
        rows = microbatches(trainer, torch.load(folder / "batch.pt"))
        reports = [trainer.train(rows, loss_fn) for _ in range(3)]
        assert all(report["grad_norm"] > 0.05 for report in reports), "nothing was clipped"
        found.append([torch.tensor([[report["loss"], report["grad_norm"]] for report in reports]), *(
            master.clone() for inner in trainer.optimizer.inner for master in megatron_compat.masters(inner))])
        assert trainer.optimizer.on_host == offload
    for there, here in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-6)
    if dist.get_rank() == 0:
        print("ok cpu_offload", flush=True)


if __name__ == "__main__":
    with gang() as PLATFORM, apart_from_the_device():
        from mrl.trainer import megatron_compat, optimizer

        small = partial(optimizer.DistributedDataParallelConfig, bucket_size=BUCKET_ELEMENTS)
        with mock.patch.object(optimizer, "DistributedDataParallelConfig", small):
            check_all(Path(sys.argv[1]))
            check_grad_dtype(Path(sys.argv[1]))
            check_cpu_offload(Path(sys.argv[1]))
        routing.check(Path(sys.argv[1]), build, microbatches)

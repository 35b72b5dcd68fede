"""vLLM's own weight transfer, timed: run by bench_sync.py in vLLM's Python, as the trainer, on its first GPU.

    python -m peers.vllm_transfer REQUEST      REQUEST: a JSON file with url, backend, workers, rounds, shapes

The last line printed is a JSON list of seconds. vLLM 0.26 or later; `nccl_m2n` needs 0.32 and nccl-extensions.
"""
from __future__ import annotations

import json
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient


def module_of(shapes: dict[str, list[int]]) -> torch.nn.Module:
    """Modules nested as the names say, whose parameters have these shapes."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        value = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        module.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
    return root


class EarlyTrainer:
    """The trainer's side of vLLM 0.26, which has functions for it but no class; packed transfers, as it sets them."""

    def __init__(self, module: torch.nn.Module, client: HTTPVLLMWeightSyncClient, place: dict[str, Any]):
        self.engine, self.client, self.module = nccl_engine.NCCLWeightTransferEngine, client, module
        self.calls = ThreadPoolExecutor(1)
        named = [*module.named_parameters()]
        self.update = {"names": [name for name, _ in named], "shapes": [[*value.shape] for _, value in named],
                       "dtype_names": ["bfloat16"] * len(named), "packed": True}
        joined = self.calls.submit(client.init_weight_transfer_engine, {**place, "rank_offset": 1})
        self.group = self.engine.trainer_init(place)
        joined.result()

    def send_weights(self) -> None:
        self.client.start_weight_update()
        taken = self.calls.submit(self.client.update_weights, self.update)
        self.engine.trainer_send_weights(self.module.named_parameters(), nccl_engine.NCCLTrainerSendWeightsArgs(
            group=self.group, packed=True))
        taken.result()
        self.client.finish_weight_update()


def trainer_of(backend: str, module: torch.nn.Module, url: str, workers: int) -> Any:
    """vLLM's trainer engine, connected to the server at `url`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = {"master_address": "127.0.0.1", "master_port": port, "world_size": 1 + workers}
    client = HTTPVLLMWeightSyncClient(url)
    if hasattr(nccl_engine, "NCCLTrainerSendWeightsArgs"):
        return EarlyTrainer(module, client, place)
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    if backend == "nccl_m2n":
        from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource
        from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

        info, source = M2NTrainerInitInfo(rank=0, **place), DTensorModuleSource(module, 1)
    else:
        info, source = nccl_engine.NCCLTrainerInitInfo(rank=0, **place, packed=True), ModuleSource(module)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.cuda.set_device(0)
    trainer = trainer_of(request["backend"], module_of(request["shapes"]), request["url"], request["workers"])
    seconds = []
    for _ in range(1 + request["rounds"]):
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer.send_weights()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds[1:]))  # the first makes the connections


if __name__ == "__main__":
    main()

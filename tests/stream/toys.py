"""Engines without a server: the real gate over workers that are a `Receiver` and a toy model each, in this process."""
from __future__ import annotations

import asyncio
import re
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Iterator, Mapping

import torch

from mrl.config.schema import Experiment
from mrl.engine.server import EngineServer
from mrl.receiver.mrl_receiver.links import LinkError
from mrl.receiver.mrl_receiver.receive import Receiver
from mrl.receiver.mrl_receiver.routes import Routes
from mrl.receiver.mrl_receiver.wire import SyncRequest
from mrl.stream.sync import WeightSync
from tests.stream.engines import RUN_ID

ROWS = re.compile(r"(q|gate|up)_proj\.weight(_scale_inv)?$")
HEADS = re.compile(r"(k|v)_proj\.weight(_scale_inv)?$")
COLUMNS = re.compile(r"(o|down)_proj\.weight(_scale_inv)?$")
VOCABULARY = re.compile(r"(embed_tokens|lm_head)\.weight$")
VOCABULARY_MULTIPLE = 64  # rows of the padded vocabulary, over all workers: vLLM's


class ToyModel(torch.nn.Module):
    """One worker's shards, cut as vLLM cuts them over tp; every HF tensor has a parameter of its own, and scales if it
    has any are cut like what they scale.

    shapes: of the HF tensors. dtypes: of those that are not float32. kv_heads: with more workers than that, several
    hold the same head. replicated: a tensor that every worker of this model holds whole, unlike vLLM's.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], kv_heads: int, worker: int, workers: int,
                 replicated: str = "", dtypes: Mapping[str, torch.dtype] = MappingProxyType({})):
        super().__init__()
        self.kv_heads, self.worker, self.workers, self.replicated = kv_heads, worker, workers, replicated
        self.cuts = {name: self._cut(name, shape) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            size = torch.zeros(1).expand(shape)[self.cuts[name]].shape
            padded = (-(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // workers,) + shape[1:]
            tensor = torch.full(padded if VOCABULARY.search(name) else size, -9.0).to(dtypes.get(name))
            self.register_parameter(self._own(name), torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, named) -> None:
        for name, tensor in named:
            part = tensor[self.cuts[name]]
            self.get_parameter(self._own(name)).data[:part.shape[0]].copy_(part)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether every element is, to the last bit, what the loader would have made of these tensors."""
        parts = {name: tensor[self.cuts[name]] for name, tensor in tensors.items()}
        return all(torch.equal(self.get_parameter(self._own(name))[:part.shape[0]].view(torch.uint8),
                               part.contiguous().view(torch.uint8)) for name, part in parts.items())

    def _own(self, name: str) -> str:
        return name.replace(".", "/")

    def _cut(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        worker, workers = self.worker, self.workers
        if name == self.replicated:
            return (slice(None),)
        if VOCABULARY.search(name):
            rows = -(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // workers
            return (slice(min(worker * rows, shape[0]), min((worker + 1) * rows, shape[0])),)
        if HEADS.search(name) and workers > self.kv_heads:
            worker, workers = worker * self.kv_heads // workers, self.kv_heads
        if COLUMNS.search(name):
            columns = shape[1] // workers
            return slice(None), slice(worker * columns, (worker + 1) * columns)
        if ROWS.search(name) or HEADS.search(name):
            rows = shape[0] // workers
            return (slice(worker * rows, (worker + 1) * rows),)
        return (slice(None),)


class ToyServer:
    """What EngineServer needs of a server: workers that it can call. The gate makes one a start."""

    answers_while_sampling = True

    def __init__(self, make_model: Callable[[int, int], ToyModel], workers: int, index: int, incarnation: int):
        self.receivers = []
        for worker in range(workers):
            model = make_model(worker, workers)
            self.receivers.append(Receiver(model, model.load_weights, RUN_ID, index, incarnation, worker, workers))

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        for receiver in self.receivers:
            receiver.close()

    async def call_workers(self, method: str, argument: str, timeout_s: float) -> list[dict]:
        return list(await asyncio.gather(
            *(asyncio.to_thread(self._call, receiver, method, argument) for receiver in self.receivers)))

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        pass

    def exit_code(self) -> None:
        return None

    @staticmethod
    def _call(receiver: Receiver, method: str, argument: str) -> dict:
        try:
            call = getattr(receiver, method.removeprefix("mrl_"))
            return {"error": None, **call(SyncRequest.from_json(argument))}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


class ToyEngine:
    """An EngineServer on a thread of its own, with an actor's way of calling: engine.receive.remote(request).future().

    `failing`: method names that raise RuntimeError instead, as when the actor has died.
    """

    def __init__(self, experiment: Experiment, index: int, make_model: Callable[[int, int], ToyModel], workers: int):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.failing: dict[str, str] = {}

        def make_server(experiment, index, run_id, incarnation, log_path, gpus, load_weights) -> ToyServer:
            return ToyServer(make_model, workers, index, incarnation)

        self.gate = EngineServer(experiment, index, RUN_ID, Path("/nowhere"), make_server=make_server)
        self.submit("start").result(300)

    def __getattr__(self, method: str) -> Any:
        return _Method(self, method)

    @property
    def receivers(self) -> list[Receiver]:
        return self.gate._server.receivers

    def submit(self, method: str, *arguments: Any) -> Future:
        if method in self.failing:
            failed: Future = Future()
            failed.set_exception(RuntimeError(self.failing[method]))
            return failed
        return asyncio.run_coroutine_threadsafe(getattr(self.gate, method)(*arguments), self.loop)

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether every worker has its shards of these tensors."""
        return all(receiver.model.holds(tensors) for receiver in self.receivers)

    def scramble(self) -> None:
        """Noise in every parameter, so that a sync has to bring all of them."""
        for receiver in self.receivers:
            for parameter in receiver.model.parameters():
                parameter.data.copy_(torch.rand(parameter.shape) * 2 - 1)

    def stop(self) -> None:
        self.submit("stop").result(300)
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Method:
    def __init__(self, engine: ToyEngine, name: str):
        self.engine, self.name = engine, name

    def remote(self, *arguments: Any) -> _Reference:
        return _Reference(self.engine.submit(self.name, *arguments))


class _Reference:
    def __init__(self, future: Future):
        self._future = future

    def future(self) -> Future:
        return self._future


@contextmanager
def going_half_way(monkeypatch, victim: Receiver) -> Iterator[None]:
    """Within the block this worker dies when it has put its first bucket in place."""
    apply = Routes.apply

    def apply_some(routes, position, *given):
        if routes is victim.prepared.routes and position == 1:
            victim.close()
            raise LinkError("the worker has died")
        apply(routes, position, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Routes, "apply", apply_some)
        yield


@contextmanager
def hurried(sync: WeightSync, push_s: float) -> Iterator[None]:
    """Within the block pushes end soon: for what only the deadline ends. push_s: seconds that the first push, which is
    the slowest, took on this machine as busy as it is."""
    usual = sync.settings
    sync.settings = sync.calls.settings = usual.model_copy(update={"timeout_s": max(3.0, 5 * push_s)})
    try:
        yield
    finally:
        sync.settings = sync.calls.settings = usual

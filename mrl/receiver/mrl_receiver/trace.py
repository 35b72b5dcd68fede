"""Finding out, once, where an engine's own loader puts every element, so that later syncs are plain copies.

`trace` hands the loader each HF tensor in a scratch buffer that is never read, and watches its copies instead of
executing them. What comes out is, for every tensor, which of its elements live where in the model's memory. Nothing is
written while tracing, so a plan that the loader refuses leaves the engine as it was.
"""
from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Optional, Sequence
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .wire import Lattice, Shape

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""The engine's own: takes (HF name, HF tensor) pairs."""

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}
_PATCHING = threading.Lock()


class TraceError(RuntimeError):
    """The plan does not fit the engine's model."""


class Home(NamedTuple):
    """A view of the model's memory, and which elements of an HF tensor it holds."""

    lattice: Lattice
    target: torch.Tensor


@dataclass
class Traced:
    """What the loader does with every HF tensor.

    homes: where copies of it go; empty when this worker takes none of it. fills: writes of constants that come with
    it, as (operation, arguments). opaque: why copies alone do not reproduce the loader, so that the tensor has to go
    through it. together: the opaque tensors that the loader needs in one call, by each of their names. written:
    addresses of the storages that receive something.
    """

    homes: dict[str, list[Home]] = field(default_factory=dict)
    fills: dict[str, list[tuple[Any, tuple]]] = field(default_factory=dict)
    opaque: dict[str, str] = field(default_factory=dict)
    together: dict[str, set[str]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def untouched(self, model: torch.nn.Module) -> list[str]:
        """Parameters that receive nothing."""
        return [name for name, parameter in model.named_parameters()
                if parameter.numel() and address(parameter) not in self.written]


def trace(tensors: Mapping[str, tuple[Shape, torch.dtype]], model: torch.nn.Module, load: Loader) -> Traced:
    """Where the loader puts each of `tensors`, given as (shape, dtype) by HF name.

    Needs as much memory as the largest of them while it runs. TraceError when the loader refuses a name or a shape,
    and when the model would hold a tensor in a narrower dtype.
    """
    device = next(model.parameters()).device
    nbytes = max(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors.values())
    recorder = _Recorder(torch.empty(nbytes, dtype=torch.uint8, device=device), memory_of(model))
    try:
        with torch.no_grad(), recorder, _in_this_thread():
            load(recorder.feed(tensors))
    except TraceError:
        raise
    except Exception as error:
        given = f"{recorder.current} of shape {list(tensors[recorder.current][0])}" if recorder.current else "the plan"
        raise TraceError(f"the engine's loader refuses {given}: {type(error).__name__}: {error}") from error
    return recorder.result()


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Within the block what this thread gives to thread pools is done at once, by itself: a dispatch mode sees no other
    thread's copies, and SGLang's loaders copy in pools."""
    here = threading.get_ident()
    with _PATCHING:
        usual = ThreadPoolExecutor.submit

        def submit(pool: ThreadPoolExecutor, function: Callable, /, *arguments: Any, **keywords: Any) -> Future:
            if threading.get_ident() != here:
                return usual(pool, function, *arguments, **keywords)
            future: Future = Future()
            try:
                future.set_result(function(*arguments, **keywords))
            except Exception as error:
                future.set_exception(error)
            return future

        with patch.object(ThreadPoolExecutor, "submit", submit):
            yield


def memory_of(model: torch.nn.Module) -> dict[int, str]:
    """Name of a parameter or buffer, by the address of its storage."""
    named = [*model.named_buffers(), *model.named_parameters()]
    return {address(tensor): name for name, tensor in named if tensor.numel()}


def address(tensor: torch.Tensor) -> int:
    """Of its storage."""
    return tensor.untyped_storage().data_ptr()


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments or results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def written_by(operation: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes to."""
    if not operation._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(arguments[position] if position < len(arguments) else keywords.get(argument.name))
    return [*tensors_in(written)]


class _Recorder(TorchDispatchMode):
    """Notes every write to the model's memory and does not execute it.

    All HF tensors lie in the same scratch memory, so which one a view there belongs to is known by the view itself:
    `origins` has the names behind it. What the loader computes from them lies in memory of its own: `computed` has the
    names behind that, by address. Every allocation passes through here, so an address that is used again is seen.
    """

    def __init__(self, scratch: torch.Tensor, memory: dict[int, str]):
        super().__init__()
        self.scratch, self.memory, self.traced = scratch, memory, Traced()
        self.origins = WeakTensorKeyDictionary()
        self.computed: dict[int, frozenset[str]] = {}
        self.current = ""

    def feed(self, tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader is given."""
        for name, (shape, dtype) in tensors.items():
            self.current = name
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            tensor = self.scratch[:nbytes].view(dtype).view(shape)
            self.origins[tensor] = frozenset([name])
            yield name, tensor

    def result(self) -> Traced:
        """What was noted; an opaque tensor is left to the loader whole."""
        for name in self.traced.opaque:
            self.traced.homes.pop(name, None)
            self.traced.fills.pop(name, None)
        return self.traced

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        keywords = keywords or {}
        given = [*tensors_in(arguments), *tensors_in(keywords.values())]
        names = frozenset().union(*(self._names(tensor) for tensor in given))
        written = written_by(operation, arguments, keywords)
        target = next((tensor for tensor in written if address(tensor) in self.memory), None)
        if target is not None:
            self._write(operation, target, arguments, names)
            return target
        if operation is _aten._local_scalar_dense.default and names:
            self._opaque(names, "reads single values")
        results = operation(*arguments, **keywords)
        addresses = {address(tensor) for tensor in given}
        for tensor in tensors_in([results, written]):
            if address(tensor) == address(self.scratch):
                self.origins[tensor] = names
            elif address(tensor) not in addresses:
                self.computed[address(tensor)] = names
            elif any(tensor is one for one in written):
                self.computed[address(tensor)] = names | self._names(tensor)
        return results

    def _names(self, tensor: torch.Tensor) -> frozenset[str]:
        """The HF tensors behind a tensor."""
        if address(tensor) == address(self.scratch):
            return self.origins.get(tensor, frozenset([self.current] if self.current else []))
        return self.computed.get(address(tensor), frozenset())

    def _write(self, operation, target: torch.Tensor, arguments: tuple, names: frozenset[str]) -> None:
        if operation in _FILLS and not names:
            self.traced.fills.setdefault(self.current, []).append((operation, tuple(arguments)))
            return
        self.traced.written.add(address(target))
        if operation is _aten.copy_.default:
            self._copy(target, arguments[1], names or frozenset([self.current]))
        else:
            self._opaque(names or frozenset([self.current]), f"writes {self._name(target)} with {operation}")

    def _copy(self, target: torch.Tensor, source: torch.Tensor, names: frozenset[str]) -> None:
        if address(source) != address(self.scratch) or len(names) > 1:
            return self._opaque(names, f"converts what it copies to {self._name(target)}")
        (name,) = names
        numel, source = source.numel(), source.expand(target.shape)  # raises where the copy itself would have
        if numel != target.numel():
            return self._opaque(names, f"repeats elements in {self._name(target)}")
        if source.dtype != target.dtype and (
                1 in (source.dtype.itemsize, target.dtype.itemsize)  # nothing of one byte means anything in another
                or torch.promote_types(source.dtype, target.dtype) != target.dtype):
            raise TraceError(f"{name} is sent as {source.dtype}, but the engine holds it as {target.dtype} in "
                             f"{self._name(target)}: precision would be lost; give both the same model.dtype and "
                             "rollout.quantization")
        lattice = (source.storage_offset(), tuple(source.shape), tuple(source.stride()))
        self.traced.homes.setdefault(name, []).append(Home(lattice, target))

    def _name(self, tensor: torch.Tensor) -> str:
        return self.memory[address(tensor)]

    def _opaque(self, names: frozenset[str], what: str) -> None:
        group: Optional[set[str]] = set(names)
        for name in names:
            self.traced.opaque.setdefault(name, f"the engine's loader {what}")
            group |= self.traced.together.get(name, set())
        for name in group:
            self.traced.together[name] = group

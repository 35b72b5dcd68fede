"""Finding out, once, where an engine's own loader puts every element, so that later syncs are plain copies.

`trace` hands the loader views of a receive buffer and watches its copies instead of executing them. What comes out is
a `Route`: pairs of views (in the buffer, in the engine's parameters) for one `_foreach_copy_` per bucket, and, for
every HF tensor, which of its elements live where. Nothing is written while tracing, so a plan that the loader refuses
leaves the engine as it was.
"""
from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .wire import Bucket, Item, Lattice

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
"""The engine's own: takes (HF name, HF tensor) pairs."""

_aten = torch.ops.aten
_FILLS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


class TraceError(RuntimeError):
    """The plan does not fit the engine's model."""


@dataclass
class Route:
    """How one bucket reaches the parameters.

    sources[i] (views of the receive buffer) are copied to targets[i] (views of parameters). `homes[name]` lists, for
    an HF tensor, the lattices held here with the parameter view holding each. `reason`: why copies alone do not
    reproduce what the loader does, so that this bucket keeps going through the loader; None: they do.
    """

    bucket: Bucket
    sources: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    fills: list[tuple[Any, tuple]] = field(default_factory=list)
    homes: dict[str, list[tuple[Lattice, torch.Tensor]]] = field(default_factory=dict)
    reason: Optional[str] = None

    @torch.no_grad()
    def apply(self, flat: torch.Tensor, load: Loader) -> None:
        """Put a received bucket into the parameters. `flat` is the buffer that was traced."""
        if self.reason is None:
            for operation, arguments in self.fills:
                operation(*arguments)
            torch._foreach_copy_(self.targets, self.sources)
        else:  # clones: such a loader may keep what it was given longer than the buffer holds it
            load((name, view.clone()) for name, view in self.bucket.views(flat).items())


def trace(bucket: Bucket, flat: torch.Tensor, model: torch.nn.Module, load: Loader) -> Route:
    """The route of `bucket` when it arrives in `flat`. TraceError when the loader refuses a name or a shape."""
    route = Route(bucket)
    recorder = _Recorder(route, flat, memory_of(model))
    current: Optional[Item] = None

    def feed() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal current
        for item, view in zip(bucket.items, bucket.views(flat).values()):
            current = item
            yield item.name, view

    try:
        with torch.no_grad(), recorder:
            load(feed())
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"the engine's loader refuses {current.name} of shape {list(current.shape)}: "
                         f"{type(error).__name__}: {error}") from error
    return route


def memory_of(model: torch.nn.Module) -> dict[int, str]:
    """Name of a parameter or buffer, by the address of its storage."""
    named = [*model.named_buffers(), *model.named_parameters()]
    return {tensor.untyped_storage().data_ptr(): name for name, tensor in named if tensor.numel()}


def untouched(model: torch.nn.Module, routes: list[Route]) -> list[str]:
    """Parameters that no route writes to; empty when some bucket's writes cannot be seen."""
    if any(route.reason for route in routes):
        return []
    written = {target.untyped_storage().data_ptr() for route in routes for target in route.targets}
    return [name for name, parameter in model.named_parameters()
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in written]


class _Recorder(TorchDispatchMode):
    """Notes every write to the model's memory and does not execute it."""

    def __init__(self, route: Route, flat: torch.Tensor, memory: dict[int, str]):
        super().__init__()
        self.route, self.flat, self.memory = route, flat, memory
        self.buffer = flat.untyped_storage().data_ptr()
        self.offsets = [item.offset for item in route.bucket.items]

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        keywords = keywords or {}
        target = self._written(operation, arguments, keywords)
        if target is not None:
            if operation is _aten.copy_.default:
                self._copy(target, arguments[1])
            elif operation in _FILLS:
                self.route.fills.append((operation, tuple(arguments)))
            else:
                self._impure(f"writes {self._name(target)} with {operation}")
            return target
        if operation is _aten._local_scalar_dense.default and self._in_buffer(arguments[0]):
            self._impure("reads single values")
        return operation(*arguments, **keywords)

    def _written(self, operation, arguments, keywords) -> Optional[torch.Tensor]:
        """The model's tensor that `operation` writes to, if any."""
        if not operation._schema.is_mutable:
            return None
        for position, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = arguments[position] if position < len(arguments) else keywords.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self.memory:
                        return tensor
        return None

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self._in_buffer(source) or source.dtype != self.flat.dtype:
            return self._impure(f"converts what it copies to {self._name(target)}")
        numel, source = source.numel(), source.expand(target.shape)  # raises where the copy itself would have
        if numel != target.numel():
            return self._impure(f"repeats elements in {self._name(target)}")
        start = source.storage_offset() - self.flat.storage_offset()
        item = self.route.bucket.items[bisect_right(self.offsets, start) - 1]
        if torch.promote_types(source.dtype, target.dtype) != target.dtype:
            raise TraceError(f"{item.name} is sent as {source.dtype}, but the engine holds it as {target.dtype} in "
                             f"{self._name(target)}: precision would be lost; give both the same model.dtype")
        lattice = (start - item.offset, tuple(source.shape), tuple(source.stride()))
        last = lattice[0] + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride()))
        if not 0 <= lattice[0] <= last < item.numel:
            return self._impure(f"copies across tensors to {self._name(target)}")
        self.route.sources.append(source)
        self.route.targets.append(target)
        self.route.homes.setdefault(item.name, []).append((lattice, target))

    def _in_buffer(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.buffer

    def _name(self, tensor: torch.Tensor) -> str:
        return self.memory[tensor.untyped_storage().data_ptr()]

    def _impure(self, what: str) -> None:
        self.route.reason = self.route.reason or f"the engine's loader {what}"

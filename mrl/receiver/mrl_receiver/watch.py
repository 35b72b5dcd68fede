"""Whether an engine computes from its parameters as its loader wrote them, seen by what it does after loading.

Engines may rearrange weights for their kernels once they are loaded: in place, into other parameters, or into copies
that only a kernel knows. A sync writes what the loader writes, so it would miss or spoil those. No list of kernels
could be complete for all releases, so every operation of torch that the engine's own processing does is watched.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Mapping, NamedTuple, Optional

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .trace import address, tensors_in, written_by

_aten = torch.ops.aten
_SHAPES_ALONE = {_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like,
                 _aten.randn_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full,
                 _aten.new_empty_strided}
"""Operations that make a tensor like another without reading it."""
_KEPT = "mrl_seen"
"""Attribute of a module in which `watched` keeps what it saw."""


@dataclass
class Seen:
    """What was done to parameters, by name, with the operation that did it: changed, or moved, themselves; or read, to
    compute something else from them."""

    changed: dict[str, str] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)


class _Place(NamedTuple):
    """Where a tensor's elements lie."""

    address: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


def _place(tensor: torch.Tensor) -> _Place:
    return _Place(address(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


class Watch(TorchDispatchMode):
    """Within the block, everything that is done to the parameters of a module is noted in `seen`.

    recurse: those of its submodules, too.
    """

    def __init__(self, module: nn.Module, recurse: bool = True):
        super().__init__()
        self.module, self.recurse, self.seen = module, recurse, Seen()
        self.places = {name: _place(parameter) for name, parameter in self._parameters().items()}
        self.names: dict[int, list[str]] = {}  # parameters may share memory
        for name, place in self.places.items():
            self.names.setdefault(place.address, []).append(name)

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        now = self._parameters()
        for name, place in self.places.items():
            if name not in now or _place(now[name]) != place:
                self.seen.changed.setdefault(name, "being replaced")

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        keywords = keywords or {}
        written = written_by(operation, arguments, keywords)
        given = [tensor for tensor in tensors_in([*arguments, *keywords.values()]) if address(tensor) in self.names]
        onto_itself = operation is _aten.copy_.default and _place(arguments[0]) == _place(arguments[1])
        results = operation(*arguments, **keywords)
        if given and not onto_itself and operation.overloadpacket not in _SHAPES_ALONE:
            self._note(str(operation), given, written, results)
        return results

    def _note(self, operation: str, given: list[torch.Tensor], written: list[torch.Tensor], results) -> None:
        """Views of a parameter are no more than the parameter; what lies in other memory has been computed from it."""
        targets = {address(tensor) for tensor in written}
        made = {address(tensor) for tensor in tensors_in([results])} | targets
        for place in {address(tensor) for tensor in given}:
            if place in targets:
                self.seen.changed.update(dict.fromkeys(self.names[place], operation))
            elif made - {place}:
                self.seen.read.update(dict.fromkeys(self.names[place], operation))

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters(recurse=self.recurse)
                if parameter.numel() and not parameter.is_meta}


def watched(process: Callable[[], None], module: nn.Module, recurse: bool = True) -> None:
    """Call `process`, in which an engine processes a module after loading it, and keep with the module what is seen.

    recurse: of its submodules' parameters, too.
    """
    with Watch(module, recurse) as watch:
        process()
    setattr(module, _KEPT, watch.seen)


def keeping_parameters(process: Callable[[], None], layer: nn.Module) -> None:
    """Call `process`, and put a layer's own parameters back where it has only registered others in the same memory:
    loaders need what the first ones know."""
    loaded = dict(layer.named_parameters(recurse=False))
    process()
    now = dict(layer.named_parameters(recurse=False))
    for name, parameter in loaded.items():
        if name in now and now[name] is not parameter and _place(now[name]) == _place(parameter):
            setattr(layer, name, parameter)


def seen_of(module: nn.Module) -> Optional[Seen]:
    """What `watched` kept; None: the module was not watched."""
    return vars(module).get(_KEPT)


def require_plain(seen: Mapping[str, Optional[Seen]], module: nn.Module, refresh: Callable[[], None], remedy: str
                  ) -> None:
    """RuntimeError when a sync could not keep up with what the engine did after loading.

    seen: by the name of a part of `module`, "" for all of it, what was seen of it. refresh: remakes after a sync what
    the engine derives from parameters; it is called to see what it reads.
    """
    unseen = [name for name, one in seen.items() if one is None]
    if unseen:
        raise RuntimeError(f"{unseen[0] or 'the model'} (of {len(unseen)}): what this engine makes of its weights "
                           "after loading them is not known to mrl, so a sync might not reach what it computes with; "
                           f"{remedy}")
    with torch.no_grad(), Watch(module) as watch:
        refresh()
    for part, one in seen.items():
        prefix = part and part + "."
        stale = {name: by for name, by in one.read.items() if prefix + name not in watch.seen.read}
        if wrong := [*one.changed.items(), *stale.items()]:
            name, by = wrong[0]
            raise RuntimeError(f"{prefix}{name}: the engine rearranges or copies it after loading ({by}), so that a "
                               f"sync cannot reach what it computes with; {remedy}")

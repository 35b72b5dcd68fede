"""The proof, once a plan sends shards: in this model they end up bit for bit where the engine's loader puts things.

The model is filled twice with the same noise, made here: by the engine's own loader, and by the copies that a sync
would make; in between the loader puts other noise everywhere. Each time the derived tensors are refreshed. Whatever
differs afterwards names the tensors that must travel whole. What the loader never writes (padding) is left alone. No
byte comes from the trainers, and the model holds noise when it is over.
"""
from __future__ import annotations

import zlib
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch

from .checksum import checksums, whole
from .routes import Arrival, Routes
from .trace import Loader, Traced
from .wire import Bucket, Shape

NOT_WEIGHTS = {"kv_cache"}
"""Attributes of modules that hold no weights, and too much memory to look at."""


@torch.no_grad()
def unfaithful(model: torch.nn.Module, load: Loader, refresh: Callable[[], None],
               tensors: Mapping[str, tuple[Shape, torch.dtype]], buckets: Sequence[Bucket],
               slots: Sequence[torch.Tensor], arrivals: Sequence[Arrival], routes: Routes,
               direct: frozenset[str]) -> dict[str, str]:
    """Which of the tensors `direct` do not end up where the engine's loader puts them, and what shows it.

    tensors: (shape, dtype) of every HF tensor. buckets, slots: what this worker receives, and where; arrivals, routes:
    how it is put in place. Needs memory for the largest tensor.
    """
    device = slots[0].device
    load((name, noise(name, *kind, device)) for name, kind in tensors.items())
    refresh()
    expected = fingerprints(model)
    load((name, noise(f"not {name}", *kind, device)) for name, kind in tensors.items())
    refresh()
    made, values = "", torch.empty(0)
    for position, bucket in enumerate(buckets):
        for part, offset in bucket.parts:
            if part.name != made:
                made, values = part.name, noise(part.name, *tensors[part.name], device)
            box = values[tuple(slice(*span) for span in part.box)]
            part.values(slots[position], offset).copy_(box)
        routes.apply(position, arrivals[position])
    refresh()
    differing = [name for name, found in fingerprints(model).items() if expected.get(name) != found]
    owners = _owners(model, routes.traced, direct)
    return {tensor: f"{name} would differ from what the engine's loader makes of it"
            for name in differing for tensor in _concerned(name, owners, direct)}


def noise(seed: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Values in -1 … 1, or arbitrary bits for dtypes of one byte; the same for the same arguments."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(seed.encode()))
    values = torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return values.uniform_(-1, 1, generator=generator)
    values.view(torch.uint8).random_(generator=generator)
    return values


def fingerprints(model: torch.nn.Module) -> dict[str, int]:
    """By dotted name, the checksum of every parameter, buffer, and tensor that a module keeps otherwise."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for prefix, module in model.named_modules():
        named += _attributes(vars(module), prefix, nested=True)
    tensors: dict[tuple, tuple[str, torch.Tensor]] = {}
    for name, tensor in named:
        if tensor.numel() and not tensor.is_meta:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            tensors.setdefault(key, (name, tensor))
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.values():
        by_device.setdefault(tensor.device, []).append((name, tensor))
    return {name: found for group in by_device.values() for (name, _), found in zip(
        group, checksums((tensor, whole(tuple(tensor.shape))) for _, tensor in group))}


def _attributes(attributes: Mapping[str, Any], prefix: str, nested: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among an object's attributes, in its lists, and (`nested`) in plain objects that it keeps."""
    for key, value in attributes.items():
        if key in NOT_WEIGHTS or key in ("_parameters", "_buffers", "_modules"):
            continue
        for position, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            name = ".".join([prefix, key, str(position)] if isinstance(value, (list, tuple)) else [prefix, key])
            if isinstance(one, torch.Tensor):
                yield name.lstrip("."), one
            elif nested and hasattr(one, "__dict__") and not isinstance(one, (torch.nn.Module, type)):
                yield from _attributes(vars(one), name, nested=False)


def _owners(model: torch.nn.Module, traced: Traced, direct: frozenset[str]) -> dict[str, set[str]]:
    """HF tensors sent as shards, by the parameter or buffer that they are copied to."""
    by_address: dict[int, set[str]] = {}
    for name in direct:
        for home in traced.homes.get(name, []):
            by_address.setdefault(home.target.untyped_storage().data_ptr(), set()).add(name)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: by_address.get(tensor.untyped_storage().data_ptr(), set()) for name, tensor in named}


def _concerned(name: str, owners: Mapping[str, set[str]], direct: frozenset[str]) -> set[str]:
    """The shards behind a tensor: those copied to it, else those of the innermost module around it that has any."""
    found = owners.get(name, set())
    while not found and name:
        name = name.rpartition(".")[0]
        found = set().union(*(names for owner, names in owners.items() if owner.startswith(name + ".") or not name))
    return found or set(direct)

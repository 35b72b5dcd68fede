"""A toy engine model with the tricks of real loaders, its weights, and plans for it in wire form.

Tensor parallelism (a fused projection, columns), a padded vocabulary, stacked experts on the worker that has them, a
tensor stored transposed, two that only load together, and one that is derived from another.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Optional, Sequence

import torch
from torch import nn

from mrl.receiver.mrl_receiver.checksum import add, checksum

DENSE = {"embed": (5, 4), "q": (4, 6), "k": (2, 6), "norm": (6,)}
EXPERTS = {f"experts.{e}.{kind}": shape for e in range(4)
           for kind, shape in (("gate", (4, 6)), ("up", (4, 6)), ("down", (6, 4)))}
OPAQUE = {"flipped": (3, 5), "pair.a": (2, 3), "pair.b": (4, 3)}
SHAPES = {**DENSE, "o": (6, 8), "base": (4, 3), **EXPERTS, **OPAQUE}


def parameter(*shape: int, dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, -9.0, dtype=dtype), requires_grad=False)


class ToyModel(nn.Module):
    """One of `tp` shards: `qk` is split by rows, vocabulary rows 5 … 7 are padding, the norm is replicated."""

    def __init__(self, rank: int = 0, tp: int = 1, dtype=torch.float32):
        super().__init__()
        self.rank, self.tp = rank, tp
        self.embed = parameter(8, 4, dtype=dtype)
        self.qk = parameter(6 // tp, 6, dtype=dtype)
        self.norm = parameter(6, dtype=dtype)

    def load_weights(self, named) -> None:
        for name, tensor in named:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            assert tensor.shape == (5, 4), "vocabulary"
            self.embed.data[:5].copy_(tensor)
            self.embed.data[5:].fill_(0)
        elif name == "norm":
            self.norm.data.copy_(tensor)
        else:
            size = {"q": 4, "k": 2}[name] // self.tp  # KeyError for an unknown name, as in real loaders
            start = {"q": 0, "k": 4 // self.tp}[name]
            part = tensor.narrow(0, self.rank * size, size)
            self.qk.data.narrow(0, start, size).copy_(part)

    def refresh(self) -> None:
        """Nothing is derived here."""


class ToyMoe(ToyModel):
    """More of it: columns, experts by worker, tied weights, a derived tensor, and loaders that do more than copy."""

    def __init__(self, rank: int = 0, tp: int = 1, dtype=torch.float32):
        super().__init__(rank, tp, dtype)
        self.o = parameter(6, 8 // tp, dtype=dtype)
        self.local = 4 // tp
        self.w13 = parameter(self.local, 8, 6, dtype=dtype)
        self.w2 = parameter(self.local, 6, 4, dtype=dtype)
        self.head = self.embed  # tied
        self.base = parameter(4, 3, dtype=dtype)
        self.absorbed = torch.zeros(3, 4, dtype=dtype)
        self.flipped = parameter(5, 3, dtype=dtype)
        self.pair = parameter(6, 3, dtype=dtype)
        self.register_buffer("table", torch.arange(4.0))

    def load_weights(self, named) -> None:
        waiting: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            if name == "o":
                self.o.data.copy_(tensor.chunk(self.tp, 1)[self.rank])
            elif name == "base":
                self.base.data.copy_(tensor)
            elif name.startswith("experts."):
                self.load_expert(name, tensor)
            elif name == "flipped":
                self.flipped.data.copy_((tensor + 0).t())
            elif name.startswith("pair."):
                waiting[name] = tensor
                if len(waiting) == 2:
                    self.pair.data.copy_(torch.cat([waiting["pair.a"], waiting["pair.b"]]))
            else:
                self.load_one(name, tensor)

    def load_expert(self, name: str, tensor: torch.Tensor) -> None:
        _, expert, kind = name.split(".")
        place = int(expert) - self.rank * self.local
        if not 0 <= place < self.local:
            return  # another worker's
        if kind == "down":
            self.w2.data[place].copy_(tensor)
        else:
            self.w13.data[place].narrow(0, 4 if kind == "up" else 0, 4).copy_(tensor)

    def refresh(self) -> None:
        self.absorbed.copy_(self.base.t() * 2)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def expect(model: ToyModel, values: dict[str, torch.Tensor]) -> None:
    """Assert that the shard holds `values`."""
    assert torch.equal(model.embed[:5], values["embed"]) and not model.embed[5:].any()
    assert torch.equal(model.norm, values["norm"])
    q, k = (values[name].chunk(model.tp)[model.rank] for name in ("q", "k"))
    assert torch.equal(model.qk, torch.cat([q, k]))
    if isinstance(model, ToyMoe):
        assert torch.equal(model.o, values["o"].chunk(model.tp, 1)[model.rank])
        for place in range(model.local):
            gate, up, down = (values[f"experts.{model.rank * model.local + place}.{kind}"]
                              for kind in ("gate", "up", "down"))
            assert torch.equal(model.w13[place], torch.cat([gate, up])) and torch.equal(model.w2[place], down)
        assert torch.equal(model.flipped, values["flipped"].t())
        assert torch.equal(model.pair, torch.cat([values["pair.a"], values["pair.b"]]))
        assert torch.equal(model.absorbed, values["base"].t() * 2)


@dataclass
class Draft:
    """A plan under construction; `buckets` have slices with the names of their parts. Every slice has its contents."""

    workers: int = 1
    node: int = 1
    senders: int = 1
    dtype: str = "float32"
    shapes: dict[str, Sequence[int]] = field(default_factory=lambda: dict(SHAPES))
    buckets: list[dict[str, Any]] = field(default_factory=list)

    def add(self, mode: str, *slices: Sequence, senders: Sequence[int] = (0,), worker: Optional[int] = None) -> Draft:
        """One more bucket; a slice is a list of names, or of (name, box)."""
        entries = []
        for position, parts in enumerate(slices):
            offset, placed = 0, []
            for part in parts:
                name, box = (part, None) if isinstance(part, str) else part
                sides = self.shapes[name] if box is None else [stop - start for start, stop in box]
                placed.append([name, box and [list(span) for span in box], offset])
                offset += prod(sides)
            entries.append({"sender": senders[position % len(senders)], "numel": offset, "parts": placed})
        self.buckets.append({"index": len(self.buckets), "dtype": self.dtype, "mode": mode, "worker": worker,
                             "slice_numel": max(entry["numel"] for entry in entries), "slices": entries})
        return self

    def wire(self) -> dict[str, Any]:
        slices = [one for bucket in self.buckets for one in bucket["slices"]]
        names = list({part[0]: None for one in slices for part in one["parts"]})
        contents = [[[names.index(name), *rest] for name, *rest in one["parts"]] for one in slices]
        numbers = iter(range(len(slices)))
        buckets = [{**bucket, "slices": [
            {"sender": one["sender"], "numel": one["numel"], "group": 0, "contents": next(numbers)}
            for one in bucket["slices"]]} for bucket in self.buckets]
        return {"workers": self.workers, "node": self.node, "senders": self.senders,
                "tensors": {name: list(self.shapes[name]) for name in names}, "groups": [[*range(len(names))]],
                "contents": contents, "buckets": buckets}


def wire_plan(shapes=None, dtype: str = "float32", buckets=(("embed", "q"), ("k",), ("norm",)), workers: int = 1
              ) -> dict[str, Any]:
    """Whole tensors, all broadcast by one sender."""
    draft = Draft(workers=workers, dtype=dtype, shapes={**SHAPES, **(shapes or {})})
    for names in buckets:
        draft.add("broadcast", names)
    return draft.wire()


def rows(start: int, stop: int, columns: int) -> list[tuple[int, int]]:
    return [(start, stop), (0, columns)]


def mixed_plan() -> dict[str, Any]:
    """For ToyMoe on two workers that make up a node, from three senders: every mode, tensors cut over slices and
    buckets, experts and projections as shards, and the tensors that only load whole in pieces."""
    draft = Draft(workers=2, node=2, senders=3)
    draft.add("broadcast", ["embed", "norm"], senders=[1])
    draft.add("slices", ["base", ("flipped", rows(0, 2, 5))], [("flipped", rows(2, 3, 5)), "pair.b"], senders=[0, 2])
    for worker in range(2):
        top = 2 * worker
        shards = [("q", rows(top, top + 2, 6)), ("k", rows(worker, worker + 1, 6)),
                  ("o", [(0, 6), (4 * worker, 4 * worker + 3)])]
        draft.add("direct", shards, senders=[worker], worker=worker)
        for expert in (top, top + 1):
            draft.add("direct", [f"experts.{expert}.gate", f"experts.{expert}.up", f"experts.{expert}.down"],
                      senders=[2 - worker], worker=worker)
        draft.add("direct", [("o", [(0, 6), (4 * worker + 3, 4 * worker + 4)])], senders=[2], worker=worker)
    draft.add("slices", ["pair.a"], [], senders=[2, 0])
    return draft.wire()


def flat_of(one, values: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What a sender sends for a slice."""
    flat = torch.zeros(one.numel, dtype=dtype)
    for part in one.parts:
        box = values[part.name][tuple(slice(*span) for span in part.box)]
        part.values(flat).copy_(box)
    return flat


def sums_of(plan, sender: int, values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a sender leaves in the store after a verified sync."""
    sums: dict[str, Any] = {"shared": {}, "direct": {}}
    for bucket in plan.buckets:
        into = sums["shared"] if bucket.worker is None else sums["direct"].setdefault(str(bucket.worker), {})
        for one in bucket.slices:
            for part in one.parts if one.sender == sender else ():
                box = values[part.name][tuple(slice(*span) for span in part.box)]
                box = box.to(getattr(torch, part.dtype or bucket.dtype))
                into[part.name] = add(into.get(part.name, 0), checksum(box, part.lattice))
    return sums

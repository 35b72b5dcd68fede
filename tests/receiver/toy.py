"""A toy engine model with the tricks of a real loader: a fused projection, a padded vocabulary, tensor parallelism."""
from __future__ import annotations

import torch
from torch import nn

SHAPES = {"embed": (5, 4), "q": (4, 6), "k": (2, 6), "norm": (6,)}


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


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def wire_plan(shapes=None, dtype: str = "float32", buckets=(("embed", "q"), ("k",), ("norm",))) -> dict:
    """A plan in wire form, as `SyncPlan.to_wire` writes it, all from stage 0."""
    shapes, entries = {**SHAPES, **(shapes or {})}, []
    for index, names in enumerate(buckets):
        items, offset = [], 0
        for name in names:
            numel = torch.Size(shapes[name]).numel()
            items.append({"name": name, "shape": list(shapes[name]), "dtype": dtype, "offset": offset, "numel": numel})
            offset += numel
        entries.append({"index": index, "stage": 0, "dtype": dtype, "numel": offset, "items": items})
    return {"buckets": entries}


def flat_of(bucket, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """A bucket's message."""
    return torch.cat([values[item.name].reshape(-1) for item in bucket.items]).to(bucket.torch_dtype)


def expect(model: ToyModel, values: dict[str, torch.Tensor]) -> None:
    """Assert that the shard holds `values`."""
    assert torch.equal(model.embed[:5], values["embed"]) and not model.embed[5:].any()
    assert torch.equal(model.norm, values["norm"])
    q, k = (values[name].chunk(model.tp)[model.rank] for name in ("q", "k"))
    assert torch.equal(model.qk, torch.cat([q, k]))

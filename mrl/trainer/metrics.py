"""Sums and maxima of scalar metrics over microbatches and ranks."""
from __future__ import annotations

from typing import Iterable, Mapping

import torch
import torch.distributed as dist


def sum_metrics(reports: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Merge the scalar tensors of several microbatches, with one device-to-host copy."""
    pairs = [(name, value.float()) for report in reports for name, value in report.items()]
    values = torch.stack([value for _, value in pairs]).tolist() if pairs else []
    return merge({name: value} for (name, _), value in zip(pairs, values))


def gather_metrics(local: Mapping[str, float]) -> dict[str, float]:
    """Merge every rank's metrics in rank order: the same on all ranks. Collective."""
    everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(local))
    return merge(everyone)


def merge(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum per name; the maximum for names ending in `_max`."""
    merged: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged

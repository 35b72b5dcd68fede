"""Frozen copy of the initial parameters in host memory, swapped with the live ones in place."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Mapping

import torch

from mrl.platform import Platform


class Reference:
    """The parameters as they are when this is made: a reference policy of the same layout as the actor.

    Costs two host copies of this rank's parameters (page-locked on GPUs): the reference, and room for the actor.
    """

    @torch.no_grad()
    def __init__(self, params: Mapping[str, torch.Tensor], platform: Platform) -> None:
        self._params = [param.detach() for param in params.values()]
        self._frozen = [platform.host_buffer(param) for param in self._params]
        self._actor = [platform.host_buffer(param) for param in self._params]
        self._platform = platform
        self._copy(self._frozen, self._params)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model computes with the reference parameters. Do not train inside it."""
        self._copy(self._actor, self._params)
        self._copy(self._params, self._frozen)
        try:
            yield
        finally:
            self._copy(self._params, self._actor)

    @torch.no_grad()
    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources):
            target.copy_(source, non_blocking=True)
        # The host must not read or overwrite a buffer while a copy is still under way.
        self._platform.synchronize()

"""A second set of parameters in host memory, the reference policy's, swapped with the live ones in place."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterable, Iterator, Mapping

import torch

from mrl.platform import Platform


class Reference:
    """The parameters as they were when this was made, or last updated: a policy of the same layout as the actor.

    Costs two host copies of this rank's parameters (page-locked on GPUs): the reference, and room for the actor.
    """

    @torch.no_grad()
    def __init__(self, params: Mapping[str, torch.Tensor], platform: Platform) -> None:
        self._live = [param.detach() for param in params.values()]
        self._actor = [platform.host_buffer(param) for param in self._live]
        self._platform = platform
        self.params = {name: platform.host_buffer(param) for name, param in params.items()}
        """The reference's, by the names they were given with."""
        self.update()

    def update(self) -> None:
        """Make the reference what the parameters are now."""
        self._copy(self.params.values(), self._live)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the model computes with the reference parameters. Do not train inside it."""
        self._copy(self._actor, self._live)
        self._copy(self._live, self.params.values())
        try:
            yield
        finally:
            self._copy(self._live, self._actor)

    @torch.no_grad()
    def _copy(self, targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        for target, source in zip(targets, sources):
            target.copy_(source, non_blocking=True)
        # The host must not read or overwrite a buffer while a copy is still under way.
        self._platform.synchronize()

"""The critic: a second model beside the policy, on the same ranks in the same layout, that says what a state is worth.

It begins as `algorithm.critic.path` with a value head of zeros, and has an optimizer of its own.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Sequence

import torch

from mrl.config.schema import Experiment
from mrl.platform import Platform
from mrl.reshard import model_spec, read_config
from mrl.trainer.files import model_directory
from mrl.trainer.microbatch import Packed, Sample
from mrl.trainer.offload import Offload
from mrl.trainer.parallel import Place
from mrl.trainer.trained_model import TrainedModel


class Critic(TrainedModel):
    """`train` takes a loss of (values fp32 [N], packed fields)."""

    path_key = "algorithm.critic.path"
    value_head = True

    def __init__(self, experiment: Experiment, place: Place, platform: Platform) -> None:
        """Build the model and its optimizer as `algorithm.critic` and `trainer` say. Collective."""
        section = experiment.algorithm.critic
        source = model_directory(section.path or experiment.model.path)
        super().__init__(source, model_spec(read_config(source)),
                         experiment.trainer.model_copy(update={"optimizer": section.optimizer}),
                         getattr(torch, experiment.model.dtype), place, platform, experiment.critic_updates)
        offloaded = section.offload or experiment.trainers_offload(platform.name)
        self._offload = Offload(self, platform) if offloaded else None
        if self._offload:
            self._offload.release()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Outside the block an offloaded critic has no memory on the device, and must not be touched."""
        if self._offload:
            self._offload.restore()
        try:
            yield
        finally:
            if self._offload:
                self._offload.release()

    def values(self, microbatches: Sequence[Sequence[Sample]]) -> list[torch.Tensor]:
        """What the state before token t is worth: the reward still to come, before t was chosen.

        Args:
            microbatches: as for `train`; only the field "tokens" is used.

        Returns:
            One fp32 [T] tensor in host memory per sample, in the order of the microbatches, on every rank of the
            replica; index 0, where nothing was seen yet, is 0.
        """
        return self._compute(microbatches)

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids beyond the critic's vocabulary, padding of the policy's that no token has, are read as its last id."""
        return tokens.clamp(max=self.spec.vocab - 1)

    def _outputs(self, packed: Packed, output: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._of_next_token(packed, output[0, :, 0]),)

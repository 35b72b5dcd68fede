"""Megatron's process groups for one layout, and this rank's place in them."""
from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from mrl.config.trainer import TrainerParallel
from mrl.reshard import Coord, Layout


@dataclass(frozen=True)
class Place:
    """A layout and where this rank stands in it."""

    layout: Layout
    coord: Coord

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits and losses."""
        return self.layout.is_last(self.coord)

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The context-parallel group; None where ranks hold whole sequences."""
        return parallel_state.get_context_parallel_group() if self.layout.cp > 1 else None

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The tensor-parallel group; None where there is nothing to reduce."""
        return parallel_state.get_tensor_model_parallel_group() if self.layout.tp > 1 else None


def enter_layout(parallel: TrainerParallel, seed: int) -> Place:
    """Build Megatron's process groups (once per process and layout) and seed its generators. Collective.

    Raises:
        ValueError: the number of ranks is not a multiple of tp * cp * pp, or that of a stage's not one of ep * etp.
    """
    layout = parallel.layout(dist.get_world_size())
    if not _entered(layout):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep, 
            expert_tensor_parallel_size=layout.etp, create_gloo_process_groups=False,
        )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Place(layout, layout.coord(dist.get_rank()))


def _entered(layout: Layout) -> bool:
    if not parallel_state.model_parallel_is_initialized():
        return False
    return (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp) == (
        parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_tensor_parallel_world_size(),
    )

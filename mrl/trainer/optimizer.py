"""Adam with Megatron's distributed optimizer, the learning-rate schedule, and one guarded step."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from mrl.config.optimizer import Optimizer as OptimizerSection
from mrl.config.trainer import Trainer as TrainerSection
from mrl.trainer import megatron_compat


def wrap_data_parallel(models: list[GPTModel], config: TransformerConfig,
                       section: TrainerSection) -> list[DistributedDataParallel]:
    """The model's chunks with their gradients in flat buffers of `trainer.optimizer.grad_dtype`, summed over
    data-parallel ranks; parameters move into flat buffers too. `config` learns when the sums begin."""
    chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=section.optimizer.grad_dtype == "float32",
        overlap_grad_reduce=section.overlap_grad_reduce, overlap_param_gather=section.overlap_param_gather,
        check_for_nan_in_grad=False), model, disable_bucketing=index > 0) for index, model in enumerate(models)]
    if section.overlap_grad_reduce:
        # Only the last microbatch completes a gradient.
        waits = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return chunks


def gather_params(chunks: list[DistributedDataParallel]) -> None:
    """Fetch what other ranks have stepped and no forward pass has fetched yet; nothing where all is there. Collective.
    """
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    grad_norm: float
    """2-norm of the whole model's gradient before clipping; NaN or inf when it was not finite."""
    lr: float
    """Learning rate of this step."""
    skipped: bool
    """The gradient was not finite: parameters and moments are unchanged."""


class GuardedOptimizer:
    """Clip, check, step, schedule. Built after the weights are loaded: bf16 weights are copied into fp32 masters."""

    def __init__(self, chunks: list[DistributedDataParallel], section: OptimizerSection, dtype: torch.dtype,
                 total_steps: int) -> None:
        self.clip_grad = section.clip_grad
        self.on_host = section.cpu_offload
        """Whether moments and masters are in host memory, and stepped there."""
        if self.on_host:
            megatron_compat.mend_host_optimizer()
        config = OptimizerConfig(
            optimizer="adam", lr=section.lr, min_lr=section.min_lr, weight_decay=section.weight_decay,
            adam_beta1=section.betas[0], adam_beta2=section.betas[1], adam_eps=section.eps,
            clip_grad=section.clip_grad, use_distributed_optimizer=True,
            bf16=dtype == torch.bfloat16, params_dtype=dtype,
            # With the second, masters are on the host alone; without, on the device too.
            optimizer_cpu_offload=self.on_host, use_precision_aware_optimizer=self.on_host,
            optimizer_offload_fraction=float(self.on_host), overlap_cpu_optimizer_d2h_h2d=self.on_host,
        )
        with torch.no_grad():  # else its shards of fp32 weights would be no leaves, which torch refuses on the host
            self.megatron = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        self.schedule = _schedule(self.megatron, section, total_steps)

    @property
    def steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.schedule.num_steps

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers that hold this rank's shard of the moments, and step the masters."""
        return megatron_compat.inner_optimizers(self.megatron)

    def zero_grad(self) -> None:
        """Forget gradients outside the flat buffers."""
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> StepReport:
        """One step on the gradients in the model's buffers. Collective.

        A gradient that is not finite changes nothing but the schedule, which counts steps of the loop.
        """
        # Megatron advances a schedule after the step; then a warm-up would spend its first step on lr 0.
        self.schedule.step(increment=1)
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        skipped = not math.isfinite(norm)
        if not skipped:
            self._clip(norm)
            self.megatron.step_with_ready_grads()
        return StepReport(norm, max(group["lr"] for group in self.megatron.param_groups), skipped)

    def _clip(self, norm: float) -> None:
        """Scale the gradients of all optimizers by what brings the whole model's norm down to the limit."""
        for optimizer in megatron_compat.chain(self.megatron):
            params = optimizer.get_parameters()
            if self.clip_grad > 0 and params:
                # Parameters and gradients of different dtypes are something torch does not know.
                clip_grad_by_total_norm_fp32(params, self.clip_grad, norm, use_decoupled_grad=self.on_host)

    def resume_schedule(self, steps: int) -> None:
        """Continue the schedule after `steps` optimizer steps."""
        self.schedule.num_steps = 0
        self.schedule.step(increment=steps)


def _schedule(optimizer, section: OptimizerSection, total_steps: int) -> OptimizerParamScheduler:
    """lr at step k = 1 … total_steps: a linear warm-up that reaches `lr` at k = warmup_steps, then the decay.

    The decay reaches `min_lr` one step after the last, so that no step is spent on a learning rate of 0. A run shorter
    than its warm-up ends on the way to `lr`.

    Raises:
        ValueError: min_lr is above lr.
    """
    horizon = max(total_steps, section.warmup_steps) + 1
    if section.min_lr > section.lr:
        raise ValueError(f"trainer.optimizer.min_lr {section.min_lr} is above lr {section.lr}")
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=section.lr, min_lr=section.min_lr, lr_warmup_steps=section.warmup_steps,
        lr_decay_steps=horizon, lr_decay_style=section.schedule, start_wd=section.weight_decay,
        end_wd=section.weight_decay, wd_incr_steps=horizon, wd_incr_style="constant",
    )

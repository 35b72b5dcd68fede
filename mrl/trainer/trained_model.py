"""One Megatron model of the gang on this rank: built, loaded, run through the pipeline schedule, stepped.

What a model's outputs mean is its subclass's: the policy in `trainer.py`, the critic in `critic.py`. All methods that
compute are collective: every rank of the gang calls them in the same order.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Callable, ClassVar, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import AutoConfig

from mrl.config.trainer import Trainer as TrainerSection
from mrl.platform import Platform
from mrl.reshard import Coord, Layout, ModelSpec, chunk_prefix, is_output, local_params
from mrl.reshard.load import load_hf
from mrl.trainer.context import gather_same, rows_of
from mrl.trainer.local_layers import PackedSequences
from mrl.trainer.metrics import gather_metrics, sum_metrics
from mrl.trainer.microbatch import Packed, Sample, pack
from mrl.trainer.model import build_chunks, transformer_config
from mrl.trainer.optimizer import GuardedOptimizer, gather_params, wrap_data_parallel
from mrl.trainer.parallel import Place

LossFn = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(what the model says of each token, one or more fp32 [N]; packed fields [N] each) -> (scalar to be summed over all
microbatches and data-parallel ranks, scalar metrics to be summed likewise; names ending in `_max` are maximised)."""


class TrainedModel(ABC):
    """Needs Megatron's parallel state, and `platform.install()` before import."""

    path_key: ClassVar[str]
    """The key of the experiment that says where its first weights are."""
    value_head: ClassVar[bool]
    """Whether it ends in one number a token instead of logits."""

    def __init__(self, source: Path, spec: ModelSpec, section: TrainerSection, dtype: torch.dtype, place: Place,
                 platform: Platform, total_steps: int) -> None:
        """Build the model, load the weights in the directory `source`, build the optimizer. Collective.

        Args:
            section: layout, load balancing and optimizer.
            dtype: of the weights (a value head is always fp32).
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.

        Raises:
            ValueError: a model whose family table says that it cannot be trained.
        """
        spec.require_trainable()
        self.source, self.spec, self.dtype = source, spec, dtype
        self.place, self.platform, self.te = place, platform, platform.uses_te
        self.balance_coef = section.moe.aux_loss_coef
        self.plans = [plan for plan in local_params(spec, self.layout, self.coord, self.te)
                      if not (self.value_head and is_output(plan.name))]

        self.config = transformer_config(spec, section, dtype, self.te)
        self.logits_chunk = section.logits_chunk
        ends_in = "value" if self.value_head else "hidden" if self.logits_chunk else "logits"
        models = build_chunks(spec, AutoConfig.from_pretrained(source), place, self.config, self.te, ends_in)
        self._params = {chunk_prefix(self.layout, chunk) + name: param
                        for chunk, model in enumerate(models) for name, param in model.named_parameters()}
        self._untrained = self._buffers(models) | self._carried()
        loaded = {name: param for name, param in self.local_params().items()
                  if not (self.value_head and is_output(name))}
        load_hf(source, loaded, self.plans, spec)
        self.chunks = wrap_data_parallel(models, self.config, section)
        self.config.finalize_model_grads_func = _sum_gradients
        self.optimizer = GuardedOptimizer(self.chunks, section.optimizer, dtype, total_steps)

    @abstractmethod
    def _outputs(self, packed: Packed, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the last stage's output [1, this rank's part of P, …] says of the real tokens: fp32 [N] each.

        The first is what `_compute` returns.
        """

    @property
    def layout(self) -> Layout:
        """Sizes of the gang's parallel dimensions."""
        return self.place.layout

    @property
    def coord(self) -> Coord:
        """This rank's position."""
        return self.place.coord

    @property
    def dp_rank(self) -> int:
        """Which data-parallel replica this rank belongs to."""
        return self.layout.replica(self.coord)

    @property
    def leads_replica(self) -> bool:
        """Whether this is the one rank that speaks for its data-parallel replica, all of whose ranks know the same."""
        return self.coord.tp == self.coord.pp == 0 and self.coord.dp % self.layout.cp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether losses are computed on this rank."""
        return self.place.is_last_stage

    def awake(self) -> AbstractContextManager[None]:
        """Whatever computes with the model or reads its state does so within this block. One at a time."""
        return nullcontext()

    def gather_params(self) -> None:
        """Complete the weights: with `trainer.overlap_param_gather` a rank may still lack what others have stepped.

        Collective. Before anything but the model's own forward pass reads them.
        """
        gather_params(self.chunks)

    def local_params(self) -> dict[str, torch.Tensor]:
        """All weights of this rank by Megatron's names, as in the reshard plans. They share the model's storage.

        Those of the last step after `gather_params`.
        """
        return {name: param.detach() for name, param in self._params.items()} | self._untrained

    def train(self, microbatches: Sequence[Sequence[Sample]], loss_fn: LossFn) -> dict[str, float]:
        """One optimizer step on the sum of `loss_fn` over all microbatches of all data-parallel ranks.

        Nothing is divided: weights that sum to 1 over the global batch make the gradient that of a mean.

        Args:
            microbatches: this replica's samples, the same on all its ranks; as many microbatches on every replica
                (see `microbatch.assign`), empty ones allowed.
            loss_fn: not called for empty microbatches.

        Returns:
            The same on every rank: the metrics of `loss_fn`, `loss`, `grad_norm` (before clipping), `lr`, and
            `update_skipped` (1.0 when the gradient was not finite, and nothing was changed).
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run(microbatches, partial(self._loss, loss_fn))
        step = self.optimizer.step()
        contributes = self.is_last_stage and self.coord.tp == 0 and self.coord.dp % self.layout.cp == 0
        metrics = gather_metrics(sum_metrics(reports) if contributes else {})
        return {**metrics, "grad_norm": step.grad_norm, "lr": step.lr, "update_skipped": float(step.skipped)}

    @torch.no_grad()
    def _compute(self, microbatches: Sequence[Sequence[Sample]]) -> list[torch.Tensor]:
        """The first of `_outputs` under the current parameters: one fp32 [T] tensor in host memory per sample, in the
        order of the microbatches, on every rank of the replica. Of the samples only the field "tokens" is used."""
        for chunk in self.chunks:
            chunk.eval()
        try:
            outputs = self._run(microbatches, self._collect)
        finally:
            for chunk in self.chunks:
                chunk.train()
        lengths = [len(sample["tokens"]) for microbatch in microbatches for sample in microbatch]
        flat = torch.cat(outputs) if self.is_last_stage else torch.empty(
            sum(lengths), dtype=torch.float32, device=self.platform.device())
        if self.layout.pp > 1:
            dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(),
                           group=parallel_state.get_pipeline_model_parallel_group())
        return list(flat.cpu().split(lengths))

    def _buffers(self, models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
        """The model's buffers that are weights."""
        weights = {plan.name for plan in self.plans if plan.dtype}
        found = ((chunk_prefix(self.layout, chunk) + name, buffer)
                 for chunk, model in enumerate(models) for name, buffer in model.named_buffers())
        return {name: buffer for name, buffer in found if name in weights}

    def _carried(self) -> dict[str, torch.Tensor]:
        """Memory for the weights that are passed on, and that no module has."""
        device = self.platform.device()
        return {plan.name: torch.empty(plan.shape, dtype=getattr(torch, plan.dtype) if plan.dtype else self.dtype,
                                       device=device) for plan in self.plans if plan.carried}

    def _run(self, microbatches: Sequence[Sequence[Sample]], on_output: Callable) -> list:
        """Megatron's schedule over the microbatches; what `on_output` reported, on the last stage (else [])."""
        # Transformer Engine cannot tell the memory layout of q, k and v in a row of a single token.
        multiple = self.layout.tp if self.config.sequence_parallel else 2 if self.te else 1
        # The interleaved schedule passes chunks from stage to stage in groups of pp microbatches.
        missing = -len(microbatches) % self.layout.pp if self.layout.vpp > 1 else 0
        packed = [pack(samples, multiple, self.layout.cp).to(self.platform.device())
                  for samples in [*microbatches, *[[]] * missing]]
        rows = [iter(packed) for _ in self.chunks]
        forward_only = not torch.is_grad_enabled()
        if self.balance_coef and not forward_only:
            self._weigh_balance_loss(packed)
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward, on_output), model=self.chunks,
            data_iterator=rows if self.layout.vpp > 1 else rows[0],
            num_microbatches=len(packed), seq_length=max(len(row.tokens) for row in packed), micro_batch_size=1,
            forward_only=forward_only, collect_non_loss_data=forward_only,
        )

    def _weigh_balance_loss(self, packed: list[Packed]) -> None:
        """Make the load-balancing loss of the step the mean over its tokens (padding too) of their microbatches'."""
        tokens = torch.tensor(float(sum(len(row.tokens) for row in packed)), device=self.platform.device())
        if self.layout.replicas > 1:
            dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        # Every router reads it from here; its gradient is multiplied by the microbatch's tokens.
        self.config.moe_aux_loss_coeff = self.balance_coef / tokens.item()

    def _read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids [P] as this model's embedding takes them."""
        return tokens

    def _forward(self, on_output: Callable, rows: Iterator[Packed], model) -> tuple[torch.Tensor, Callable]:
        """Megatron's forward step: hidden states, or on the last stage the model's output."""
        packed = next(rows)
        sequences = PackedSequences(
            qkv_format="thd", cu_seqlens_q=packed.cu_seqlens, cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.longest, max_seqlen_kv=packed.longest,
        )
        sequences.experts = self._experts(packed)
        tokens, positions = (self._own(packed, row)[None] for row in (self._read(packed.tokens), packed.position_ids))
        output = model(tokens, positions, None, packed_seq_params=sequences)
        return output, partial(on_output, packed)

    def _experts(self, packed: Packed) -> torch.Tensor | None:
        """See `PackedSequences.experts`."""
        return None

    def _loss(self, loss_fn: LossFn, packed: Packed, output: torch.Tensor) -> tuple:
        outputs = self._outputs(packed, output)
        if packed.real:
            loss, metrics = loss_fn(*outputs, packed.fields)
            metrics = {name: value.detach() for name, value in metrics.items()}
        else:
            # The backward pass must still run, for its collectives; the sum of nothing gives it zeros.
            loss, metrics = outputs[0].sum(), {}
        # Megatron would divide by this count of tokens; `_sum_gradients` ignores it.
        count = torch.zeros((), dtype=torch.int, device=loss.device)
        return loss, count, {"loss": loss.detach().clone(), **metrics}

    def _collect(self, packed: Packed, output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
        return self._outputs(packed, output)[0]

    def _own(self, packed: Packed, row: torch.Tensor) -> torch.Tensor:
        """What of [P] this rank works on: under context parallelism its share, else all of it."""
        group = self.place.context_group
        return row[rows_of(packed.cu_seqlens, len(row), group.size(), group.rank())] if group else row

    def _of_next_token(self, packed: Packed, values: torch.Tensor) -> torch.Tensor:
        """From this rank's part of [P], what it says behind each token, to [N], what is said of each real token: 0 of
        the first of a sequence."""
        if group := self.place.context_group:
            values = gather_same(values, packed.cu_seqlens, group)
        return torch.where(packed.position_ids[packed.places] == 0, 0.0, values.roll(1)[packed.places])


def _sum_gradients(model: list, num_tokens: torch.Tensor | None = None, **kwargs) -> None:
    """Megatron's reduction of gradients over ranks, without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)

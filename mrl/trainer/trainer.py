"""The trainer of one rank: forward, backward, optimizer step, log-probabilities, reference weights, checkpoints.

All methods that compute are collective: every rank of the gang calls them in the same order.
"""
from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import AutoConfig

from mrl.config.schema import Experiment
from mrl.config.sft import SftExperiment
from mrl.platform import Platform
from mrl.reshard import Coord, Layout, chunk_prefix, local_params, model_spec, read_config
from mrl.reshard.load import load_hf
from mrl.trainer import checkpoint, megatron_compat
from mrl.trainer.context import gather_same, rows_of
from mrl.trainer.files import model_directory
from mrl.trainer.local_layers import PackedSequences
from mrl.trainer.log_probs import VocabShard, log_probs_and_entropy
from mrl.trainer.metrics import gather_metrics, sum_metrics
from mrl.trainer.microbatch import Packed, Sample, pack
from mrl.trainer.model import build_chunks, transformer_config
from mrl.trainer.optimizer import GuardedOptimizer, wrap_data_parallel
from mrl.trainer.parallel import enter_layout
from mrl.trainer.reference import Reference

LossFn = Callable[[torch.Tensor, torch.Tensor, Sample], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log_probs fp32 [N], entropy fp32 [N], packed fields [N] each) -> (scalar to be summed over all microbatches and
data-parallel ranks, scalar metrics to be summed likewise; names ending in `_max` are maximised)."""


class Trainer:
    """Megatron on this rank. Needs an initialised default process group and `platform.install()` before import."""

    def __init__(self, experiment: Experiment | SftExperiment, platform: Platform, total_steps: int) -> None:
        """Build the model, load the weights of `model.path`, build the optimizer. Collective.

        Args:
            experiment: `model`, `trainer` and `seed` are used; of an RL experiment also the sampling temperature, and
                `algorithm.kl`, which decides whether reference parameters are kept.
            platform: where to compute.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule.

        Raises:
            ValueError: a model whose family table says that it cannot be trained.
        """
        megatron_compat.install()
        rl = isinstance(experiment, Experiment)
        self.platform, self.te = platform, platform.uses_te
        self.temperature = experiment.rollout.sampling.temperature if rl else 1.0
        self.place = enter_layout(experiment.trainer.parallel, experiment.seed)
        self.source = path = model_directory(experiment.model.path)
        self.spec = model_spec(read_config(path), experiment.model.mtp)
        self.spec.require_trainable()
        self.plans = local_params(self.spec, self.layout, self.coord, self.te)
        self.dtype = getattr(torch, experiment.model.dtype)
        self.balance_coef = experiment.trainer.moe.aux_loss_coef

        self.config = transformer_config(self.spec, experiment.trainer, self.dtype, self.te)
        models = build_chunks(self.spec, AutoConfig.from_pretrained(path), self.place, self.config, self.te)
        self._params = {chunk_prefix(self.layout, chunk) + name: param
                        for chunk, model in enumerate(models) for name, param in model.named_parameters()}
        self._untrained = self._buffers(models) | self._carried()
        load_hf(path, self.local_params(), self.plans, self.spec)
        self.chunks = [wrap_data_parallel(model, self.config) for model in models]
        self.config.finalize_model_grads_func = _sum_gradients
        self.optimizer = GuardedOptimizer(self.chunks, experiment.trainer.optimizer, self.dtype, total_steps)
        kl = experiment.algorithm.kl if rl else None
        self._reference = Reference(self._params, platform) if kl and kl.coef > 0 else None
        self._reference_moves = bool(kl and kl.reference_every)

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

    def local_params(self) -> dict[str, torch.Tensor]:
        """All weights of this rank by Megatron's names, as in the reshard plans. They share the model's storage."""
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
    def log_probs(self, microbatches: Sequence[Sequence[Sample]]) -> list[torch.Tensor]:
        """log p(token t | tokens before t), temperature applied, under the current parameters.

        Args:
            microbatches: as for `train`; only the field "tokens" is used.

        Returns:
            One fp32 [T] tensor in host memory per sample, in the order of the microbatches, on every rank of the
            replica; index 0 is 0.
        """
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

    def use_reference(self) -> AbstractContextManager[None]:
        """Within the block the parameters are the reference's, whatever was trained or loaded since: the initial ones
        of `model.path`, or those of the last `update_reference`.

        Raises:
            RuntimeError: algorithm.kl.coef is 0, so none were kept.
        """
        return self._kept_reference().swapped_in()

    def update_reference(self) -> None:
        """Make the reference what the actor is now. RuntimeError as for `use_reference`."""
        self._kept_reference().update()

    def moved_reference(self) -> dict[str, torch.Tensor]:
        """The reference's parameters of this rank, in host memory, where they do not stay those of `model.path`."""
        return self._kept_reference().params if self._reference_moves else {}

    def _kept_reference(self) -> Reference:
        if self._reference is None:
            raise RuntimeError("no reference parameters are kept because algorithm.kl.coef is 0; set it above 0")
        return self._reference

    def save(self, directory: str | Path, extra: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Write weights, optimizer, schedule and random state to `directory`, all or nothing.

        extra: more files to go into it, by name; any rank may give some, under names of its own. Collective.
        """
        checkpoint.save(self, Path(directory), extra)

    def load(self, directory: str | Path) -> None:
        """Restore what `save` wrote. Collective. ValueError for another layout, naming both."""
        checkpoint.load(self, Path(directory))

    def export(self, out: str | Path) -> None:
        """Write the current weights to the new directory `out` as a Hugging Face model. Collective.

        FileExistsError (on rank 0) when `out` is not empty.
        """
        checkpoint.export(self, Path(out))

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

    def _run(self, microbatches: Sequence[Sequence[Sample]], on_logits: Callable) -> list:
        """Megatron's schedule over the microbatches; what `on_logits` reported, on the last stage (else [])."""
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
            forward_step_func=partial(self._forward, on_logits), model=self.chunks,
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

    def _forward(self, on_logits: Callable, rows: Iterator[Packed], model) -> tuple[torch.Tensor, Callable]:
        """Megatron's forward step: hidden states, or logits [1, P, local vocabulary] on the last stage."""
        packed = next(rows)
        sequences = PackedSequences(
            qkv_format="thd", cu_seqlens_q=packed.cu_seqlens, cu_seqlens_kv=packed.cu_seqlens,
            max_seqlen_q=packed.longest, max_seqlen_kv=packed.longest,
        )
        tokens, positions = (self._own(packed, row)[None] for row in (packed.tokens, packed.position_ids))
        output = model(tokens, positions, None, packed_seq_params=sequences)
        return output, partial(on_logits, packed)

    def _loss(self, loss_fn: LossFn, packed: Packed, logits: torch.Tensor) -> tuple:
        log_probs, entropy = self._token_log_probs(packed, logits)
        if packed.real:
            loss, metrics = loss_fn(log_probs, entropy, packed.fields)
            metrics = {name: value.detach() for name, value in metrics.items()}
        else:
            # The backward pass must still run, for its collectives; the sum of nothing gives it zeros.
            loss, metrics = log_probs.sum(), {}
        # Megatron would divide by this count of tokens; `_sum_gradients` ignores it.
        count = torch.zeros((), dtype=torch.int, device=loss.device)
        return loss, count, {"loss": loss.detach().clone(), **metrics}

    def _collect(self, packed: Packed, logits: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
        return self._token_log_probs(packed, logits)[0]

    def _token_log_probs(self, packed: Packed, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of, and entropy before, each real token: two fp32 [N]; 0 at the first of a sequence."""
        local = logits.shape[-1]
        shard = VocabShard(self.coord.tp * local, self.spec.vocab, self.place.tensor_group)
        # The logits at position t are about token t + 1.
        values = log_probs_and_entropy(logits[0], self._own(packed, packed.tokens.roll(-1)), shard, self.temperature)
        if group := self.place.context_group:
            values = (gather_same(value, packed.cu_seqlens, group) for value in values)
        first = packed.position_ids[packed.places] == 0
        return tuple(torch.where(first, 0.0, value.roll(1)[packed.places]) for value in values)

    def _own(self, packed: Packed, row: torch.Tensor) -> torch.Tensor:
        """What of [P] this rank works on: under context parallelism its share, else all of it."""
        group = self.place.context_group
        return row[rows_of(packed.cu_seqlens, len(row), group.size(), group.rank())] if group else row


def _sum_gradients(model: list, num_tokens: torch.Tensor | None = None, **kwargs) -> None:
    """Megatron's reduction of gradients over ranks, without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)

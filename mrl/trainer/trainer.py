"""The trainer of one rank: the policy with its log-probabilities, the reference weights, the critic, checkpoints.

All methods that compute are collective: every rank of the gang calls them in the same order.
"""
from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Iterator, Mapping, Sequence

import torch

from mrl.config.schema import Experiment
from mrl.config.sft import SftExperiment
from mrl.platform import Platform
from mrl.reshard import model_spec, read_config
from mrl.trainer import checkpoint, megatron_compat, routing
from mrl.trainer.critic import Critic
from mrl.trainer.files import model_directory
from mrl.trainer.log_probs import VocabShard, log_probs_and_entropy, projected_log_probs_and_entropy
from mrl.trainer.microbatch import Packed, Sample
from mrl.trainer.parallel import enter_layout
from mrl.trainer.reference import Reference
from mrl.trainer.trained_model import TrainedModel


class Trainer(TrainedModel):
    """The policy, `train` with a loss of (log_probs fp32 [N], entropy fp32 [N], packed fields), and what goes with it.

    Needs an initialised default process group and `platform.install()` before import.
    """

    path_key = "model.path"
    value_head = False
    critic: Critic | None
    """A second model to train, with `algorithm.name: gae`."""

    def __init__(self, experiment: Experiment | SftExperiment, platform: Platform, total_steps: int) -> None:
        """Build the model, load the weights of `model.path`, build the optimizer. Collective.

        Args:
            experiment: `model`, `trainer` and `seed` are used; of an RL experiment also the sampling temperature, and
                `algorithm`, which decides whether reference parameters and a critic are kept.
            platform: where to compute.
            total_steps: the policy's optimizer steps in the whole run, for its learning-rate schedule.

        Raises:
            ValueError: a model whose family table says that it cannot be trained.
        """
        megatron_compat.install()
        algorithm = experiment.algorithm if isinstance(experiment, Experiment) else None
        self.temperature = experiment.rollout.sampling.temperature if algorithm else 1.0
        place = enter_layout(experiment.trainer.parallel, experiment.seed)
        source = model_directory(experiment.model.path)
        super().__init__(source, model_spec(read_config(source), experiment.model.mtp), experiment.trainer,
                         getattr(torch, experiment.model.dtype), place, platform, total_steps)
        kl = algorithm and algorithm.kl
        self._reference = Reference(self._params, platform) if kl and kl.coef > 0 else None
        self._reference_moves = bool(kl and kl.reference_every)
        self._replays = experiment.trainer.moe_routing == "replay"
        if self._replays:
            section = experiment.trainer
            routing.install((chunk.module for chunk in self.chunks), self.spec.moe.dense_layers,
                            section.recompute == "selective" and "moe" in section.recompute_modules)
        self.critic = Critic(experiment, place, platform) if algorithm and algorithm.has_critic else None

    def log_probs(self, microbatches: Sequence[Sequence[Sample]]) -> list[torch.Tensor]:
        """log p(token t | tokens before t), temperature applied, under the current parameters.

        Args:
            microbatches: as for `train`; only the field "tokens" is used.

        Returns:
            One fp32 [T] tensor in host memory per sample, in the order of the microbatches, on every rank of the
            replica; index 0 is 0.
        """
        return self._compute(microbatches)

    def use_reference(self) -> AbstractContextManager[None]:
        """Within the block the parameters are the reference's, whatever was trained or loaded since: the initial ones
        of `model.path`, or those of the last `update_reference`; and tokens go to experts of their choice. Collective.

        Raises:
            RuntimeError: algorithm.kl.coef is 0, so none were kept.
        """
        return self._with_reference(self._kept_reference())

    def update_reference(self) -> None:
        """Make the reference what the actor is now. Collective; RuntimeError as for `use_reference`."""
        self.gather_params()
        self._kept_reference().update()

    def moved_reference(self) -> dict[str, torch.Tensor]:
        """The reference's parameters of this rank, in host memory, where they do not stay those of `model.path`."""
        return self._kept_reference().params if self._reference_moves else {}

    def _kept_reference(self) -> Reference:
        if self._reference is None:
            raise RuntimeError("no reference parameters are kept because algorithm.kl.coef is 0; set it above 0")
        return self._reference

    @contextmanager
    def _with_reference(self, reference: Reference) -> Iterator[None]:
        self.gather_params()
        replays, self._replays = self._replays, False
        try:
            with reference.swapped_in():
                yield
        finally:
            self._replays = replays

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

    def _outputs(self, packed: Packed, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of, and entropy before, each token; `output` is this rank's part of the logits, or the hidden
        states that they are to be made of."""
        targets = self._own(packed, packed.tokens.roll(-1))
        if self.logits_chunk is None:
            shard = self._columns(output.shape[-1])
            log_probs, entropy = log_probs_and_entropy(output[0], targets, shard, self.temperature)
        else:
            last = self.chunks[-1].module
            tied = last.share_embeddings_and_output_weights
            weight = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
            log_probs, entropy = projected_log_probs_and_entropy(
                output[0], weight, targets, self._columns(len(weight)), self.logits_chunk, self.temperature)
        return self._of_next_token(packed, log_probs), self._of_next_token(packed, entropy)

    def _experts(self, packed: Packed) -> torch.Tensor | None:
        chosen = packed.fields.get("experts")
        if chosen is None or not self._replays:
            return None
        row = chosen.new_full((len(packed.tokens), *chosen.shape[1:]), routing.OWN)
        mine = self._own(packed, row.index_copy_(0, packed.places, chosen))
        return mine.chunk(self.layout.tp)[self.coord.tp] if self.config.sequence_parallel else mine

    def _columns(self, local: int) -> VocabShard:
        """The part of the vocabulary, `local` columns, that is this rank's."""
        return VocabShard(self.coord.tp * local, self.spec.vocab, self.place.tensor_group)

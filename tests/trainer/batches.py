"""One batch of groups, several algorithms, and what must become of it: by the formulas of tests/reference, and by
autograd through the plain model, one padded sample a row."""
from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrl.algorithm.loss import make_loss
from mrl.algorithm.weights import token_weights
from mrl.config.algorithm import Algorithm
from mrl.engine.api import Version
from mrl.rollout.types import Group, GroupRequest, Trajectory
from tests.reference import advantages as reference_advantages
from tests.reference import losses as reference_losses
from tests.trainer.tiny import TEMPERATURE, VOCAB, saved_gradients

LENGTHS = ((9, 17, 4, 30), (12, 2, 6), (5, 5))
REWARDS = ((1.0, 0.0, 0.5, 0.0), (0.0, 1.0, 1.0), (0.25, 0.25))
ALGORITHMS = {
    "grpo": {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "clip": {"high": 0.28}},
    "gspo": {"policy_loss": "gspo", "aggregation": "sequence_mean", "clip": {"low": 0.05, "high": 0.05, "dual": 3.0}},
    "cispo": {"policy_loss": "cispo", "aggregation": "prompt_mean", "old_log_prob": "recompute",
              "correction": {"kind": "mask", "level": "sequence", "floor": 0.3, "cap": 3.0}},
    "rloo": {"name": "rloo", "policy_loss": "reinforce", "aggregation": "constant", "constant_tokens": 20,
             "old_log_prob": "recompute", "correction": {"level": "sequence", "cap": 1.1}},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "old_log_prob": "recompute", "correction": {"cap": 1.1},
                            "kl": {"coef": 0.1, "estimator": "k1", "place": "reward"},
                            "aggregation": "sequence_mean_token_sum"},
}


def make_groups(log_probs: list[torch.Tensor], tokens: list[torch.Tensor]) -> list[Group]:
    """Groups whose engine had somewhat other log-probs. The third sample was masked whole, as a truncated one may be;
    the fourth has a tool's answer inside."""
    generator, samples = torch.Generator().manual_seed(5), iter(zip(tokens, log_probs))
    groups = []
    for number, (lengths, rewards) in enumerate(zip(LENGTHS, REWARDS)):
        group = Group(GroupRequest(10 - number, 0, 0, len(lengths), "train"), "", "")
        for sample, reward in enumerate(rewards):
            ids, log_prob = next(samples)
            mask = torch.arange(len(ids)) >= 2
            if (number, sample) == (0, 2):
                mask[:] = False
            if (number, sample) == (0, 3):
                mask[8:15] = False
            noise = 0.2 * torch.randn(len(ids), generator=generator)
            rollout = torch.where(mask, log_prob + noise, torch.nan)  # no masked position may matter
            group.trajectories.append(Trajectory(ids.numpy(), mask.numpy(), rollout.numpy(), Version(0, 0), "stop", "",
                                                 reward))
        groups.append(group)
    return groups


def of_plain_model(model: PreTrainedModel,
                   tokens: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropy of every token, from one batch of padded rows."""
    width = max(map(len, tokens))
    rows = torch.stack([torch.nn.functional.pad(ids, (0, width - len(ids))) for ids in tokens])
    real = torch.stack([torch.arange(width) < len(ids) for ids in tokens])
    log_p = (model(rows, attention_mask=real.long()).logits / TEMPERATURE).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    found, entropies = [], []
    for row, ids in enumerate(tokens):
        taken = log_p[row, :len(ids) - 1].gather(1, ids[1:, None])[:, 0]
        found.append(torch.cat([torch.zeros(1), taken]))
        entropies.append(torch.cat([torch.zeros(1), entropy[row, :len(ids) - 1]]))
    return found, entropies


def expected(algorithm: Algorithm, model: PreTrainedModel, ref: list[torch.Tensor],
             groups: list[Group]) -> tuple[dict, dict]:
    """Metrics by the reference formulas, and gradients by autograd through one padded batch."""
    trajectories = [t for group in groups for t in group.trajectories]
    log_probs, entropy = of_plain_model(model, [torch.from_numpy(t.tokens) for t in trajectories])
    recompute, in_reward = algorithm.old_log_prob == "recompute", algorithm.kl.place == "reward"
    sequences = []
    for t, group, new, old_ref, own in zip(trajectories, [g for g in groups for _ in g.trajectories], log_probs, ref,
                                           entropy):
        new = new.detach()
        penalty = algorithm.kl.coef * (new - old_ref) if in_reward else torch.zeros(len(new))  # k1
        sequences.append({"group": group.request.group_id, "reward": t.reward, "mask": t.loss_mask.tolist(),
                          "penalty": penalty.tolist(), "log_prob": new.tolist(), "ref": old_ref.tolist(),
                          "rollout": t.rollout_log_prob.tolist(), "entropy": own.tolist()})
    advantages, _ = reference_advantages.estimate(algorithm.name, sequences, whiten=algorithm.whitens)
    for sequence, advantage in zip(sequences, advantages):
        sequence["advantage"] = advantage
        sequence["old"] = sequence["log_prob"] if recompute else sequence["rollout"]
    plain = {**algorithm.model_dump(), "old": "old",
             "clip": (algorithm.clip.low, algorithm.clip.high, algorithm.clip.dual),
             "kl": {"estimator": algorithm.kl.estimator, "in_loss": algorithm.kl.coef > 0 and not in_reward},
             "correction": {**algorithm.correction.model_dump(), **({} if recompute else {"kind": "none"})}}
    loss, means = reference_losses.loss(sequences, plain, algorithm.kl.coef)

    masks = [torch.tensor(s["mask"]) for s in sequences]
    fields = {"loss_mask": torch.cat(masks),
              "sequence": torch.arange(len(masks)).repeat_interleave(torch.tensor([len(mask) for mask in masks])),
              "token_weight": torch.cat(token_weights(masks, algorithm.aggregation, None,
                                                      [s["group"] for s in sequences], algorithm.constant_tokens)),
              "mean_weight": torch.cat(token_weights(masks, "token_mean"))}
    for name, key in (("advantage", "advantage"), ("rollout_log_prob", "rollout"), ("ref_log_prob", "ref")):
        fields[name] = torch.tensor([value for s in sequences for value in s[key]])
    make_loss(algorithm, algorithm.kl.coef)(torch.cat(log_probs), torch.cat(entropy), fields)[0].backward()
    return {"loss": loss, **means}, saved_gradients(model)


def truth(actor: Path, reference: Path) -> dict:
    """The batch, and for every algorithm its metrics and gradients."""
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(0, VOCAB, (length,), generator=generator) for lengths in LENGTHS for length in lengths]
    with torch.no_grad():
        log_probs, ref = (of_plain_model(load(path), tokens)[0] for path in (actor, reference))
    groups = make_groups(log_probs, tokens)
    return {"groups": groups, "expected": {name: expected(Algorithm(**algorithm), load(actor), ref, groups)
                                           for name, algorithm in ALGORITHMS.items()}}


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

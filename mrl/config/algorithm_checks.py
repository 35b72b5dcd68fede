"""Checks of the section `algorithm` against itself and the rest of the experiment. Part of `mrl.config.checks`."""
from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from mrl.config.algorithm import Algorithm
from mrl.config.errors import Problem
from mrl.config.schema import Experiment


def check_algorithm(exp: Experiment) -> Iterator[Problem]:
    """Everything about the algorithm that could not work, or that would have no effect."""
    yield from _check_advantages(exp)
    yield from _check_policy_loss(exp)
    yield from _check_old_log_probs(exp)
    yield from _check_kl(exp.algorithm)
    yield from _check_unused(exp.algorithm)


def _check_advantages(exp: Experiment) -> Iterator[Problem]:
    algorithm, samples = exp.algorithm, exp.batch.samples_per_prompt
    if algorithm.compares_groups and samples < 2:
        yield Problem("batch.samples_per_prompt", str(samples),
                      f"at least 2 with algorithm.name {algorithm.name}: the advantage of a group of one is always 0",
                      "use 8 or more")
    if algorithm.name == "pass_at_k" and algorithm.pass_k >= samples > 1:
        yield Problem("algorithm.pass_k", str(algorithm.pass_k), f"less than batch.samples_per_prompt ({samples}): "
                      "otherwise every sample is in the only choice, and none is better than another",
                      "use a smaller algorithm.pass_k, or more samples")
    if algorithm.name == "pass_at_k" and algorithm.std == "unbiased":
        yield Problem("algorithm.std", "unbiased", "biased or none with algorithm.name pass_at_k: all choices of "
                      "algorithm.pass_k samples are a whole population", "set algorithm.std: biased")


def _check_policy_loss(exp: Experiment) -> Iterator[Problem]:
    algorithm, batch = exp.algorithm, exp.batch
    if algorithm.clip.low > 1:
        yield Problem("algorithm.clip.low", str(algorithm.clip.low), "at most 1: the ratio is never negative",
                      "use 0.2")
    if algorithm.clip.dual is not None and algorithm.clip.dual <= 1 + algorithm.clip.high:
        yield Problem("algorithm.clip.dual", str(algorithm.clip.dual),
                      f"more than 1 + algorithm.clip.high ({1 + algorithm.clip.high:g}): it bounds ratios beyond that",
                      "use 3.0, or remove the key")
    if algorithm.policy_loss != "reinforce":
        return
    if batch.minibatches * batch.epochs > 1:
        key = "minibatches" if batch.minibatches > 1 else "epochs"
        yield Problem(f"batch.{key}", str(getattr(batch, key)), "1 with algorithm.policy_loss reinforce: from the "
                      "second optimizer step on the samples are another policy's, and it has no ratio to say so",
                      "set it to 1, or algorithm.policy_loss: ppo")
    if algorithm.old_log_prob == "rollout" and exp.loop.mode == "one_step_overlap":
        yield Problem("algorithm.old_log_prob", "rollout", "recompute with algorithm.policy_loss reinforce and "
                      "loop.mode one_step_overlap: the samples are one version old, and nothing else corrects for it",
                      "set algorithm.old_log_prob: recompute, or algorithm.policy_loss: ppo")


def _check_old_log_probs(exp: Experiment) -> Iterator[Problem]:
    algorithm, correction = exp.algorithm, exp.algorithm.correction
    if (algorithm.old_log_prob == "recompute" and exp.loop.mode == "one_step_overlap"
            and correction.kind == "none"):
        yield Problem("algorithm.correction.kind", "none",
                      "truncate or mask, with algorithm.old_log_prob recompute and loop.mode one_step_overlap: "
                      "recomputing hides that the samples are one version old",
                      "set algorithm.correction.kind: truncate, or algorithm.old_log_prob: rollout")
    if correction.floor >= correction.cap:
        yield Problem("algorithm.correction.floor", str(correction.floor),
                      f"less than algorithm.correction.cap ({correction.cap})", "use 0, or a larger cap")


def _check_kl(algorithm: Algorithm) -> Iterator[Problem]:
    kl = algorithm.kl
    if kl.coef == 0:
        return
    if kl.place == "loss" and kl.estimator == "k1" and not kl.straight_through:
        yield Problem("algorithm.kl.estimator", "k1", "k2 or k3 in the loss: the gradient of k1 averages to 0 on the "
                      "policy's own samples, so it would hold nothing back",
                      "use k3, algorithm.kl.straight_through: true, or algorithm.kl.place: reward")
    if kl.straight_through and (kl.place == "reward" or kl.estimator == "k2"):
        why = ("a reward has no gradient" if kl.place == "reward" else "k2 has that gradient by itself")
        yield Problem("algorithm.kl.straight_through", "true", f"false with algorithm.kl.place {kl.place} and "
                      f"estimator {kl.estimator}: {why}", "remove the key")


def _check_unused(algorithm: Algorithm) -> Iterator[Problem]:
    """Keys that were set and would change nothing."""
    name, loss, kl = algorithm.name, algorithm.policy_loss, algorithm.kl
    corrected = algorithm.old_log_prob == "recompute"
    no_correction = "algorithm.old_log_prob rollout: the ratio itself is trainer/rollout then, and is not corrected"
    used = {
        "std": (name in ("grpo", "pass_at_k"), f"algorithm.name {name}: its advantages are not divided by one"),
        "pass_k": (name == "pass_at_k", f"algorithm.name {name}"),
        "gae.gamma": (name == "gae", f"algorithm.name {name}"),
        "gae.lam": (name == "gae", f"algorithm.name {name}"),
        "clip.low": (loss != "reinforce", "algorithm.policy_loss reinforce: it has no ratio"),
        "clip.high": (loss != "reinforce", "algorithm.policy_loss reinforce: it has no ratio"),
        "clip.dual": (loss in ("ppo", "gspo"), f"algorithm.policy_loss {loss}: its ratio is always bounded"),
        "constant_tokens": (algorithm.aggregation == "constant", f"algorithm.aggregation {algorithm.aggregation}"),
        "correction.level": (corrected, no_correction),
        "correction.cap": (corrected, no_correction),
        "correction.floor": (corrected, no_correction),
        "kl.place": (kl.coef > 0, "algorithm.kl.coef 0: there is no reference"),
        "kl.straight_through": (kl.coef > 0, "algorithm.kl.coef 0: there is no reference"),
        "kl.target": (kl.coef > 0, "algorithm.kl.coef 0: adapting multiplies it"),
        "kl.horizon": (kl.target is not None, "algorithm.kl.target null: coef is fixed"),
        "kl.reference_every": (kl.coef > 0, "algorithm.kl.coef 0: there is no reference"),
    }
    usual = Algorithm()
    for key, (matters, why) in used.items():
        value = attrgetter(key)(algorithm)
        if not matters and value != attrgetter(key)(usual):
            yield Problem(f"algorithm.{key}", str(value).lower(), f"nothing with {why}",
                          f"remove the key, or change {why.partition(':')[0].split()[0]}")

"""The section `algorithm` of the experiment file. docs/algorithms.md has the formula and the paper of every option."""
from __future__ import annotations

from typing import Literal, Optional

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mrl.config.optimizer import Optimizer
from mrl.config.section import Fraction, Section

AdvantageName = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "pass_at_k",
                        "gae", "distill"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "prompt_mean", "constant"]
Estimator = Literal["k1", "k2", "k3"]


class Clip(Section):
    low: PositiveFloat = Field(0.2, description="lower bound of the ratio is 1 - low")
    high: PositiveFloat = Field(0.2, description="upper bound of the ratio is 1 + high (DAPO: 0.28; GSPO: 4e-4)")
    dual: Optional[PositiveFloat] = Field(
        None, description="dual clip: where the advantage A is negative, the loss is at most dual * |A|; null: off")


class Kl(Section):
    coef: NonNegativeFloat = Field(
        0.0, description="weight of KL(actor || reference), with target the first one; 0: no reference")
    estimator: Estimator = Field("k3", description="per-token estimator (Schulman 2020)")
    place: Literal["loss", "reward"] = Field("loss", description="a term of the loss, or taken off the reward")
    straight_through: bool = Field(
        False, description="in the loss: the value of the estimator with the gradient of k2, which is that of the KL")
    target: Optional[PositiveFloat] = Field(
        None, description="adapt coef so that the KL of a token becomes this, nats; null: coef is fixed")
    horizon: PositiveInt = Field(10000, description="with target: samples over which coef follows")
    reference_every: NonNegativeInt = Field(
        0, description="the reference becomes the actor every N steps; 0: it stays the initial model")


class Correction(Section):
    kind: Literal["none", "truncate", "mask"] = Field(
        "truncate", description="with old_log_prob recompute (no effect otherwise): importance weight trainer/rollout, "
                                "kept within floor and cap, or 0 where it is outside")
    level: Literal["token", "sequence"] = Field("token", description="weight of each token, or of the whole sequence")
    cap: PositiveFloat = Field(2.0, description="largest weight")
    floor: NonNegativeFloat = Field(0.0, description="smallest weight")


class Gae(Section):
    gamma: Fraction = Field(1.0, description="discount of a token's reward per token before it")
    lam: Fraction = Field(0.95, description="lambda: 1 trusts what was earned, 0 what the critic expects")


class CriticOptimizer(Optimizer):
    lr: PositiveFloat = Field(1e-5, description="peak learning rate of Adam")


class Critic(Section):
    path: Optional[str] = Field(
        None, description="with name gae: Hugging Face model directory or hub id that the critic begins as; null: "
                          "model.path")
    warmup_steps: NonNegativeInt = Field(0, description="first steps of a run in which only the critic is trained")
    value_clip: Optional[PositiveFloat] = Field(
        0.2, description="how far a value may move from what it was before the step, until its loss has no gradient; "
                         "null: freely")
    offload: bool = Field(
        False, description="keep the critic in host memory while it is idle: room for the policy, at two copies a "
                           "step; with loop.offload_trainers it always is")
    optimizer: CriticOptimizer = CriticOptimizer()


class Algorithm(Section):
    name: AdvantageName = Field(
        "grpo", description="advantages. Of a sample against its group: grpo, rloo (leave one out), pass_at_k, "
                            "reinforce_plus_plus_baseline; against its prompt's greedy answer: remax; against the "
                            "batch: reinforce_plus_plus; against a critic: gae (PPO). Of a token by "
                            "the section `teacher`: distill")
    std: Literal["unbiased", "biased", "none"] = Field(
        "unbiased", description="grpo and pass_at_k: the standard deviation of the group that advantages are divided "
                                "by (none: Dr.GRPO)")
    whiten: Optional[bool] = Field(
        None, description="give advantages mean 0 and standard deviation 1 over the batch's tokens; null: with the "
                          "reinforce_plus_plus names and gae, which are defined so")
    pass_k: PositiveInt = Field(4, description="pass_at_k: the best of so many samples counts")
    gae: Gae = Gae()
    critic: Critic = Critic()
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = Field(
        "ppo", description="ppo: clipped ratio of each token; gspo: of the sequence; cispo: clipped ratio as a weight; "
                           "reinforce: no ratio")
    clip: Clip = Clip()
    aggregation: Aggregation = Field("token_mean", description="how per-token losses become one number")
    constant_tokens: Optional[PositiveInt] = Field(
        None, description="aggregation constant (Dr.GRPO): tokens a sequence counts as, whatever its length; null: "
                          "rollout.sampling.max_response_tokens")
    old_log_prob: Literal["rollout", "recompute"] = Field(
        "rollout", description="proximal log-probs: the engine's, or recomputed before the first minibatch")
    correction: Correction = Correction()
    kl: Kl = Kl()
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened: `whiten`, or what `name` is defined with."""
        usual = self.name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
        return usual if self.whiten is None else self.whiten

    @property
    def compares_groups(self) -> bool:
        """Whether the samples of a prompt are compared with one another, so that one alone says nothing."""
        return self.name in ("grpo", "rloo", "reinforce_plus_plus_baseline", "pass_at_k")

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.name == "gae"

    @property
    def needs_trainer_fields(self) -> bool:
        """Whether advantages need what only the trainers can compute: values, or the KL of every token."""
        return self.has_critic or (self.kl.coef > 0 and self.kl.place == "reward")

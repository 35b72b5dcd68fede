"""The experiment file, as types. One class a section; every key has a default unless only the user can know it.

Field descriptions are what `mrl check --keys` prints, so they are written for the person who fills in the file.
Types are strict (`"8"` is no integer, `true` no number): a file that parses means what it says. What no single field
can decide (layouts, partitions, budgets against each other) is checked in `mrl.config.checks`.
"""
from __future__ import annotations

from typing import Annotated, Literal, Optional

from pydantic import Field, PositiveFloat, PositiveInt, NonNegativeInt, NonNegativeFloat

from mrl.config.algorithm import Algorithm
from mrl.config.optimizer import Optimizer
from mrl.config.section import Fraction, Section
from mrl.reshard.engine_layout import EngineLayout
from mrl.reshard.layout import Layout

Port = Annotated[int, Field(ge=0, le=65535)]


class Model(Section):
    path: str = Field(description="Hugging Face model directory (config.json, *.safetensors, tokenizer) or hub id")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of trainer weights and of the engines")
    mtp: Literal["keep", "drop"] = Field(
        "drop",
        description="layers that predict further tokens: drop, or keep (untrained, not sent to engines, but exported)")
    chat_template: Optional[str] = Field(None, description="path of a Jinja chat template; null: the tokenizer's own")


class Data(Section):
    train: str = Field(description=".jsonl, .parquet, or 'hf:name[:split]' (pip install datasets)")
    eval: Optional[str] = Field(None, description="held-out prompts, same formats; null: no evaluation")
    prompt_key: str = Field("prompt", description="column with the prompt: a string or a list of chat messages")
    answer_key: str = Field("answer", description="column with the reference answer handed to the reward")
    system_prompt: Optional[str] = Field(None, description="put before a string prompt as a system message")
    prompt_suffix: str = Field("", description="appended to a string prompt, e.g. an answer-format instruction")
    max_prompt_tokens: PositiveInt = Field(1024, description="longest prompt allowed, in tokens")
    overlong_prompt: Literal["error", "drop"] = Field("error", description="what to do with a longer prompt")
    shuffle: bool = Field(True, description="reshuffle every epoch (reproducible from `seed`)")


class Reward(Section):
    kind: Literal["math", "exact", "custom"] = Field(
        "math", description="math: math-verify; exact: string equality; custom: your function")
    function: Optional[str] = Field(None, description="for kind custom: 'path.py:function'")
    timeout_s: PositiveFloat = Field(10.0, description="a verifier that takes longer is killed and scores 0")
    processes: PositiveInt = Field(1, description="verifier processes per rollout worker")


class Batch(Section):
    prompts_per_step: PositiveInt = Field(description="prompts a step")
    samples_per_prompt: PositiveInt = Field(description="samples of each prompt: one group")
    minibatches: PositiveInt = Field(1, description="optimizer steps per pass over the batch")
    epochs: PositiveInt = Field(1, description="passes over the batch")
    max_tokens_per_microbatch: PositiveInt = Field(
        16384, description="tokens one forward/backward holds on one data-parallel replica")


class TrainerParallel(Section):
    tp: PositiveInt = Field(1, description="tensor parallel size")
    pp: PositiveInt = Field(1, description="pipeline parallel size")
    vpp: PositiveInt = Field(1, description="chunks of the model on each pipeline stage (interleaved schedule)")
    first_stage_layers: Optional[PositiveInt] = Field(
        None, description="layers of the first pipeline stage; null: as many as stages without a number of their own")
    last_stage_layers: Optional[PositiveInt] = Field(None, description="layers of the last pipeline stage, likewise")
    cp: PositiveInt = Field(1, description="context parallel size: ranks that share the tokens of every sample")
    ep: PositiveInt = Field(1, description="expert parallel size: parts into which a layer's experts are dealt out")
    etp: PositiveInt = Field(1, description="tensor parallel size of each expert")
    sequence_parallel: bool = Field(
        False, description="Megatron sequence parallelism in the tensor-parallel group; experts with tp > 1 need it")

    def layout(self, ranks: int) -> Layout:
        """The layout of so many trainer ranks. ValueError where they are no multiple of what these sizes need."""
        if ranks % (self.tp * self.cp * self.pp):
            raise ValueError(f"{ranks} trainer ranks cannot be split into replicas of trainer.parallel.tp {self.tp} * "
                             f"cp {self.cp} * pp {self.pp} = {self.tp * self.cp * self.pp} ranks")
        return Layout(tp=self.tp, cp=self.cp, pp=self.pp, dp=ranks // (self.tp * self.pp), ep=self.ep, etp=self.etp,
                      vpp=self.vpp,
                      first_stage_layers=self.first_stage_layers, last_stage_layers=self.last_stage_layers)


class Moe(Section):
    aux_loss_coef: NonNegativeFloat = Field(
        0.0, description="weight of the experts' load-balancing loss, summed over layers (Fedus et al. 2021); 0: none")


class Trainer(Section):
    parallel: TrainerParallel = TrainerParallel()
    moe: Moe = Moe()
    optimizer: Optimizer = Optimizer()
    max_restarts: NonNegativeInt = Field(3, description="restarts of the whole gang from the last checkpoint")
    env: dict[str, str] = Field({}, description="extra environment of the trainer ranks")


class RolloutParallel(Section):
    tp: PositiveInt = Field(1, description="tensor parallel size of one engine, which is the number of its GPUs")
    ep: PositiveInt = Field(
        1, description="parts into which an engine deals out the experts of a layer, each cut over tp / ep GPUs; vLLM: "
                       "1 or tp")
    dp: PositiveInt = Field(
        1, description="attention data parallel size within tp: replicas of attention, each cut over tp / dp GPUs; "
                       "SGLang alone")

    def layout(self, engine: Literal["vllm", "sglang"], count: int, gpus_per_node: int) -> EngineLayout:
        """The layout of so many engines. ValueError for sizes that do not divide."""
        return EngineLayout(engine=engine, count=count, tp=self.tp, ep=self.ep, dp=self.dp, gpus_per_node=gpus_per_node)


class Sampling(Section):
    temperature: NonNegativeFloat = Field(1.0, description="sampling temperature; the trainer applies the same one")
    top_p: Fraction = Field(1.0, description="nucleus mass; training needs 1.0")
    top_k: int = Field(-1, ge=-1, description="number of tokens kept; training needs -1, all of them")
    max_response_tokens: PositiveInt = Field(1024, description="longest response, in tokens")
    stop_token_ids: list[NonNegativeInt] = Field([], description="besides the model's end-of-sequence tokens")


class Rollout(Section):
    engine: Literal["vllm", "sglang"] = Field("vllm", description="inference engine")
    python: str = Field(description="Python of the environment that holds the engine: a path, or a name on PATH")
    parallel: RolloutParallel = RolloutParallel()
    sampling: Sampling = Sampling()
    workers: PositiveInt = Field(1, description="rollout workers (CPU processes that run episodes and rewards)")
    max_concurrent_requests: PositiveInt = Field(256, description="requests in flight per engine")
    host: str = Field("127.0.0.1", description="address the engine server binds")
    port: Port = Field(0, description="0: a free one; else engine i takes port + i")
    start_timeout_s: PositiveFloat = Field(600.0, description="longest wait for an engine to come up")
    request_timeout_s: PositiveFloat = Field(3600.0, description="longest wait for one completion")
    max_restarts: NonNegativeInt = Field(3, description="restarts of one engine before the run gives up")
    args: list[str] = Field([], description="extra command-line arguments of the engine server, not the ones mrl sets")
    env: dict[str, str] = Field({}, description="extra environment of the engine server")


class Sync(Section):
    strategy: Literal["auto", "broadcast", "multi_sender", "sharded"] = Field(
        "auto", description="who sends what to whom; auto: what should take the least time")
    transport: Literal["auto", "nccl", "gloo", "cuda_ipc", "disk"] = Field(
        "auto", description="how buckets travel; auto: nccl between separate GPUs, else gloo")
    disk_dir: Optional[str] = Field(None, description="transport disk: a directory that all machines of the run see, "
                                    "with room for the model; null: the run directory")
    bucket_mb: PositiveFloat = Field(512, description="size of one flat message, MiB")
    buffers: Annotated[int, Field(ge=2)] = Field(2, description="buckets in memory at once, on each side")
    delta: bool = Field(False, description="send only what has changed since the last sync; each sending rank keeps "
                        "what it sent last")
    verify_every: NonNegativeInt = Field(
        0, description="compare checksums at the first sync and every N-th; 0: the first only")
    timeout_s: PositiveFloat = Field(300.0, description="deadline of one whole sync, both ends")


class Loop(Section):
    mode: Literal["one_step_overlap", "colocated_sync"] = Field(
        "one_step_overlap", description="generate the next batch while training on this one, or take turns")
    steps: PositiveInt = Field(description="training steps")
    collect_timeout_s: PositiveFloat = Field(7200.0, description="longest wait for one batch")


class Cluster(Section):
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda when a GPU is visible; on cpu the counts below are processes")
    trainer_gpus: Optional[PositiveInt] = Field(None, description="one_step_overlap: GPUs of the trainer partition")
    rollout_gpus: Optional[PositiveInt] = Field(None, description="one_step_overlap: GPUs of the rollout partition")
    gpus: Optional[PositiveInt] = Field(None, description="colocated_sync: GPUs that trainers and engines share")
    gpus_per_node: PositiveInt = Field(8, description="GPUs of one machine; with the next two, what plans of a sync "
                                       "reckon with")
    nic_gb_s: PositiveFloat = Field(50.0, description="network bandwidth of one GPU in one direction, 10^9 bytes/s")
    nvlink_gb_s: PositiveFloat = Field(
        400.0, description="bandwidth between the GPUs of one machine, of each in one direction, 10^9 bytes/s")


class Eval(Section):
    every: NonNegativeInt = Field(0, description="evaluate before step 0, every N steps and after the last; 0: never")
    samples_per_prompt: PositiveInt = Field(1, description="samples of each held-out prompt")
    temperature: NonNegativeFloat = Field(1.0, description="sampling temperature of evaluation; 0: greedy")
    max_prompts: Optional[PositiveInt] = Field(None, description="first N held-out prompts; null: all")


class Checkpoint(Section):
    every: NonNegativeInt = Field(50, description="save every N steps, and after the last; 0: only after the last")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")


class Log(Section):
    dir: str = Field("runs", description="run directories are made under it")
    tensorboard: bool = Field(True, description="also write TensorBoard event files")
    logprob_diff_alarm: PositiveFloat = Field(
        0.2, description="say so when trainer and engine log-probs differ by more than this on average")
    trajectories_per_step: NonNegativeInt = Field(4, description="sampled trajectories written out readably each step")


class SftBatch(Section):
    samples_per_step: PositiveInt = Field(description="samples of one optimizer step")
    max_tokens_per_microbatch: PositiveInt = Field(
        16384, description="tokens one forward/backward holds on one data-parallel replica")


class SftCluster(Section):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda when a GPU is visible")


class SftExperiment(Section):
    """One supervised fine-tuning: everything `mrl.sft` needs to know. torchrun decides the number of ranks."""

    seed: NonNegativeInt = Field(1, description="of the samples' order and initialisation")
    out: str = Field(description="directory to write, as a Hugging Face checkpoint")
    steps: PositiveInt = Field(description="optimizer steps, at most")
    stop_below: NonNegativeFloat = Field(
        0.0, description="stop when the loss, averaged over 20 steps, is below; 0: never")
    model: Model
    data: Data
    batch: SftBatch
    trainer: Trainer = Trainer()
    cluster: SftCluster = SftCluster()


class Experiment(Section):
    """One experiment: everything `mrl train` needs to know."""

    name: str = Field("experiment", pattern=r"^[A-Za-z0-9._-]+$", description="run directories are named after it")
    seed: NonNegativeInt = Field(1, description="of prompts' order, sampling and initialisation")
    model: Model
    data: Data
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    batch: Batch
    trainer: Trainer = Trainer()
    rollout: Rollout
    sync: Sync = Sync()
    loop: Loop
    cluster: Cluster
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    @property
    def trainer_ranks(self) -> int:
        """Processes of the trainer gang: one a GPU of its partition (on cpu: as many processes)."""
        count = self.cluster.gpus if self.loop.mode == "colocated_sync" else self.cluster.trainer_gpus
        return count or 0

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a model in one training step."""
        return self.batch.minibatches * self.batch.epochs

    @property
    def policy_updates(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        return (self.loop.steps - self.algorithm.critic.warmup_steps) * self.updates_per_step

    @property
    def critic_updates(self) -> int:
        """Optimizer steps of the critic in the whole run, where there is one."""
        return self.loop.steps * self.updates_per_step

    @property
    def engine_count(self) -> int:
        """Engines of the fleet: GPUs of its partition (colocated_sync: of the shared one) / `rollout.parallel.tp`."""
        count = self.cluster.gpus if self.loop.mode == "colocated_sync" else self.cluster.rollout_gpus
        return (count or 0) // self.rollout.parallel.tp

    @property
    def data_parallel(self) -> int:
        """Groups of trainer ranks that work on samples of their own."""
        parallel = self.trainer.parallel
        return self.trainer_ranks // (parallel.tp * parallel.pp * parallel.cp)

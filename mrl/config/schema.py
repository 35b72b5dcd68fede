"""The experiment file, as types. One class a section; every key has a default unless only the user can know it.

Field descriptions are what `mrl check --keys` prints, so they are written for the person who fills in the file.
Types are strict (`"8"` is no integer, `true` no number): a file that parses means what it says. What no single field
can decide (layouts, partitions, budgets against each other) is checked in `mrl.config.checks`.
"""
from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mrl.config.algorithm import Algorithm
from mrl.config.rewards import KINDS, AnyPart, Math, judging_parts, named_parts
from mrl.config.section import Fraction, Section
from mrl.config.trainer import Trainer
from mrl.reshard.engine_layout import EngineLayout

Port = Annotated[int, Field(ge=0, le=65535)]
DatasetName = Annotated[str, Field(pattern=r"^\w+$")]


class Model(Section):
    path: str = Field(description="Hugging Face model directory (config.json, *.safetensors, tokenizer) or hub id")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of trainer weights and of the engines")
    mtp: Literal["keep", "drop"] = Field(
        "drop",
        description="layers that predict further tokens: drop, or keep (untrained, not sent to engines, but exported)")
    chat_template: Optional[str] = Field(None, description="path of a Jinja chat template; null: the tokenizer's own")


class Data(Section):
    train: str = Field(description=".jsonl, .parquet, 'hf:name[:split]' (pip install datasets) or "
                        "'reasoning_gym:task[:option=value,...]' (pip install reasoning-gym)")
    prompt_key: str = Field("prompt", description="column with the prompt: a string or a list of chat messages")
    answer_key: str = Field("answer", description="column with the reference answer handed to the reward")
    system_prompt: Optional[str] = Field(None, description="put before a string prompt as a system message")
    prompt_suffix: str = Field("", description="appended to a string prompt, e.g. an answer-format instruction")
    max_prompt_tokens: PositiveInt = Field(1024, description="longest prompt allowed, in tokens")
    overlong_prompt: Literal["error", "drop"] = Field("error", description="what to do with a longer prompt")
    shuffle: bool = Field(True, description="reshuffle every epoch (reproducible from `seed`)")


class Overlong(Section):
    buffer_tokens: NonNegativeInt = Field(
        0, description="last tokens before rollout.sampling.max_response_tokens, over which a penalty grows from 0 to "
                       "`penalty` (DAPO's soft overlong punishment); 0: none")
    penalty: NonNegativeFloat = Field(1.0, description="what a response at the limit loses")
    mask_truncated: bool = Field(
        False, description="do not train on responses cut off at the limit (DAPO's overlong filtering); they count in "
                           "their group's mean and std all the same")


class Accuracy(Section):
    parts: Optional[list[str]] = Field(
        None, min_length=1, description="parts of the reward that say whether a response is right; null: those of "
                                        "positive weight that compare it with the reference answer, if any, else all "
                                        "of positive weight")
    full_marks: float = Field(1.0, description="a response is right if it scores at least this in each of them, before "
                                               "weights")


class Reward(Section):
    """`{kind: X, ...}` is short for `{parts: {X: {kind: X, ...}}}`, which is what it becomes when it is read."""

    kind: Optional[Literal[tuple(KINDS)]] = Field(
        None, description="short for `parts` with one part of this kind, whose keys stand beside it; null: see parts")
    parts: dict[str, AnyPart] = Field(
        {"math": Math(kind="math")}, min_length=1, json_schema_extra={"default": {"math": {"kind": "math"}}},
        description="name: {kind, weight, ...}; the reward is the sum of weight * score. docs/rewards.md has the kinds "
                    "and their keys")
    processes: PositiveInt = Field(1, description="processes per rollout worker that score responses")
    accuracy: Accuracy = Accuracy()
    overlong: Overlong = Overlong()

    @property
    def judging(self) -> list[str]:
        """Names of the parts that say whether a response is right."""
        return judging_parts(self.parts) if self.accuracy.parts is None else self.accuracy.parts

    @model_validator(mode="before")
    @classmethod
    def _one_part(cls, given: Any) -> Any:
        return named_parts(given, set(cls.model_fields)) if isinstance(given, dict) else given


class Batch(Section):
    prompts_per_step: PositiveInt = Field(description="prompts a step")
    samples_per_prompt: PositiveInt = Field(description="samples of each prompt: one group")
    minibatches: PositiveInt = Field(1, description="optimizer steps per pass over the batch")
    epochs: PositiveInt = Field(1, description="passes over the batch")
    max_tokens_per_microbatch: PositiveInt = Field(
        16384, description="tokens one forward/backward holds on one data-parallel replica")


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


class Filters(Section):
    zero_variance: bool = Field(
        False,
        description="leave out groups whose samples all have the same reward, before the overlong penalty (DAPO)")
    accuracy_min: Optional[Fraction] = Field(
        None, description="leave out groups in which a smaller share of the samples is right (reward.accuracy)")
    accuracy_max: Optional[Fraction] = Field(None, description="leave out groups in which a larger share is")

    @property
    def active(self) -> bool:
        """Whether any group can be left out."""
        return self.zero_variance or self.accuracy_min is not None or self.accuracy_max is not None


class DynamicSampling(Section):
    max_gen_batches: PositiveInt = Field(
        10, description="prompts drawn for one step at most, in multiples of batch.prompts_per_step, where filters "
                        "leave groups out (verl: max_num_gen_batches); 1: no replacements")
    at_limit: Literal["train", "error"] = Field(
        "train", description="when the batch is not full by then: train on the groups there are, or end the run")


class Priority(Section):
    by: Literal["none", "failure", "learnability"] = Field(
        "none", description="probability of a prompt to be drawn in an epoch, by its last accuracy a: 1; 1 - a; or "
                            "4a(1 - a)")
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = Field(0.1, description="least such probability")


class Rollout(Section):
    engine: Literal["vllm", "sglang"] = Field("vllm", description="inference engine")
    python: str = Field(description="Python of the environment that holds the engine: a path, or a name on PATH")
    parallel: RolloutParallel = RolloutParallel()
    quantization: Optional[Literal["fp8"]] = Field(
        None, description="fp8: projections in blocks of 128 x 128, quantised by the trainer in every sync; null: in "
        "model.dtype")
    sampling: Sampling = Sampling()
    filters: Filters = Filters()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    oversample: NonNegativeInt = Field(
        0, description="prompts of a step sampled from the start beyond batch.prompts_per_step, lest a group be left "
                       "out; what is not needed is drawn again in the next step")
    priority: Priority = Priority()
    workers: PositiveInt = Field(1, description="rollout workers (CPU processes that run episodes and rewards)")
    max_concurrent_requests: PositiveInt = Field(256, description="requests in flight per engine")
    host: str = Field("127.0.0.1", description="address the engine server binds")
    port: Port = Field(0, description="0: a free one; else engine i takes port + i")
    start_timeout_s: PositiveFloat = Field(600.0, description="longest wait for an engine to come up")
    request_timeout_s: PositiveFloat = Field(3600.0, description="longest wait for one completion")
    max_restarts: NonNegativeInt = Field(3, description="restarts of one engine before the run gives up")
    args: list[str] = Field([], description="extra command-line arguments of the engine server, not the ones mrl sets")
    env: dict[str, str] = Field({}, description="extra environment of the engine server")


class Teacher(Section):
    path: str = Field(description="Hugging Face model directory or hub id, with the student's tokenizer")
    dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of its weights")
    engine: Literal["vllm", "sglang"] = Field("vllm", description="inference engine")
    python: str = Field(description="Python of the environment that holds the engine: a path, or a name on PATH")
    parallel: RolloutParallel = RolloutParallel()
    args: list[str] = Field([], description="extra command-line arguments of the engine server, not the ones mrl sets")
    env: dict[str, str] = Field({}, description="extra environment of the engine server")


class Sync(Section):
    strategy: Literal["auto", "broadcast", "multi_sender", "sharded"] = Field(
        "auto", description="who sends what to whom; auto: what should take the least time")
    transport: Literal["auto", "nccl", "gloo", "cuda_ipc", "disk"] = Field(
        "auto", description="how buckets travel; auto: nccl between separate GPUs, cuda_ipc within shared ones, else "
                            "gloo")
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
    sleep_engines: Optional[bool] = Field(
        None, description="colocated_sync on GPUs: engines give up the memory of weights and cache while the trainers "
                          "train; null: there yes")
    offload_trainers: Optional[bool] = Field(
        None, description="colocated_sync on GPUs: trainers keep weights and optimizer state in host memory while "
                          "engines generate; null: there yes")
    collect_timeout_s: PositiveFloat = Field(7200.0, description="longest wait for one batch")


class Cluster(Section):
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda when a GPU is visible; on cpu the counts below are processes")
    trainer_gpus: Optional[PositiveInt] = Field(None, description="one_step_overlap: GPUs of the trainer partition")
    rollout_gpus: Optional[PositiveInt] = Field(None, description="one_step_overlap: GPUs of the rollout partition")
    gpus: Optional[PositiveInt] = Field(None, description="colocated_sync: GPUs that trainers and engines share")
    teacher_gpus: Optional[PositiveInt] = Field(
        None, description="GPUs of the teacher's engines, in either mode; with `teacher` alone")
    gpus_per_node: PositiveInt = Field(8, description="GPUs of one machine; with the next two, what plans of a sync "
                                       "reckon with")
    nic_gb_s: PositiveFloat = Field(50.0, description="network bandwidth of one GPU in one direction, 10^9 bytes/s")
    nvlink_gb_s: PositiveFloat = Field(
        400.0, description="bandwidth between the GPUs of one machine, of each in one direction, 10^9 bytes/s")


class EvalSampling(Section):
    temperature: NonNegativeFloat = Field(1.0, description="sampling temperature; 0: greedy")
    top_p: Fraction = Field(1.0, description="nucleus mass")
    top_k: int = Field(-1, ge=-1, description="number of tokens kept; -1: all of them")
    max_response_tokens: Optional[PositiveInt] = Field(
        None, description="longest response, in tokens; null: as rollout.sampling")


class EvalDataset(Section):
    path: str = Field(description="held-out prompts, in one of the formats of data.train")
    samples_per_prompt: PositiveInt = Field(1, description="samples of each prompt")
    max_prompts: Optional[PositiveInt] = Field(None, description="first N prompts; null: all")
    sampling: EvalSampling = EvalSampling()
    prompt_key: Optional[str] = Field(None, description="column with the prompt; null: data.prompt_key")
    answer_key: Optional[str] = Field(None, description="column with the reference answer; null: data.answer_key")
    subset_key: Optional[str] = Field(None, description="column whose values divide the prompts into subsets that are "
                                      "reported one by one, e.g. level; null: none")
    reward: Optional[Reward] = Field(None, description="as the section `reward`; null: the experiment's own")

    def columns(self, data: Data) -> Data:
        """The `data` section with this data set's own columns."""
        own = {"prompt_key": self.prompt_key, "answer_key": self.answer_key}
        return data.model_copy(update={key: column for key, column in own.items() if column is not None})


class Eval(Section):
    every: NonNegativeInt = Field(0, description="evaluate before step 0, every N steps and after the last; 0: never")
    datasets: dict[DatasetName, EvalDataset] = Field(
        {}, description="held-out data sets, each under a name of its own")
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.95, description="confidence of the intervals of results (bootstrap over prompts)")
    save_samples: bool = Field(True, description="write every evaluated sample to a file")


class Checkpoint(Section):
    every: NonNegativeInt = Field(50, description="save every N steps, and after the last; 0: only after the last")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")


class PlainLog(Section):
    dir: str = Field("runs", description="run directories are made under it")
    tensorboard: bool = Field(True, description="also write TensorBoard event files")


class Log(PlainLog):
    logprob_diff_alarm: PositiveFloat = Field(
        0.2, description="say so when trainer and engine log-probs differ by more than this on average")
    trajectories_per_step: NonNegativeInt = Field(4, description="sampled trajectories written out readably each step")


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
    teacher: Optional[Teacher] = Field(
        None, description="model to learn from, served by engines of its own; with algorithm.name distill alone")
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

    def engines_sleep(self, device: str) -> bool:
        """Whether engines give their memory up while trainers train. `device`: `cluster.device`, decided."""
        return self._takes_turns(device) if self.loop.sleep_engines is None else self.loop.sleep_engines

    def trainers_offload(self, device: str) -> bool:
        """Whether trainers give their memory up while engines generate. `device` as above."""
        return self._takes_turns(device) if self.loop.offload_trainers is None else self.loop.offload_trainers

    def _takes_turns(self, device: str) -> bool:
        return self.loop.mode == "colocated_sync" and device == "cuda"

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
    def teacher_count(self) -> int:
        """Engines of the teacher: `cluster.teacher_gpus` / `teacher.parallel.tp`; 0 without a teacher."""
        return (self.cluster.teacher_gpus or 0) // self.teacher.parallel.tp if self.teacher else 0

    @property
    def data_parallel(self) -> int:
        """Groups of trainer ranks that work on samples of their own."""
        parallel = self.trainer.parallel
        return self.trainer_ranks // (parallel.tp * parallel.pp * parallel.cp)

    @property
    def engine_tokens(self) -> int:
        """Tokens that an engine must hold of one sample, prompt and response together."""
        responses = [self.rollout.sampling.max_response_tokens,
                     *(dataset.sampling.max_response_tokens or 0 for dataset in self.eval.datasets.values())]
        return self.data.max_prompt_tokens + max(responses)

    @property
    def rewards(self) -> dict[str, Reward]:
        """Every section that describes a reward, by its key."""
        own = {f"eval.datasets.{name}.reward": dataset.reward for name, dataset in self.eval.datasets.items()}
        return {"reward": self.reward, **{key: reward for key, reward in own.items() if reward is not None}}

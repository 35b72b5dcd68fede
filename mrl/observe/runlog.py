"""What a run writes about itself: metrics.jsonl, TensorBoard, readable trajectories, and the progress line."""
from __future__ import annotations

import json
import time
from pathlib import Path

from mrl.config.schema import Eval, PlainLog
from mrl.evaluation.report import flat_metrics, reports
from mrl.evaluation.samples import save_samples
from mrl.rollout.types import Group
from mrl.stream.report import PushReport

_ERRORS_SHOWN = 5
_PROGRESS = (("reward", "reward/mean", 3), ("acc", "rollout/accuracy", 3), ("len", "rollout/response_length", 1),
             ("logprob_diff", "rollout/logprob_diff", 4), ("grad", "actor/grad_norm", 3),
             ("explained", "critic/explained_variance", 3))
"""What the progress line shows of a step: label, metric, digits."""
_TIMINGS = ("gen", "wait_prev_gen", "old_log_prob", "ref_log_prob", "values", "update_critic", "update_actor",
            "checkpoint", "offload", "wake", "sync", "sleep", "onload")


class RunLog:
    """Rank 0's log. Every line is flushed, so that a killed run keeps what it had."""

    def __init__(self, run_dir: Path, log: PlainLog, steps: int, attempt: int):
        self.run_dir, self.log, self.steps, self.attempt = run_dir, log, steps, attempt
        self.metrics_file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8", buffering=1)
        self.console = open(run_dir / "progress.log", "a", encoding="utf-8", errors="backslashreplace", buffering=1)
        self.board = None
        if log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(str(run_dir / "tensorboard"))

    def say(self, text: str) -> None:
        """One line for the person who watches the run."""
        self.console.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.metrics_file.write(json.dumps({"step": step, "attempt": self.attempt, **values}) + "\n")
        if self.board:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(name, value, step)

    def step(self, step: int, values: dict[str, float]) -> None:
        """The metrics of one training step, and its progress line."""
        self.metrics(step, {"kind": "train", **values})
        if missing := values.get("filters/groups_missing"):
            self.say(f"step {step}: {missing} groups of the batch are missing, since rollout.filters left out "
                     f"{1 - values['filters/prompts_used']:.0%} of the prompts drawn, up to the limit of "
                     f"rollout.dynamic_sampling.max_gen_batches")
        if "reward/mean" not in values:
            self.say(f"step {step}/{self.steps} trained nothing: no group was left | {values['timing/step']:.2f}s")
            return
        for model in ("actor", "critic"):
            if values.get(f"{model}/update_skipped"):
                self.say(f"step {step}: the gradient of the {model} was not finite, an update was skipped")
        difference = values.get("rollout/logprob_diff", 0.0)  # absent where only the critic was trained
        if difference > self.log.logprob_diff_alarm:
            self.say(f"step {step}: trainer and engine disagree on log-probabilities by {difference:.3f} on average "
                     f"(log.logprob_diff_alarm = {self.log.logprob_diff_alarm})")
        shown = " ".join(f"{label} {values[name]:.{digits}f}" for label, name, digits in _PROGRESS if name in values)
        parts = " ".join(f"{name} {values[f'timing/{name}']:.2f}" for name in _TIMINGS
                         if values.get(f"timing/{name}", 0) >= 0.005)
        self.say(f"step {step}/{self.steps} {shown} | {values['timing/step']:.2f}s = {parts}")

    def evaluation(self, groups: list[Group], config: Eval, seed: int) -> None:
        """Held-out results, under the step that asked for them, and the samples they come from."""
        step, found = groups[0].request.step, reports(groups, config, seed)
        self.metrics(step, {"kind": "eval", **flat_metrics(found)})
        self.unscored(f"evaluation after step {step}", groups)
        if config.save_samples:
            save_samples(self.run_dir / "evaluations" / f"step_{step:06d}", found)
        for name, report in found.items():
            shown = " ".join(f"{result.removesuffix('/mean')} {value:.3f}"
                             for result, (value, *_) in report.results.items() if "@" in result)
            self.say(f"evaluation after step {step}: {name} {shown} ({report.counts['prompts']} prompts)")

    def push(self, step: int, report: PushReport) -> None:
        """One weight sync: sizes and seconds; an engine that failed is named, and gets the weights when it is back."""
        self.metrics(step, {"kind": "sync", "sync/seconds": report.seconds, "sync/gather": report.gather_s,
                            "sync/send": report.send_s, "sync/load": report.load_s,
                            "sync/transfer": report.transfer_s, "sync/bytes": report.bytes,
                            "sync/sent_fraction": report.sent_fraction,
                            "sync/verified": report.verified, "sync/unverified": len(report.unverified),
                            "sync/version": report.version, "sync/strategy": report.strategy})
        for index, error in {**report.errors, **report.absent}.items():
            if error:
                self.say(f"engine {index} did not take the weights of step {step}: {error}")
        if report.unverified:
            self.say(f"{len(report.unverified)} tensors could not be verified, since the engine's loader transforms "
                     f"them: {', '.join(report.unverified[:5])}")

    def trajectories(self, name: str, groups: list[Group]) -> None:
        """The first sample of the first log.trajectories_per_step groups, one JSON object a line."""
        self.unscored(name, groups)
        chosen = [(group, group.trajectories[0]) for group in groups[:self.log.trajectories_per_step]]
        folder = self.run_dir / "trajectories"
        folder.mkdir(exist_ok=True)
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8", errors="backslashreplace") as file:
            for group, t in chosen:
                file.write(json.dumps({
                    "prompt": group.prompt_text, "response": t.response_text, "answer": group.answer,
                    "reward": t.reward, "reward_parts": t.reward_parts, "reward_error": t.reward_error,
                    "finish_reason": t.finish_reason,
                    "version": str(t.version), "group": group.request.group_id}, ensure_ascii=False) + "\n")

    def unscored(self, name: str, groups: list[Group]) -> None:
        """Samples that could not be scored are named in the progress log, up to _ERRORS_SHOWN of them."""
        unscored = [(group, i, t) for group in groups for i, t in enumerate(group.trajectories) if t.reward_error]
        for group, i, t in unscored[:_ERRORS_SHOWN]:
            self.say(f"{name}: sample {i} of group {group.request.group_id} (row {group.request.prompt_index}) could "
                     f"not be scored: {t.reward_error}")
        if len(unscored) > _ERRORS_SHOWN:
            self.say(f"{name}: nor could {len(unscored) - _ERRORS_SHOWN} others")

    def close(self) -> None:
        self.metrics_file.close()
        self.console.close()
        if self.board:
            self.board.close()

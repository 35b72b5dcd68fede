"""`mrl eval`: held-out accuracy of a Hugging Face checkpoint, by the same engine, prompts and rewards as in training.

There are no trainers: the engines take the machine's first GPUs.
"""
from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mrl.cluster.fleet import STOP_TIMEOUT_S, start_fleet
from mrl.cluster.placement import with_device
from mrl.config.schema import Experiment
from mrl.engine.api import Version
from mrl.engine.guard import guard_this_process


def evaluate(experiment: Experiment, model: Path | None) -> int:
    """Print mean@n, best@n and maj@n of `model` (default: the experiment's model.path) on data.eval; 0 when done.

    Samples and logs are kept in a directory under log.dir. The experiment has passed `preflight_evaluation`.
    """
    from mrl.rollout.evaluation import evaluation_metrics
    from mrl.rollout.service import RolloutService

    experiment = with_device(experiment)
    if model is not None:
        section = experiment.model.model_copy(update={"path": str(model)})
        experiment = experiment.model_copy(update={"model": section})
    run_dir = (Path(experiment.log.dir) / f"{experiment.name}-eval-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    (run_dir / "logs").mkdir(parents=True)
    guard_this_process(STOP_TIMEOUT_S)
    console = Console()
    with console.status(f"starting {experiment.rollout.engine}") as status:
        with start_fleet(experiment, run_dir.name, run_dir, load_weights=True) as fleet:
            service = RolloutService(experiment, fleet.workers, fleet.engines, kinds=("eval",))
            service.ask_evaluation(Version(0, 0))

            def beat() -> None:
                status.update(f"{len(service.groups['eval'])} of {service.eval_prompts} prompts sampled "
                              f"{experiment.eval.samples_per_prompt} times each")

            try:
                service.wait(beat)
            finally:
                service.close()
            groups = service.take("eval")
    metrics = evaluation_metrics(groups)
    with open(run_dir / "samples.jsonl", "w", encoding="utf-8") as file:
        for group in groups:
            for t in group.trajectories:
                file.write(json.dumps({"prompt": group.prompt_text, "answer": group.answer, "response": t.response_text,
                                       "reward": t.reward, "finish_reason": t.finish_reason}) + "\n")
    (run_dir / "metrics.json").write_text(json.dumps(metrics))
    table = Table("metric", "value", title=f"{experiment.model.path} on {experiment.data.eval}")
    for name, value in metrics.items():
        table.add_row(name.removeprefix("eval/"), f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
    console.print(f"samples: {run_dir}/samples.jsonl")
    return 0

"""The command line. It parses arguments, loads and checks the experiment, and hands over; the work is elsewhere.

Heavy modules are imported inside the commands, so that `mrl --help` and `mrl check` answer at once.
"""
from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

import typer
from rich.console import Console

from mrl.config.errors import ConfigError, UserError
from mrl.config.schema import Experiment, Section

if TYPE_CHECKING:
    from mrl.preflight import Findings

USER_ERROR_CODE = 2
Kind = TypeVar("Kind", bound=Section)

app = typer.Typer(
    help="Reinforcement learning for large language models: Megatron-core trains, an engine generates.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ExperimentFile = Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="the experiment's YAML file")]
Overrides = Annotated[Optional[list[str]], typer.Argument(
    metavar="[KEY=VALUE]...", help="override keys of the file, for example loop.steps=10 cluster.device=cpu")]


@app.command()
def train(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    run_dir: Annotated[Optional[Path], typer.Option(
        help="directory of the run; one that exists is resumed. Default: a new one under log.dir")] = None,
) -> None:
    """Train a model by reinforcement learning, as the experiment file says."""
    with _user_errors():
        from mrl.preflight import preflight_training

        exp, _ = _checked(experiment, overrides, preflight_training)
        from mrl.cluster import launch

        raise typer.Exit(launch.train(exp, run_dir))


@app.command()
def sft(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    run_dir: Annotated[Optional[Path], typer.Option(
        help="directory of the run; one that exists is resumed. Default: a new one under log.dir")] = None,
) -> None:
    """Fine-tune a model on prompts and answers (supervised), as the experiment file says."""
    with _user_errors():
        from mrl.config.sft import SftExperiment
        from mrl.preflight import preflight_sft

        exp, _ = _checked(experiment, overrides, preflight_sft, SftExperiment)
        from mrl.sft import launch

        raise typer.Exit(launch.train(exp, run_dir))


@app.command()
def check(
    experiment: Annotated[Optional[Path], typer.Argument(
        metavar="EXPERIMENT", help="the experiment's YAML file")] = None,
    overrides: Overrides = None,
    keys: Annotated[bool, typer.Option("--keys", help="list all keys with type, default and meaning")] = False,
    environment: Annotated[bool, typer.Option(
        "--environment", help="show what is installed, what it buys, and what happens without it")] = False,
    rates: Annotated[Optional[Path], typer.Option(
        metavar="RUN", help="say how to split the GPUs (--gpus, or the experiment's), from this run's timings")] = None,
    gpus: Annotated[Optional[int], typer.Option(
        min=0, help="plan for a machine with this many GPUs. Default: do not count them")] = None,
) -> None:
    """Check an experiment and print its plan: processes, batch, memory, weight buckets. Starts nothing."""
    from mrl import check as plans
    from mrl.config.load import load_experiment

    console = Console()
    with _user_errors():
        if keys:
            plans.show_keys(console)
            return
        if environment:
            plans.show_environment(console, load_experiment(experiment, overrides or []) if experiment else None)
            return
        if experiment is None:
            raise UserError("mrl check needs an EXPERIMENT (or --keys, or --environment)")
        if rates:
            plans.show_rates(console, load_experiment(experiment, overrides or []), rates, gpus)
            return
        from mrl.preflight import check_engine_python, preflight_plan, read_critic_config

        exp, hf_config = _checked(experiment, overrides, lambda exp: preflight_plan(exp, gpus))
        plans.show_plan(console, plans.resolve_plan(exp, hf_config, gpus, read_critic_config(exp)[1]))
        plans.show_engine_version(console, exp)
        plans.show_warnings(console, [*check_engine_python(exp)])


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="directory of the run")],
    out: Annotated[Path, typer.Option(help="directory to write, as a Hugging Face checkpoint")],
    step: Annotated[Optional[int], typer.Option(min=0, help="step of the checkpoint. Default: the newest")] = None,
) -> None:
    """Export a checkpoint of a run as a Hugging Face model directory."""
    with _user_errors():
        from mrl.trainer.export import export_run

        try:
            print(f"wrote {export_run(run, step, out)}")
        except (FileNotFoundError, FileExistsError) as error:
            raise UserError(str(error)) from error


@app.command("eval")
def evaluate_command(
    experiment: ExperimentFile,
    overrides: Overrides = None,
    model: Annotated[Optional[Path], typer.Option(
        help="Hugging Face model directory to evaluate. Default: the experiment's model.path")] = None,
    run: Annotated[Optional[Path], typer.Option(help="evaluate a checkpoint of this run instead")] = None,
    step: Annotated[Optional[int], typer.Option(min=0, help="with --run: its step. Default: the newest")] = None,
) -> None:
    """Held-out results of a model or checkpoint: mean@n, best@n, maj@n, pass@k, by data set and subset."""
    with _user_errors():
        if model is not None and run is not None:
            raise UserError(f"--model {model} and --run {run} exclude each other: give one")
        if step is not None and run is None:
            raise UserError(f"--step {step} needs --run: it is a step of a run's checkpoints")
        if run is not None and not run.is_dir():
            raise UserError(f"--run {run}: no such directory")
        chosen = [] if model is None else [f"model.path={json.dumps(str(model))}"]
        from mrl.preflight import preflight_evaluation

        exp, _ = _checked(experiment, [*(overrides or []), *chosen], preflight_evaluation)
        from mrl.evaluation.command import evaluate

        if run is None:
            raise typer.Exit(evaluate(exp, None))
        from mrl.trainer.export import export_run

        with tempfile.TemporaryDirectory(prefix="eval-", dir=run) as directory:
            try:
                exported = export_run(run, step, Path(directory) / "model")
            except FileNotFoundError as error:
                raise UserError(str(error)) from error
            raise typer.Exit(evaluate(exp, exported))


def _checked(path: Path, overrides: list[str] | None, preflight: Callable[[Kind], Findings],
             kind: type[Kind] = Experiment) -> tuple[Kind, dict[str, Any]]:
    """The experiment and the model's config.json, once `preflight` finds nothing wrong with them."""
    from mrl.config.load import load_with_origins, locate

    exp, origins = load_with_origins(kind, path, overrides or [])
    problems, hf_config = preflight(exp)
    if problems:
        raise ConfigError(locate(problems, origins))
    return exp, hf_config


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Errors that the user can mend end the command with their message alone."""
    try:
        yield
    except UserError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USER_ERROR_CODE) from None


def main() -> None:
    """Entry point of the `mrl` command."""
    app()


if __name__ == "__main__":
    main()

"""Under torchrun: a critic's values and gradients against transformers, its training and checkpoint beside the policy.

Arguments: folder, then "layouts" and tp=2,pp=2,… each, or "training".
"""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.trainer.gang import experiment, gang, parse_parallel, whole_gradients
from tests.trainer.run_layouts import assert_close, measure, splits
from tests.trainer.run_training import assert_identical, held, microbatches, snapshot
from tests.trainer.tiny import families, loss_fn, saved_gradients, watch_routers

FAMILIES = ("llama", "qwen3", "qwen3_moe")
"""Untied, tied, and tied with experts."""
TOLERANCE = 1e-4


def squared_error(values: torch.Tensor, fields: dict[str, torch.Tensor]):
    """Advantages stand for returns."""
    loss = (fields["weights"] * (values - fields["advantages"]).square()).sum()
    return loss, {"value_max": values.max()}


def random_head(hidden: int) -> torch.Tensor:
    return torch.randn(1, hidden, generator=torch.Generator().manual_seed(5))


def truth(path: Path, batch) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
    """Values, loss and gradients by transformers and autograd, one sample at a time: V(t) = w · h(t - 1)."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    watch_routers(model)
    head = random_head(model.config.hidden_size).requires_grad_()
    values = []
    for sample in batch:
        states = model.model(sample["tokens"][None]).last_hidden_state[0]
        values.append(torch.cat([torch.zeros(1), (states @ head.T)[:-1, 0]]))
    loss = sum(squared_error(value, sample)[0] for value, sample in zip(values, batch))
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = {**saved_gradients(model), "value_head": head.grad}
    return [value.detach() for value in values], loss.item(), gradients


def build_critic(folder: Path, parallel: dict, platform):
    """A critic alone, with a random head in the place of zeros."""
    from mrl.reshard import is_output
    from mrl.trainer import megatron_compat
    from mrl.trainer.critic import Critic
    from mrl.trainer.parallel import enter_layout

    settings = experiment(folder, parallel, algorithm={"name": "gae"})
    megatron_compat.install()
    critic = Critic(settings, enter_layout(settings.trainer.parallel, settings.seed), platform)
    for name, param in critic.local_params().items():
        if is_output(name):
            assert param.dtype == torch.float32 and not param.any()
            param.copy_(random_head(critic.spec.hidden))
    return critic


def check_layouts(folder: Path, layouts: list[str], platform) -> None:
    batch = torch.load(folder / "batch.pt")
    expected = [{name: truth(folder / name, batch) for name in FAMILIES} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    for number, words in enumerate(layouts):
        for turn, family in enumerate(families(parse_parallel(words), FAMILIES), start=number):
            values, loss, gradients = expected[0][family]
            critic = build_critic(folder / family, parse_parallel(words), platform)
            check_ids_beyond(critic, batch[0])
            mine = list(splits(critic.layout.replicas))[turn % 3][critic.dp_rank]
            rows = [[batch[i] for i in microbatch] for microbatch in mine]
            for index, value in zip([i for one in mine for i in one], critic.values(rows), strict=True):
                torch.testing.assert_close(value, values[index], atol=TOLERANCE, rtol=0)
            check_gradients(critic, rows, loss, gradients)
            if dist.get_rank() == 0:
                print(f"ok {family} {words}", flush=True)


def check_ids_beyond(critic, sample: dict[str, torch.Tensor]) -> None:
    """A policy whose embedding is padded further may sample an id that the critic has not: it is read as the last."""
    def values(token: int) -> torch.Tensor:
        tokens = sample["tokens"].clone()
        tokens[1] = token
        return critic.values([[{**sample, "tokens": tokens}]])[0]

    torch.testing.assert_close(values(critic.spec.vocab + 500), values(critic.spec.vocab - 1), atol=0, rtol=0)


def check_gradients(critic, rows, loss: float, expected: dict[str, torch.Tensor]) -> None:
    got = {}
    step = critic.optimizer.step
    critic.optimizer.step = lambda: (
        got.update({name: grad.clone() for name, grad in whole_gradients(critic).items()}), measure(critic))[1]
    metrics = critic.train(rows, squared_error)
    critic.optimizer.step = step
    assert abs(metrics["loss"] - loss) < TOLERANCE, (metrics, loss)
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    assert abs(metrics["grad_norm"] / norm - 1) < TOLERANCE, (metrics, norm)
    # A tied model's output layer is its embedding, whose gradient the critic leaves under one name.
    assert_close(got, expected)


TRAINING = {
    "tensor": ("qwen3_moe", dict(parallel={"tp": 2, "ep": 2, "sequence_parallel": True}, dtype="bfloat16")),
    "pipeline": ("llama", dict(parallel={"pp": 2, "vpp": 2})),
    "data": ("qwen3", dict(dtype="bfloat16")),
}


def check_training(folder: Path, platform) -> None:
    """The critic learns and leaves the policy alone; both resume from one checkpoint to the same bits."""
    from mrl.trainer.trainer import Trainer

    batch = torch.load(folder / "batch.pt")
    for name, (family, settings) in TRAINING.items():
        section = {"path": str(folder / "qwen2") if name == "pipeline" else None,
                   "optimizer": {"lr": 0.002, "clip_grad": 0.0}}
        chosen = experiment(folder / family, **settings, lr=0.01, algorithm={"name": "gae", "critic": section})
        trainer = Trainer(chosen, platform, total_steps=8)
        critic, rows = trainer.critic, microbatches(trainer, batch)
        assert critic.spec.family.model_type == ("qwen2" if name == "pipeline" else family)
        assert not torch.cat(critic.values(rows)).any()
        before = snapshot(trainer)
        losses = [critic.train(rows, squared_error)["loss"] for _ in range(3)]
        assert losses[0] > losses[1] > losses[2], losses
        assert_identical(before, snapshot(trainer))
        trainer.train(rows, loss_fn)
        assert critic.values(rows)[0].dtype == torch.float32

        saved = folder / f"critic_{name}"
        trainer.save(saved)
        continue_training(trainer, rows)
        # This one's critic is offloaded meanwhile.
        again = Trainer(chosen.model_copy(update={"algorithm": chosen.algorithm.model_copy(update={
            "critic": chosen.algorithm.critic.model_copy(update={"offload": True})})}), platform, total_steps=8)
        again.load(saved)
        continue_training(again, rows)
        assert held(again.critic) == 0 < held(critic)
        assert_identical(snapshot(trainer), snapshot(again))
        with again.critic.awake():
            assert_identical(snapshot(critic), snapshot(again.critic))
        if name == "pipeline":
            check_other_checkpoints(folder, trainer)
        if dist.get_rank() == 0:
            print(f"ok {name}", flush=True)


def continue_training(trainer, rows) -> None:
    for _ in range(2):
        with trainer.critic.awake():
            trainer.critic.train(rows, squared_error)
        trainer.train(rows, loss_fn)


def check_other_checkpoints(folder: Path, trainer) -> None:
    critic, trainer.critic = trainer.critic, None
    trainer.save(folder / "without_critic")
    trainer.critic = critic
    with pytest.raises(FileNotFoundError, match="without_critic/critic is not a checkpoint"):
        trainer.load(folder / "without_critic")
    with pytest.raises(ValueError, match=r"tp 2, pp 1, dp 1.*tp 1, pp 2, dp 1"):
        trainer.load(folder / "critic_tensor")
    with pytest.raises(ValueError, match="check algorithm.critic.path and model.dtype"):
        swap(folder / "critic_pipeline", folder / "without_critic")
        trainer.load(folder / "critic_pipeline")


def swap(checkpoint: Path, policy: Path) -> None:
    """Put a policy in the place of the checkpoint's critic."""
    if dist.get_rank() == 0:
        (checkpoint / "critic").rename(checkpoint / "away")
        policy.rename(checkpoint / "critic")
    dist.barrier()


if __name__ == "__main__":
    with gang() as cpu:
        home = Path(sys.argv[1])
        check_layouts(home, sys.argv[3:], cpu) if sys.argv[2] == "layouts" else check_training(home, cpu)

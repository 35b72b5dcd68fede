"""Under torchrun: optimizer, schedule, NaN, reference, checkpoint. Arguments: folder, "first" or "resume"."""
from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Iterable

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrl.trainer.offload import Offload
from tests.trainer.gang import experiment, gang
from tests.trainer.host import apart_from_the_device
from tests.trainer.tiny import LENGTHS, TEMPERATURE, loss_fn

# Number of ranks -> name -> (family, settings). Together: all kinds of parallelism; tied and untied; both dtypes.
REFERENCE, MOVING_REFERENCE = ({"kl": {"coef": 0.1, "reference_every": every}} for every in (0, 2))
RUNS = {
    2: {
        "tensor": ("qwen3", dict(parallel={"tp": 2, "sequence_parallel": True}, algorithm=REFERENCE, clip_grad=1.0)),
        "pipeline": ("qwen3", dict(parallel={"pp": 2})),
        "chunks": ("llama", dict(parallel={"pp": 2, "vpp": 2}, algorithm=MOVING_REFERENCE)),
        "data": ("llama", dict(clip_grad=0.01, weight_decay=0.1)),
        "bfloat16": ("qwen2", dict(dtype="bfloat16", clip_grad=1.0)),
        "experts": ("qwen3_moe", dict(parallel={"tp": 2, "ep": 2, "sequence_parallel": True},
                                      algorithm=MOVING_REFERENCE, dtype="bfloat16", clip_grad=1.0)),
        "host": ("qwen2_moe", dict(parallel={"ep": 2}, dtype="bfloat16", clip_grad=0.01, cpu_offload=True)),
        "host_float32": ("llama", dict(clip_grad=0.01, weight_decay=0.1, cpu_offload=True)),
        "latent": ("deepseek_v3", dict(parallel={"pp": 2}, dtype="bfloat16", mtp="keep", weight_decay=0.1)),
    },
    4: {
        "grid": ("qwen2_moe", dict(parallel={"tp": 2, "pp": 2, "vpp": 2, "etp": 2, "sequence_parallel": True})),
        "dealt": ("mixtral", dict(parallel={"ep": 2}, clip_grad=0.01, weight_decay=0.1)),
    },
}
AGAINST_TORCH = ("data", "host_float32", "dealt")
SCHEDULE = dict(lr=0.01, schedule="linear", warmup_steps=2)
TOTAL_STEPS = 4


def build(folder: Path, name: str, platform):
    from mrl.trainer.trainer import Trainer

    family, settings = RUNS[dist.get_world_size()][name]
    return Trainer(experiment(folder / family, **settings, **SCHEDULE), platform, TOTAL_STEPS)


def microbatches(trainer, batch):
    from mrl.trainer.microbatch import assign

    mine = assign(LENGTHS, trainer.layout.dp, 40)[trainer.dp_rank]
    return [[batch[index] for index in microbatch] for microbatch in mine]


def snapshot(trainer) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters, masters and moments."""
    tensors = {name: param.clone() for name, param in trainer.local_params().items()}
    for optimizer in trainer.optimizer.inner:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            tensors[f"master{index}"] = param.detach().clone()
            tensors |= {f"{key}{index}": value.clone() for key, value in optimizer.state[param].items()}
    return tensors


def assert_identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def held(model) -> int:
    """Bytes behind the weights, gradients, masters and moments of a model."""
    buffers = [buffer for chunk in model.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    tensors = [tensor for buffer in buffers for tensor in (buffer.param_data, buffer.grad_data)]
    tensors += model.local_params().values()
    for optimizer in [] if model.optimizer.on_host else model.optimizer.inner:
        for group in optimizer.param_groups:
            tensors += group["params"]
        tensors += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return nbytes(tensors)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the memory behind them, each piece once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def check_offload(trainer, offload: Offload, made: list) -> None:
    """Part by part, everything leaves the device and comes back as it was; host buffers are made once."""
    before, count = snapshot(trainer), len(made)
    weights = {name: before[name] for name in trainer.local_params()}
    everything = held(trainer)
    optimizer = offload.release("optimizer")
    assert_identical(weights, trainer.local_params())
    left = held(trainer)
    assert left == nbytes(trainer.local_params().values())
    assert offload.release("weights") == left and offload.release() == held(trainer) == 0
    assert optimizer < everything - left, "gradients are not copied"
    assert (optimizer == 0) == trainer.optimizer.on_host
    assert offload.restore("weights") == left
    assert_identical(weights, trainer.local_params())
    assert offload.restore() == optimizer and held(trainer) == everything
    assert_identical(before, snapshot(trainer))
    assert count == 0 or len(made) == count


def first(folder: Path, platform) -> None:
    batch = torch.load(folder / "batch.pt")
    for name in RUNS[dist.get_world_size()]:
        trainer = build(folder, name, platform)
        rows = microbatches(trainer, batch)
        before = trainer.log_probs(rows)
        steps = [trainer.train(rows, loss_fn) for _ in range(2)]
        assert steps[1]["loss"] < steps[0]["loss"], "two steps at this rate must lower the loss"
        if name == "tensor":
            check_nan_is_skipped(trainer, rows)
            check_reference(trainer, rows, before)
        if name in AGAINST_TORCH:
            check_against_torch(folder, name, trainer, batch, steps)
        if name == "pipeline":
            with pytest.raises(RuntimeError, match="algorithm.kl.coef is 0"):
                trainer.use_reference()
            with pytest.raises(RuntimeError, match="algorithm.kl.coef is 0"):
                trainer.update_reference()
        run = folder / f"run_{name}"
        if trainer.moved_reference():
            trainer.update_reference()
        trainer.save(run / "checkpoints" / "step_000002")
        # Again, as after a restart; now with a file of the loop's.
        trainer.save(run / "checkpoints" / "step_000002", {"loop": b"batch"} if dist.get_rank() == 0 else {})
        trainer.export(run / "exported")
        if name == "latent":
            check_untrained(folder / "deepseek_v3", run / "exported")
        samples = [sample for microbatch in rows for sample in microbatch]
        torch.save((samples, trainer.log_probs(rows)), run / f"log_probs{dist.get_rank()}.pt")
        steps += [trainer.train(rows, loss_fn) for _ in range(2)]
        # Warm-up 1/2, 2/2; then from step 2 to the step after the last, 5: 2/3, 1/3.
        skipped = name == "tensor"  # the NaN step took the third rate
        rates = [0.5, 1, 1 / 3, 0] if skipped else [0.5, 1, 2 / 3, 1 / 3]
        assert [step["lr"] / SCHEDULE["lr"] for step in steps] == pytest.approx(rates)
        torch.save(snapshot(trainer), run / f"final{dist.get_rank()}.pt")


def resume(folder: Path, platform) -> None:
    batch = torch.load(folder / "batch.pt")
    for name in RUNS[dist.get_world_size()]:
        trainer = build(folder, name, platform)
        run = folder / f"run_{name}"
        trainer.load(run / "checkpoints" / "step_000002")
        rows = microbatches(trainer, batch)
        offload, made = Offload(trainer, platform), []
        with pytest.MonkeyPatch.context() as patched:
            real = platform.host_buffer
            patched.setattr("mrl.trainer.offload.CHUNK", 50_000)  # some tensors wait in pieces
            patched.setattr(platform, "host_buffer", lambda like: (made.append(like), real(like))[1])
            for _ in range(2):
                check_offload(trainer, offload, made)
                trainer.train(rows, loss_fn)
        if trainer.moved_reference():
            with trainer.use_reference():
                reference = trainer.log_probs(rows)
            saved = torch.load(run / f"log_probs{dist.get_rank()}.pt")[1]
            assert torch.equal(torch.cat(reference), torch.cat(saved)), "it is the actor of the checkpoint"
            assert not torch.equal(torch.cat(reference), torch.cat(trainer.log_probs(rows)))
        assert_identical(snapshot(trainer), torch.load(run / f"final{dist.get_rank()}.pt"))
        if name == "pipeline":
            with pytest.raises(ValueError, match=r"tp 2, pp 1, dp 1.*tp 1, pp 2, dp 1"):
                trainer.load(folder / "run_tensor" / "checkpoints" / "step_000002")
            with pytest.raises(FileNotFoundError, match="not a checkpoint"):
                trainer.load(folder / "nowhere")


def check_untrained(source: Path, exported: Path) -> None:
    """The router's bias and the layer that predicts one token more are exported as they came; what that layer shares
    with the model is exported as trained."""
    before, after = (load_file(directory / "model.safetensors") for directory in (source, exported))
    assert before.keys() == after.keys()
    shared = {"model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
              "model.layers.4.shared_head.head.weight": "lm_head.weight"}
    for name, tensor in after.items():
        if name in shared:
            assert torch.equal(tensor, after[shared[name]])
        elif name.endswith("e_score_correction_bias"):
            assert torch.equal(tensor, before[name])
        else:
            kept = torch.equal(tensor, before[name].bfloat16())
            assert kept == name.startswith("model.layers.4.") or "norm" in name, name


def check_nan_is_skipped(trainer, rows) -> None:
    before = snapshot(trainer)

    def poisoned(log_probs, entropy, fields):
        loss, metrics = loss_fn(log_probs, entropy, fields)
        return loss * torch.nan, metrics

    report = trainer.train(rows, poisoned)
    assert report["update_skipped"] == 1.0 and math.isnan(report["grad_norm"])
    assert_identical(before, snapshot(trainer))


def check_reference(trainer, rows, initial) -> None:
    actor = trainer.log_probs(rows)
    assert not torch.equal(torch.cat(initial), torch.cat(actor))
    for _ in range(2):
        with trainer.use_reference():
            assert torch.equal(torch.cat(trainer.log_probs(rows)), torch.cat(initial))
        assert torch.equal(torch.cat(trainer.log_probs(rows)), torch.cat(actor))
    with pytest.raises(KeyError), trainer.use_reference():
        raise KeyError("inside")
    assert torch.equal(torch.cat(trainer.log_probs(rows)), torch.cat(actor))


def check_against_torch(folder: Path, name: str, trainer, batch, steps) -> None:
    """Two steps of torch's AdamW on the whole model: clipping, decay (matrices only), moments, data parallelism."""
    family, settings = RUNS[dist.get_world_size()][name]
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    section = experiment(folder / family, **settings).trainer.optimizer
    matrices = [param for param in model.parameters() if param.ndim > 1]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    adam = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
                             betas=section.betas, eps=section.eps, weight_decay=section.weight_decay)
    for step in steps:
        adam.zero_grad()
        for sample in batch:
            log_p = (model(sample["tokens"][None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            zero = torch.zeros(1)
            log_prob = torch.cat([zero, log_p.gather(1, sample["tokens"][1:, None])[:, 0]])
            loss_fn(log_prob, torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]), sample)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_grad)
        assert step["grad_norm"] == pytest.approx(float(norm), rel=1e-4), (step, norm)
        assert norm > section.clip_grad, f"{norm}: nothing to clip"
        for group in adam.param_groups:
            group["lr"] = step["lr"]
        adam.step()
    trainer.export(folder / f"trained_{name}")
    model.save_pretrained(folder / f"expected_{name}")  # in a gang, transformers writes on rank 0 alone
    if dist.get_rank():
        return
    got = load_file(folder / f"trained_{name}" / "model.safetensors")
    for tensor, expected in load_file(folder / f"expected_{name}" / "model.safetensors").items():
        # Adam divides by the gradient's own size, so elements whose gradient is rounding noise may differ by lr.
        error = (got[tensor] - expected).abs()
        assert error.median() < 1e-6 and error.mean() < 1e-4, (tensor, error.mean())


if __name__ == "__main__":
    with gang() as cpu, apart_from_the_device():
        {"first": first, "resume": resume}[sys.argv[2]](Path(sys.argv[1]), cpu)

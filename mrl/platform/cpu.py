"""CPU over gloo, and every change that Megatron needs to run there.

Megatron asks `torch.cuda` for devices, streams and generators. Each patch below answers such a question for the CPU.
They are process-wide and only ever installed in processes that run a trainer on the CPU.
"""
from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from typing import Any, Callable

import torch
import torch.distributed as dist

from mrl.platform.base import Platform


class CpuPlatform(Platform):
    """One process per rank, fp32 or bf16, gloo."""

    name = "cpu"
    backend = "gloo"
    uses_te = False

    def device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        """There is one CPU; nothing to choose."""

    def install(self) -> None:
        if torch.cuda.current_device is not _current_device:
            _expect_no_gpu_packages()
            _patch_torch_cuda()
            _patch_tensor_methods()
            _patch_megatron()

    def synchronize(self) -> None:
        """CPU work is done when the call returns."""

    def memory(self) -> dict[str, float]:
        with open("/proc/self/status") as status:
            kib = {key: int(value.split()[0]) for key, value in (line.split(":") for line in status if "kB" in line)}
        return {"allocated": kib["VmRSS"] / 2**20, "peak": max(kib["VmHWM"], kib["VmRSS"]) / 2**20}

    def start_peak(self) -> None:
        """The peak stays that of the process's whole life, as Linux counts it."""

    def used_beside(self) -> int:
        """Engines and trainers share no device here: there is nothing that one could take from the other."""
        return 0

    def release_cache(self) -> None:
        """Freed memory goes back by itself; engines on the CPU do not sleep."""

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def _current_device() -> str:
    # Megatron passes this on as `device=…`, so the answer must be a device that exists.
    return "cpu"


def _do_nothing() -> Callable[..., None]:
    """A new function that stands in for one that orders or flushes GPU work."""
    return lambda *_args, **_kwargs: None


class _Event:
    """CPU work is finished when its call returns, so every event has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    record = wait = synchronize = _do_nothing()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: "_Event") -> float:
        return 0.0


class _Stream(_Event):
    wait_stream = wait_event = _do_nothing()

    def record_event(self, *_args: Any) -> _Event:
        return _Event()


def _expect_no_gpu_packages() -> None:
    # Megatron reports every fused GPU kernel it does not find, on every rank; torch that Megatron uses older names.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated")


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    # Parameters, activations and receive buffers are allocated on torch.cuda.current_device().
    cuda.current_device = _current_device
    # Schedules, pipeline communication and the gradient buffers order their work with streams and events. Each name
    # gets a function of its own: torch's compiler keeps a table of them and refuses one under two names.
    cuda.set_device, cuda.synchronize, cuda.empty_cache = (_do_nothing() for _ in range(3))
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda _stream: contextlib.nullcontext()
    # The tensor-parallel random tracker seeds, saves and restores the GPU generator.
    cuda.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    # Gradient clipping and counting write into torch.cuda.FloatTensor([…]).
    cuda.FloatTensor, cuda.IntTensor, cuda.LongTensor = torch.FloatTensor, torch.IntTensor, torch.LongTensor


def _patch_tensor_methods() -> None:
    # Losses, token counts and tied embeddings are moved to "the GPU" with .cuda().
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    real_type = torch.Tensor.type

    @functools.wraps(real_type)
    def type_as_on_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The distributed optimizer tells fp32 from bf16 parameters by the *string* 'torch.cuda.FloatTensor'.
        out = real_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    torch.Tensor.type = type_as_on_gpu


class _TorchOnCpu:
    """The torch module, except that factories take device="cuda" for "cpu"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _cuda_means_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _on_cpu_already(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron's function of another name returns for a tensor on the GPU; anything else as it is."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _unequal_gather(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's all-gather along the first dimension, of parts of `output_split_sizes` rows if these are given."""
    def gather(part: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: list[int] | None = None,
               use_global_buffer: bool = False) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return equal(part, group, use_global_buffer=use_global_buffer)
        whole = part.new_empty(sum(output_split_sizes), *part.shape[1:])
        copies = part.repeat(group.size(), *[1] * (part.ndim - 1))
        dist.all_to_all_single(whole, copies, output_split_sizes, [len(part)] * group.size(), group=group)
        return whole

    return gather


def _unequal_reduce_scatter(equal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's reduce-scatter along the first dimension, of parts of `input_split_sizes` rows if these are given."""
    def reduce_scatter(whole: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None,
                       use_global_buffer: bool = False) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return equal(whole, group, use_global_buffer=use_global_buffer)
        mine = input_split_sizes[group.rank()]
        parts = whole.new_empty(group.size() * mine, *whole.shape[1:])
        dist.all_to_all_single(parts, whole.contiguous(), [mine] * group.size(), input_split_sizes, group=group)
        return parts.view(group.size(), mine, *whole.shape[1:]).sum(0)

    return reduce_scatter


def _patch_megatron() -> None:
    # Where Transformer Engine is installed, Megatron takes its optimizer and norms, which need a GPU.
    sys.modules["transformer_engine"] = None

    # Small fused functions are decorated with torch.compile on import: each would cost a run of the C++ compiler, for
    # no gain on the CPU.
    real_compile, torch.compile = torch.compile, lambda function: function
    try:
        from megatron.core import jit, utils
        from megatron.core.optimizer import clip_grads, optimizer
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.tensor_parallel import mappings, random
        from megatron.core.transformer.moe import token_dispatcher
    finally:
        torch.compile = real_compile
    jit.disable_jit_fuser()

    # These modules write device="cuda" into calls of torch. They get a torch of their own; replacing the functions in
    # torch itself would break `with torch.device(…)`, by which transformers builds models.
    on_cpu = _TorchOnCpu()
    for name in ("tensor", "zeros", "ones", "empty"):
        setattr(on_cpu, name, _cuda_means_cpu(getattr(torch, name)))
    for module in (clip_grads, optimizer, schedules, utils):
        module.torch = on_cpu

    # Megatron turns the sizes of an exchange of tokens into numpy arrays, which torch takes, as it moves them off the
    # GPU; already on the CPU they would stay tensors, which it does not take.
    token_dispatcher.maybe_move_tensor_to_cpu = _on_cpu_already

    # Experts that are cut over several ranks gather and reduce as many tokens from each as were sent to it; gloo's own
    # functions for this want equal parts.
    mappings._gather_along_first_dim = _unequal_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _unequal_reduce_scatter(mappings._reduce_scatter_along_first_dim)

    # These two reach into CUDA's C++ generators, past torch.cuda.
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)

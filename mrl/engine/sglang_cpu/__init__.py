"""What SGLang needs to start on a CPU without Intel's AMX, where its own CPU kernels are not to be had as a package.

This folder goes on the PYTHONPATH of CPU engines, and of no other. SGLang then computes with its own plain torch code;
what stands in here are a few names that it takes without asking whether they exist:

- `sgl_kernel`: SGLang imports its kernel package's book-keeping functions by name. One of them moves indices and is
  written in torch; the others belong to speculative decoding and say so when called.
- `sglang_cpu_server.py`, the start script in place of `python -m sglang.launch_server`: it runs again in every process
  that SGLang spawns, and there
    - declares two operators of torchvision. Its wheel is built for CUDA and they do not load beside a CPU build of
      torch, but importing it wants them declared; nothing calls them;
    - puts a torch version in place of the Triton kernel that seeded sampling hashes with;
    - has SGLang's experts in torch pass over those of other workers, so that experts can be dealt out;
    - has MLA computed with absorbed weights, for prompts too.

Requirements: launch/requirements/sglang_cpu.txt.
"""

"""Seeds of generation requests."""
from __future__ import annotations

import hashlib


def request_seed(run_seed: int, step: int, prompt_id: int | str, sample_index: int) -> int:
    """Seed of one generation request: the same in every process, run and version of Python.

    The first four bytes of SHA-256 over "run_seed:step:prompt_id:sample_index", without the top bit.

    Args:
        run_seed: the experiment's `seed`.
        step: the loop step that trains on the sample.
        prompt_id: what identifies the group within the step. A row number will not do where a step can draw the same
            row twice (a small data set, the end of an epoch): the two groups would be copies of each other. The
            position in the prompt stream will; in an evaluation, the name of the data set with the row number.
        sample_index: 0 .. samples_per_prompt - 1.

    Returns:
        an int in [0, 2^31), which every engine accepts.
    """
    digest = hashlib.sha256(f"{run_seed}:{step}:{prompt_id}:{sample_index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF

"""Supervised samples: from rows to tokens and loss masks, from samples to packed microbatches with token weights."""
from __future__ import annotations

import torch

from mrl.algorithm.weights import token_weights
from mrl.config.sft import SftData
from mrl.data.prompts import DataError, load_prompts
from mrl.data.tokenize import PromptEncoder
from mrl.trainer.microbatch import Sample, assign


def make_samples(encoder: PromptEncoder, source: str, data: SftData, longest: int) -> list[Sample]:
    """One sample a row: the prompt through the chat template, then the answer and the end-of-sequence token.

    Fields: tokens int64 [T]; loss_mask bool [T], true on the answer. Rows in the order of the file.

    Raises:
        DataError: a sample has more than `longest` tokens, those of a microbatch. The message has its prompt.
    """
    rows, prompts = encoder.encode_all(load_prompts(source, data))
    samples = []
    for row, prompt in zip(rows, prompts):
        answer = encoder.encode_text(str(row[data.answer_key])) + [encoder.eos_id]
        tokens = torch.tensor([*prompt, *answer], dtype=torch.int64)
        if len(tokens) > longest:
            raise DataError(f"{source}: prompt and answer of {row[data.prompt_key]!r:.200} have {len(tokens)} tokens, "
                            f"more than batch.max_tokens_per_microbatch ({longest}): raise it, or shorten the answer")
        samples.append({"tokens": tokens, "loss_mask": torch.arange(len(tokens)) >= len(prompt)})
    return samples


def share_of(samples: list[Sample], replicas: int, replica: int, max_tokens: int) -> list[list[Sample]]:
    """The microbatches of one data-parallel replica; each is packed into one row of at most `max_tokens`.

    Every sample gets its token_weight: 1 / answer tokens of all `samples`, so that no split can change the gradient.
    """
    weights = token_weights([sample["loss_mask"] for sample in samples], "token_mean")
    batch = [{**sample, "token_weight": weight} for sample, weight in zip(samples, weights)]
    share = assign([len(sample["tokens"]) for sample in batch], replicas, max_tokens)[replica]
    return [[batch[index] for index in microbatch] for microbatch in share]

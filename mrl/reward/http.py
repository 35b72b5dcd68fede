"""The `http` reward: a server of the user's scores all responses to a prompt in one request.

POST {"prompt", "responses": [...], "answer", "row": {...}} is answered by {"scores": [...]}, as many, in that order.
"""
from __future__ import annotations

import json
from collections.abc import Sequence

from mrl.reward.api import Sample
from mrl.reward.remote import RemotePart, Reply, ServerFault, finite


class HttpPart(RemotePart):
    """A request that fails as a whole is a fault of all its samples; a score that is no number of its sample alone."""

    async def grade(self, samples: Sequence[Sample]) -> list[Reply]:
        first = samples[0]
        body = {"prompt": first.prompt, "responses": [sample.response for sample in samples], "answer": first.answer,
                "row": dict(first.row)}
        body = json.loads(json.dumps(body, default=str))  # dates and the like as text
        try:
            async with self._session() as session:
                answer = await self._post(session, "", body)
            scores = answer.get("scores") if isinstance(answer, dict) else None
            if not isinstance(scores, list) or len(scores) != len(samples):
                raise ServerFault("invalid", f"the answer must be {{\"scores\": [{len(samples)} numbers]}}, not "
                                  f"{answer!r:.300}")
        except ServerFault as fault:
            return [{fault.fault: str(fault)}] * len(samples)
        return [_reply(score) for score in scores]


def _reply(score: object) -> Reply:
    try:
        return {"score": finite(score), "extracted": None}
    except ServerFault as fault:
        return {fault.fault: str(fault)}

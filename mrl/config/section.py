"""What every section of an experiment file has in common."""
from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, types are strict, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False)

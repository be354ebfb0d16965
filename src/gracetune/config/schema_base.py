"""The base class of all sections of a run file, and the number types that they share."""

from __future__ import annotations

import os.path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from gracetune.errors import redact_urls

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


def _check_seed(value: int) -> int:
    if not -(2**63) <= value <= 2**64 - 2**16:  # torch's limits; prompts count up from a seed
        raise ValueError("a whole number from -2^63 to 2^64 - 2^16")
    return value


Seed = Annotated[int, AfterValidator(_check_seed)]
"""A seed of one of torch's random generators."""
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, in which a leading `~` is the home folder, or an address."""
Scalar = str | int | float | bool | None


class Section(BaseModel):
    """Base class of all sections of a run file. Sections are immutable and reject unknown keys.

    As JSON, a section has no credentials: those in URLs and in `remote.options` are replaced.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_serializer(mode="wrap", when_used="json")
    def _without_credentials(self, handler: SerializerFunctionWrapHandler) -> Any:
        return {name: _redact_urls_in(value) for name, value in handler(self).items()}


def _redact_urls_in(value: Any) -> Any:
    if isinstance(value, str):
        return redact_urls(value)
    return [_redact_urls_in(each) for each in value] if isinstance(value, list) else value

"""The base class of all sections of a run file, and the number types that they share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from gracetune.errors import redact_urls

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Scalar = str | int | float | bool | None


class Section(BaseModel):
    """Base class of all sections of a run file. Sections are immutable and reject unknown keys.

    As JSON, a section has no credentials: those in URLs and in `remote.options` are replaced.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_serializer(mode="wrap", when_used="json")
    def _without_credentials(self, handler: SerializerFunctionWrapHandler) -> Any:
        return {name: _redact_urls_in(value) for name, value in handler(self).items()}


def _redact_urls_in(value: Any) -> Any:
    if isinstance(value, str):
        return redact_urls(value)
    return [_redact_urls_in(each) for each in value] if isinstance(value, list) else value

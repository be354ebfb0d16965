"""Take the requests to a run between two steps, on all ranks together.

The main rank reads the files that `gracetune now` or the page has written, and all ranks agree on
them: in an ordinary step they exchange a few flags, and only if there is a request, its contents.

A request to validate may have prompts of its own. The text encoders were freed when training
started, so the main rank loads them again, on the GPU if it has space and else on the CPU, encodes
the prompts, frees the text encoders, and sends the result to the other ranks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter

from gracetune.config.parse_text import check_value
from gracetune.config.schema import PromptSection
from gracetune.errors import GracetuneError
from gracetune.events.types import RequestTaken
from gracetune.memory.platform import read_this_host
from gracetune.models.family import ReloadableText
from gracetune.train.validate import requested_validation
from gracetune.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from gracetune.events.run_control import Request
    from gracetune.train.build import Session
    from gracetune.train.loop import MetricsBuffer
    from gracetune.train.telemetry import Telemetry
    from gracetune.train.validate import ValidationSetup

REQUESTS = ("validate", "save", "stop", "clock")
"""What a run can be asked to do between two steps; `clock` is a checkpoint every N minutes."""
PROMPTS = "prompts"
"""Stands for requests to validate with prompts of their own, which `RequestInbox` keeps."""
MAX_PROMPTS = 64
HOST_RESERVE = 2 * GIB
"""Host memory that must stay free while text encoders are loaded again."""
ACCEPTED_PROMPTS: TypeAdapter[tuple[str | PromptSection, ...]] = TypeAdapter(
    tuple[str | PromptSection, ...]
)


class RequestInbox:
    """The requests to a run that have not been carried out yet."""

    def __init__(self, session: Session, metrics: MetricsBuffer, telemetry: Telemetry) -> None:
        self._session = session
        self._metrics = metrics
        self._telemetry = telemetry
        self._with_prompts: list[Request] = []

    def take(self, step: int, saved_at: float) -> set[str]:
        """Return the pending requests of all ranks: some of `REQUESTS` and `PROMPTS`.

        They come from files, from a signal, from a health check, or from
        `train.checkpoint_minutes`.
        """
        session, ranks = self._session, self._session.state.ranks
        files = session.control.take_requests() if ranks.is_main else []
        flags = set()
        if session.signals.received is not None or self._telemetry.stop_reason:
            flags.add("stop")
        minutes = session.state.run.train.checkpoint_minutes
        if minutes and time.monotonic() - saved_at >= 60 * minutes:
            flags.add("clock")
        *asked, has_files = ranks.any(*(request in flags for request in REQUESTS), bool(files))
        found = {request for request, is_asked in zip(REQUESTS, asked, strict=True) if is_asked}
        if has_files:
            for request in ranks.broadcast(files):
                found |= self._accept(request, step)
        return found

    def take_prompts(self, step: int) -> list[ValidationSetup]:
        """Return the validations with prompts of their own that were asked for, encoded now."""
        waiting, self._with_prompts = self._with_prompts, []
        found = []
        for request in waiting:
            setup = self._encode(request, step)
            if setup is not None:
                found.append(setup)
        return found

    def _accept(self, request: Request, step: int) -> set[str]:
        if request.problem:
            self._answer(request, step, request.problem, accepted=False)
            return set()
        if request.verb == "log":
            return self._change_logging(request, step)
        if request.verb == "validate" and request.arguments.get("prompts"):
            self._with_prompts.append(request)
            return {PROMPTS}
        self._answer(request, step)
        return {request.verb}

    def _change_logging(self, request: Request, step: int) -> set[str]:
        every = request.arguments.get("every")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            text = f"`every` is {every!r}, but it must be a number of steps from 1"
            self._answer(request, step, text, accepted=False)
            return set()
        before, self._metrics.every = self._metrics.every, every
        text = f"logs every {every} steps instead of every {before}"
        self._answer(request, step, text)
        return set()

    def _answer(
        self, request: Request, step: int, reason: str = "", *, accepted: bool = True
    ) -> None:
        self._session.emit(
            RequestTaken(
                step=step,
                request=request.verb or "unknown",
                id=request.id,
                accepted=accepted,
                reason=reason,
                arguments=request.arguments,
                source=request.source,
            )
        )

    # Prompts

    def _encode(self, request: Request, step: int) -> ValidationSetup | None:
        """Encode the prompts of a request on the main rank; None if it is refused."""
        ranks = self._session.state.ranks
        outcome: tuple[ValidationSetup | None, str] = (None, "")
        if ranks.is_main:
            try:
                outcome = self._encode_here(request)
            # Also a ValidationError, and errors of text encoders: a bad prompt never ends a run.
            except (GracetuneError, ValueError, RuntimeError, OSError) as error:
                outcome = None, str(error).partition("\n")[0] or type(error).__name__
        setup, text = ranks.broadcast(outcome)
        self._answer(request, step, text, accepted=setup is not None)
        return setup

    def _encode_here(self, request: Request) -> tuple[ValidationSetup, str]:
        session, started_at = self._session, time.monotonic()
        given = _as_list(request.arguments["prompts"])
        check_value(given, "prompts")  # a tokenizer fails in its own way
        prompts = ACCEPTED_PROMPTS.validate_python(given)
        if len(prompts) > MAX_PROMPTS:
            raise GracetuneError(f"it has {len(prompts)} prompts, but at most {MAX_PROMPTS} are.")
        family, validation = session.state.family, session.validation
        assert validation is not None, "a run that accepts the request can validate"
        if not isinstance(family, ReloadableText):
            raise GracetuneError(
                f"{family.name} cannot load its text encoder again: prompts are encoded only when "
                "a run starts. Set validation.prompts."
            )
        device = self._encoder_device(family)
        family.restore_text_encoder(device)
        try:
            setup = requested_validation(
                session.state, validation, prompts, session.pipeline.tiling, request.id
            )
        finally:
            family.release_text_encoder()
            session.clear_device_memory()
        seconds = format_seconds(time.monotonic() - started_at)
        where = "" if not family.text_encoder_nbytes() else f" on {device.type}"
        text = f"{len(prompts)} prompts encoded{where} in {seconds}"
        return replace(setup, held_out=()), text  # each rank has these batches on its device

    def _encoder_device(self, family: ReloadableText) -> torch.device:
        """Return the GPU if the text encoders fit there, else the CPU; raise if they do not."""
        nbytes = family.text_encoder_nbytes()
        device: torch.device = self._session.state.accelerator.device
        available = read_this_host().usable_bytes()
        if nbytes + HOST_RESERVE > available > 0 and nbytes:
            raise GracetuneError(
                f"the text encoders need {format_bytes(nbytes)} of host memory to encode new "
                f"prompts, but {format_bytes(available)} are free. Set validation.prompts instead."
            )
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 1.2 * nbytes + GIB:
            return device
        return torch.device("cpu")


def _as_list(prompts: object) -> object:
    return [prompts] if isinstance(prompts, str) else prompts

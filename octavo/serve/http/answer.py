"""Sending an answer: whole, or as a stream of events; either ends its sequences when the client has gone."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from octavo.serve.engine.grammar import CompiledSchema
from octavo.serve.engine.request import Delta, RequestInput
from octavo.serve.engine_client import DeltaStream
from octavo.serve.http.deltas import answer_deltas
from octavo.serve.http.errors import ApiError, as_api_error
from octavo.serve.http.service import Service
from octavo.serve.sampling_params import SamplingParams
from octavo.weights.kv_scales.server import check_usable
from octavo.weights.wire import tensor_json

_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_quote = json.encoder.encode_basestring  # as _json does


class ChoiceFormat(Protocol):
    """How one of the two APIs writes its choices."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """Choices that a stream begins with."""

    @property
    def is_text_alone(self) -> bool:
        """Of a token a chunk shows nothing but its text."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A choice of a stream's event."""

    def choice(self, delta: Delta) -> dict[str, Any]:
        """A choice of a whole answer."""


class Answer:
    """One request's answer.

    Args:
        model_name: as it will say.
        inputs: what was asked for.
        echoes: the prompts' texts, where choices begin with them.
        include_usage: a stream ends with the count of tokens.
        with_routed_experts: where each token went, beside a choice's end; the engine records it.
    """

    def __init__(
        self,
        service: Service,
        form: ChoiceFormat,
        model_name: str,
        inputs: list[RequestInput],
        echoes: list[str] | None = None,
        include_usage: bool = False,
        *,
        with_routed_experts: bool = False,
    ) -> None:
        self._service, self._form, self._inputs, self._echoes = service, form, inputs, echoes
        self._include_usage, self._with_routed_experts = include_usage, with_routed_experts
        self._num_choices = sum(given.params.n for given in inputs)
        self._num_tokens = 0
        self._head = {
            "id": f"{form.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": service.fingerprint(),
        }

    async def respond(self, request: Request, stream: bool) -> Response:
        """Submit the requests and answer.

        Raises:
            ApiError: a refusal, or a failure before anything was sent.
            OctavoError: the same, of octavo's errors.
        """
        check_usable(self._service.ready_engine())
        deltas = self._service.submit(self._inputs)
        if stream:
            return _EventStream(self._events(deltas), deltas)
        try:
            return JSONResponse(await unless_disconnected(request, self._whole(deltas)))
        finally:
            deltas.close()

    async def _whole(self, deltas: DeltaStream) -> dict[str, Any]:
        sums: dict[int, Delta] = {}
        async for batch in self._counted(deltas):
            for delta in batch:
                if delta.index in sums:
                    sums[delta.index].extend(delta)
                else:
                    sums[delta.index] = delta
        choices = [
            self._form.choice(sums[index]) | await self._routed_experts(deltas, sums[index]) for index in sorted(sums)
        ]
        return self._head | {"object": self._form.object_name, "choices": choices, "usage": self._usage(deltas)}

    async def _events(self, deltas: DeltaStream) -> AsyncIterator[str]:
        head = self._head | {"object": self._form.chunk_object_name}
        writer = EventWriter(head, {"usage": None} if self._include_usage else {}, self._form)
        is_text_alone = self._form.is_text_alone
        written: list[str] = []  # and not sent: it goes out before an error does
        try:
            if opening := self._form.opening(self._num_choices):
                yield "".join(map(writer.event, opening))
            async for batch in self._counted(deltas):
                for delta in batch:
                    if is_text_alone and delta.finish_reason is None:
                        written.append(writer.text_event(delta))
                    else:
                        experts = await self._routed_experts(deltas, delta)
                        written.append(writer.event(self._form.chunk(delta) | experts))
                events, written = written, []
                yield "".join(events)
            if self._include_usage:
                yield event_of(head | {"choices": [], "usage": self._usage(deltas)})
        except Exception as error:  # the status was sent long ago: the stream itself must say it
            yield "".join([*written, event_of(as_api_error(error).body())])
            if not isinstance(error, ApiError):
                raise
        finally:
            deltas.close()
        yield "data: [DONE]\n\n"

    async def _counted(self, deltas: DeltaStream) -> AsyncIterator[list[Delta]]:
        async for batch in answer_deltas(deltas, self._inputs, self._echoes):
            self._num_tokens += sum([len(delta.token_ids) - delta.num_echoed for delta in batch])
            yield batch

    async def _routed_experts(self, deltas: DeltaStream, delta: Delta) -> dict[str, Any]:
        """Where a choice's tokens went, at its end and where that was asked for."""
        if not self._with_routed_experts or delta.finish_reason is None:
            return {}
        position, sample = divmod(delta.index, self._inputs[0].params.n)  # every prompt has as many
        request = deltas.requests[position]
        reading = request.sequences[sample].routed_experts
        assert reading is not None, "the engine set it before it told of the end"
        return {"routed_experts": tensor_json(await asyncio.to_thread(reading.wait))}

    def _usage(self, deltas: DeltaStream) -> dict[str, Any]:
        num_prompt_tokens = sum(len(given.prompt_ids) for given in self._inputs)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt_tokens + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in deltas.requests)},
        }


class EventWriter:
    """Writes a stream's events; around a token's text everything is written once.

    Args:
        head: the events' fields before their choices.
        rest: the events' fields behind their choices.
    """

    def __init__(self, head: dict[str, Any], rest: dict[str, Any], form: ChoiceFormat) -> None:
        around = _json(head | {"choices": [None]} | rest)
        before, _, behind = around.rpartition("[null]")
        self._before, self._behind, self._form = f"data: {before}[", f"]{behind}\n\n", form
        self._around_text: dict[int, tuple[str, str]] = {}  # of each choice

    def event(self, choice: dict[str, Any]) -> str:
        """The event of any choice."""
        return f"{self._before}{_json(choice)}{self._behind}"

    def text_event(self, delta: Delta) -> str:
        """The event of a delta that shows nothing but a text."""
        around = self._around_text.get(delta.index)
        if around is None:
            before, _, behind = self.event(self._form.chunk(Delta(delta.index, "\0"))).rpartition(_quote("\0"))
            around = self._around_text[delta.index] = before, behind
        return f"{around[0]}{_quote(delta.text)}{around[1]}"


class _EventStream(StreamingResponse):
    """Server-sent events; whatever ends the connection, before the first event too, ends its requests."""

    def __init__(self, events: AsyncIterator[str], deltas: DeltaStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._deltas = deltas

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._deltas.close()


async def compile_schema(request: Request, service: Service, params: SamplingParams) -> CompiledSchema | None:
    """The request's schema as a grammar, tried before where it is new; None where it has none.

    Raises:
        ClientDisconnect: the client went. The rest as in SchemaTrials.compile.
    """
    if params.schema_text is None:
        return None
    grammars = service.ready_engine().grammars
    return await unless_disconnected(request, service.schemas.compile(grammars, params.schema_text))


async def unless_disconnected(request: Request, work: Any) -> Any:
    """What the coroutine returns, or ClientDisconnect as soon as the client goes."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await unfinished


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event_of(content: dict[str, Any]) -> str:
    """A stream's event."""
    return f"data: {_json(content)}\n\n"

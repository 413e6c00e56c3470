"""Service: what every route works with (engine, configuration, metrics), and who may use it."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Request

from octavo import __version__
from octavo.models.tokenizer import Tokenizer
from octavo.serve.engine import Engine
from octavo.serve.engine.grammar import CompiledSchema
from octavo.serve.engine.request import Phase, RequestInput, UnavailableError
from octavo.serve.engine_client import DeltaStream, EngineClient
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import ApiError
from octavo.serve.http.metrics import Metrics
from octavo.serve.http.params import check_length
from octavo.serve.http.schema_trials import SchemaTrials
from octavo.serve.http.texts import Texts
from octavo.serve.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Service:
    """One server's parts. created: seconds since 1970 at its start."""

    engine: EngineClient
    config: ServerConfig
    metrics: Metrics
    schemas: SchemaTrials
    texts: Texts
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def is_healthy(self) -> bool:
        """The engine's thread lives and no step is too old."""
        loop = self.engine.loop
        return loop.is_alive and loop.step_age_s <= self.config.step_timeout_s

    @property
    def state(self) -> str:
        """In a word: "unhealthy", or the engine's phase."""
        return str(self.engine.loop.phase) if self.is_healthy else "unhealthy"

    @property
    def is_ready(self) -> bool:
        """It would take a request now."""
        return self.is_healthy and self.engine.loop.phase is Phase.SERVING

    def ready_engine(self) -> Engine:
        """The engine, to check requests against.

        Raises:
            UnavailableError: it takes none.
        """
        self.engine.loop.check_serving()
        if not self.is_ready:
            raise UnavailableError(f"the server is {self.state} and takes no requests; try again later")
        return self.engine.loop.engine

    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: there is none.
        """
        tokenizer = self.ready_engine().tokenizer
        if tokenizer is None:
            raise ApiError(
                400, "this model has no tokenizer, so text cannot be read; send token ids", code="no_tokenizer"
            )
        return tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """Token ids of a prompt that fits the context. Errors as Texts.encode."""
        tokenizer, most = self.tokenizer(), self.ready_engine().max_model_len
        return await self.texts.encode(tokenizer, text, add_special_tokens=add_special_tokens, most=most, field=field)

    async def make_input(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        schema: CompiledSchema | None,
        *,
        max_tokens: int | None,
        field: str,
    ) -> RequestInput:
        """A request, checked here and nowhere else; beside the event loop where its prompt is long.

        Args:
            max_tokens: as the client gave it.
            field: that holds the prompt.
        Raises:
            ApiError: see check_length.
            RequestError: see Engine.make_input.
        """
        engine = self.ready_engine()
        check_length(engine, len(prompt_ids), max_tokens, field)
        return await self.texts.check(len(prompt_ids), engine.make_input, prompt_ids, params, prompt, schema)

    def submit(self, inputs: Sequence[RequestInput]) -> DeltaStream:
        """Admit requests, all or none. Errors as EngineLoop.submit."""
        self.ready_engine()
        return self.engine.submit(inputs)

    def fingerprint(self) -> str:
        """What may change the bits of an answer beside its request: version, numerics, weights."""
        engine = self.engine.loop.engine
        return f"octavo-{__version__}-{engine.numerics.fingerprint()[:12]}-{engine.weight_version}"

    def check_model(self, name: str | None) -> str:
        """The name that an answer bears.

        Raises:
            ApiError: 404 for a model that is not served here.
        """
        if name is None or name in self.config.model_names:
            return name or self.config.model_names[0]
        served = ", ".join(self.config.model_names)
        raise ApiError(404, f"the model {name!r} is not served here; served: {served}", "model", "model_not_found")


def get_service(request: Request) -> Service:
    """The app's service."""
    service: Service = request.app.state.service
    return service


# a dependency that is no coroutine would be called in another thread
async def _service(request: Request) -> Service:
    return get_service(request)


ServiceOf = Annotated[Service, Depends(_service)]


async def require_api_key(request: Request) -> None:
    """A dependency: refuses a request without one of the API keys."""
    check_key(request, get_service(request).config.api_keys)


async def require_admin_key(request: Request) -> None:
    """A dependency: refuses a request without the admin key."""
    key = get_service(request).config.admin_key
    assert key is not None, "the routes exist with a key alone"
    check_key(request, (key,))


def check_key(request: Request, keys: tuple[str, ...]) -> None:
    """Refuse a request that brings none of the keys, where there are any.

    Raises:
        ApiError: 401.
    """
    if not keys:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # a header is bytes, which starlette hands out as latin-1: other whitespace may be a byte of a key in UTF-8
    # every key is compared, each in a time that does not tell how much of it was right
    matches = [secrets.compare_digest(given.strip(" \t").encode("latin-1"), key.encode()) for key in keys]
    if scheme.lower() != "bearer" or not any(matches):
        raise ApiError(
            401,
            "a key is needed: send the header 'Authorization: Bearer KEY'" if not given else "the key is wrong",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

"""The OpenAI-compatible server over an EngineClient: schema, routes, metrics, the page. Needs the extra `serve`."""

from octavo.serve.http.app import build_app
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.server import run_server

__all__ = ["ServerConfig", "build_app", "run_server"]

"""Runs the server: finds its models, opens the port, and answers until it is stopped."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

from vqprompt.core.cache import cache_folder
from vqprompt.core.errors import UserError
from vqprompt.product.serve import example
from vqprompt.product.serve.app import make_app
from vqprompt.product.serve.connections import with_deadlines
from vqprompt.product.serve.guard import check_token, is_local
from vqprompt.product.serve.lan import certificate, network_address
from vqprompt.product.serve.limits import Limits
from vqprompt.product.serve.models import ModelDefaults, ModelFolder, ServedModel
from vqprompt.product.serve.state import State, warn

UNNAMED = "my-model.vqp"
SECONDS_TO_END = 3  # for answers that are being sent when the server is stopped


@dataclass(frozen=True)
class Settings:
    """model: a file, a folder of them, or None for a new one. token: required if other machines can reach it.
    allow_hosts: names under which a proxy offers the server. lan: for phones on the same network, with https."""

    model: Path | None = None
    example: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    allow_hosts: tuple[str, ...] = ()
    lan: bool = False


def find_models(settings: Settings, private: Path, say: Callable[[str], None]) -> ModelFolder:
    """The models to serve; makes the example if it is asked for. private: a folder for an example that is not kept."""
    given, defaults = settings.model, settings.defaults
    if given is not None and given.is_dir():
        if settings.example:
            raise UserError(
                f"{given}: this is a folder, and --example makes one model; give a file such as {given}/drawings.vqp"
            )
        models = ModelFolder([], defaults, given, warn)
        models.look_again()
        if not list(models):
            raise UserError(f"{given}: no model in this folder; put .vqp files there, made with vqprompt learn")
        return models
    path = given or (private / f"{example.NAME}.vqp" if settings.example else Path(UNNAMED))
    if path.suffix != ".vqp" and not path.is_file():
        raise UserError(f"{path}: no such model; give a file that ends in .vqp (it may be new), or a folder of them")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent}: no such folder; create it, or give another path")
    if settings.example and not path.exists():
        say(f"learning {example.PER_CLASS} drawings of each of {len(example.THINGS)} things …")
        example.make_example(path, defaults.device)
    elif not path.exists():
        say(f"{path}: a new model; it knows nothing until it is taught")
    served = ServedModel(path.stem, path, defaults, drawings=settings.example)
    served.refresh()
    if served.problem is not None:
        raise UserError(served.problem)
    return ModelFolder([served], defaults, None, warn)


def serve(settings: Settings, say: Callable[[str], None], ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. ready: called with the address as soon as requests are answered."""
    open_server(settings, say, ready).run()


def open_server(settings: Settings, say: Callable[[str], None], ready: Callable[[str], None]) -> Server:
    """A server that has its port and its models, but does not answer yet."""
    if settings.lan:
        settings = replace(settings, host=network_address(), token=settings.token or secrets.token_urlsafe(12))
    check_token(settings.host, settings.token)
    listening = _listen(settings.host, settings.port)
    try:
        state = make_state(settings, say)
    except BaseException:
        listening.close()
        raise
    return Server(settings, state, listening, ready)


def make_state(settings: Settings, say: Callable[[str], None]) -> State:
    state = State(settings.limits, settings.defaults)
    try:
        state.models = find_models(settings, state.folder, say)
    except BaseException:
        state.close()
        raise
    if settings.example:
        example.fill(state.gallery, next(iter(state.models)).name)
    return state


def own_names(host: str) -> frozenset[str] | None:
    """The names that requests may use: for a server that only this machine can reach, the names of this machine."""
    return frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if is_local(host) else None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port}: no such address ({error})") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise UserError(
            f"--host {host} --port {port}: cannot be used ({error.strerror}); try another, such as --port {port + 1}"
        ) from None
    return listening


class Server(uvicorn.Server):
    """Says when it is ready, and answers that it is not when it is being stopped."""

    def __init__(
        self, settings: Settings, state: State, listening: socket.socket, ready: Callable[[str], None]
    ) -> None:
        self.state, self._listening, self._tell = state, listening, ready
        host, port = settings.host, listening.getsockname()[1]
        self.url = f"http{'s' if settings.lan else ''}://{f'[{host}]' if ':' in host else host}:{port}/"
        if settings.lan:
            self.url = state.phone_url = f"{self.url}#token={settings.token}"
        limits = settings.limits
        config = uvicorn.Config(
            make_app(state, settings.token, own_names(host), frozenset(settings.allow_hosts)), ws="none",
            access_log=False, log_level="warning", http=with_deadlines(limits), server_header=False,
            timeout_keep_alive=int(limits.idle_seconds), timeout_graceful_shutdown=SECONDS_TO_END, proxy_headers=False,
            ssl_certfile=certificate(host, cache_folder() / "certificates") if settings.lan else None,
        )  # fmt: skip
        super().__init__(config)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            for served in self.state.models:
                try:
                    served.warm_up()
                except UserError as error:  # such as weights that were moved: the other models can answer
                    if self.state.models.folder is None:
                        raise
                    warn(f"{served.path}: {error}")
            super().run(sockets=[self._listening])
        finally:
            self.state.close()
            self._listening.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell(self.url)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.state.closing = True
        super().handle_exit(sig, frame)

"""Run the API: `python -m cotrain_server`."""

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys

import structlog
import uvicorn
from fastapi import FastAPI
from typing_extensions import override

import cotrain_server.blas_threads  # noqa: F401  # its import sets them, before that of numpy
from cotrain_server.app import create_app
from cotrain_server.http.connection_limits import (
    ACCEPTED_AT_ONCE,
    allow_many_connections,
    limited_protocol,
    listen_long,
)
from cotrain_server.services import LONG_POLL_S
from cotrain_server.settings import ServerSettings
from cotrain_server.supervisor.environment import refused_variables
from cotrain_store.blobs.opening import claim_blobs
from cotrain_store.errors import InvalidKey, StoreUnavailable, UnsafeRedis
from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.logs import start_logs
from cotrain_store.monitoring.metrics import count_blob_failures
from cotrain_store.process_start import CannotListen, listen, read_settings, refuse, trace_or_refuse
from cotrain_store.redis_client.connection import check_store, open_sync_connection

log = structlog.get_logger()

#: SDKs keep connections for 60 s. If the server closed first, it could close them during a request.
KEEP_ALIVE_S = 75
#: Connections stay open this long after the signal. A request just sent on one is still answered,
#: with a header that directs its client to the next process.
LINGER_S = 0.5
#: Time after which a thread that parses yields the interpreter lock to the event loop, in seconds. The default, 5 ms
#: in each step of each request, adds up to a tenth of a second.
SWITCH_S = 0.001
#: Objects after which the youngest ones are searched for cycles. With Python's default, 700, the search of a few requests
#: took a twentieth of the processor time of a small pass.
COLLECTED_AFTER = 5_000
#: Time limit for requests in flight. Afterwards they are cancelled, and their clients repeat them.
SHUTDOWN_S = 8


class DrainingServer(uvicorn.Server):
    """uvicorn server that answers open polls on a shutdown signal, because uvicorn would wait for them."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        listen_long(self.servers)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, drain, then close."""
        for server in self.servers:
            server.close()
        self._app.state.services.drain()
        await asyncio.sleep(LINGER_S)
        await super().shutdown(sockets)


def main() -> None:
    """Run the API process. Exit status 2: settings or store refused. 3: store or address unavailable."""
    start_logs("api")
    sys.setswitchinterval(SWITCH_S)
    arguments = _arguments()
    if refused := refused_variables():
        refuse("settings_refused", " ".join(refused))
    settings = read_settings(ServerSettings)
    start_logs("api", settings.log_level)
    trace_or_refuse("api", f"{socket.gethostname()}-{os.getpid()}", decides=True)
    try:
        _ = settings.chosen_keys
    except (InvalidKey, OSError) as error:
        refuse("settings_refused", f"COTRAIN_API_KEYS or COTRAIN_API_KEYS_FILE: {error}")
    count_blob_failures(Source.API)
    try:  # before uvicorn starts, whose error would show the operator a traceback
        _check_store(settings)
    except UnsafeRedis as unsafe:
        refuse("redis_refused", str(unsafe))
    except StoreUnavailable as unavailable:
        log.error("redis_unavailable", reason=str(unavailable))  # its supervisor restarts it
        sys.exit(3)
    max_connections = allow_many_connections()
    app = create_app(settings, arguments.long_poll_s)
    # The objects of modules and routes live as long as the process. To visit them all takes 0.05 s, in which no heartbeat
    # is answered.
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, 10, 10)
    server = DrainingServer(_config(app, settings, max_connections), app)
    # uvicorn raises the signal again after its end. The signal must neither kill this process then,
    # nor be lost before uvicorn handles it.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, server.handle_exit)
    log.info("api_started", host=settings.host, port=settings.port)
    server.run([_listener(settings, arguments.listen_fd)])
    log.info("api_stopped")
    sys.exit(0 if server.started else 3)


def _listener(settings: ServerSettings, descriptor: int | None) -> socket.socket:
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    try:
        return listen(settings.host, settings.port, backlog=ACCEPTED_AT_ONCE)
    except CannotListen as error:
        log.error("cannot_listen", reason=str(error))  # another program may release the port
        sys.exit(3)


def _arguments() -> argparse.Namespace:
    """Return the arguments, which a supervisor, a test or a benchmark sets, but no operator."""
    parser = argparse.ArgumentParser(prog="python -m cotrain_server")
    parser.add_argument("--listen-fd", type=int, help="an open listening socket, in place of host and port")
    parser.add_argument("--long-poll-s", type=float, default=LONG_POLL_S, help="how long a poll waits for a result")
    return parser.parse_args()


def _check_store(settings: ServerSettings) -> None:
    connection = open_sync_connection(settings.redis_url)
    try:
        check_store(connection, accept_data_loss=settings.accept_data_loss)
        if settings.blobs:  # a folder is its worker's to claim
            claim_blobs(connection, settings.data_dir, settings.blobs)
    finally:
        connection.close()


def _config(app: FastAPI, settings: ServerSettings, max_connections: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=limited_protocol(max_connections),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,  # its lines go the way of all others (`start_logs`)
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        server_header=False,
        # By default uvicorn trusts the forwarded headers of any peer on this host, even of a proxy
        # that does not set them.
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        backlog=ACCEPTED_AT_ONCE,
    )


if __name__ == "__main__":
    main()

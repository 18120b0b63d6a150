"""HTTP port that serves a process' metrics to Prometheus, in its own threads, without a key.

It is off by default. A scrape only reads and takes about a millisecond, while the process continues.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from typing_extensions import override

from cotrain_store.monitoring.definitions import Source
from cotrain_store.monitoring.metrics import REGISTRIES
from cotrain_store.process_start import CannotListen, listen, refuse
from cotrain_store.settings import StoreSettings

log = structlog.get_logger()

#: Timeout of an idle connection, in s.
TIMEOUT_S = 10.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    pages: Mapping[str, Callable[[], bytes]]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = TIMEOUT_S

    def do_GET(self) -> None:  # called by http.server
        """Answer with a page."""
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(404)
            return
        try:
            body = page()
        except Exception:
            log.exception("scrape_failed", path=self.path)
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because a scrape arrives every few seconds."""


@contextmanager
def metrics_port(settings: StoreSettings, pages: Mapping[str, Callable[[], bytes]]) -> Iterator[int | None]:
    """Serve these pages while the block runs, if the settings enable it; yield the port.

    A port that cannot be opened ends the process: a restart would not help.
    """
    if settings.metrics_port == 0:
        yield None
        return
    try:
        listener = listen(settings.metrics_host, settings.metrics_port)
    except CannotListen as error:
        refuse("metrics_port_refused", f"COTRAIN_METRICS_HOST and COTRAIN_METRICS_PORT: {error}")
    server = _Server(listener.getsockname(), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.pages = pages
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def own_metrics(source: Source) -> Mapping[str, Callable[[], bytes]]:
    """Return the page with only the process' own metrics."""
    return {"/metrics": lambda: generate_latest(REGISTRIES[source])}

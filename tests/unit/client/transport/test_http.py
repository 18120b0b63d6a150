"""HTTP transport: retries, errors, compression, trace spans, and connection pools."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import httpx
import pytest
import zstandard
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from cotrain.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ForeignAnswer,
    InternalServerError,
    MalformedMessage,
    NotFoundError,
    RateLimitError,
    UnprocessableEntityError,
)
from cotrain.requests.background_loop import BackgroundLoop
from cotrain.transport import http as module
from cotrain.transport.http import AT_ONCE, ConnectionPools, Transport
from cotrain.transport.responses import RetryPolicy, parsed, read, reader
from cotrain.types import (
    AdamParams,
    Datum,
    GetInfoRequest,
    GetServerCapabilitiesResponse,
    ModelInput,
    OptimStepRequest,
    UntypedAPIFuture,
)
from cotrain.wire.codec import encode_datums, wrap_datums
from tests.support.fake_api import Answer, FakeApi, refusal
from tests.support.proxies import FOREIGN
from tests.support.waiting import until

REQUEST = GetInfoRequest(model_id="m")


def as_it_is(response: httpx.Response) -> httpx.Response:
    return response


class Naps:
    """Sleep that only records its durations."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def post(api: FakeApi, naps: Naps, policy: RetryPolicy | None = None) -> httpx.Response:
    async def once() -> httpx.Response:
        transport = Transport("http://server/prefix/", "tml-key", network=api.network, policy=policy, sleep=naps)
        try:
            return await transport.post("get_info", REQUEST, as_it_is)
        finally:
            await transport.close()

    return asyncio.run(once())


def api_answering(*answers: Answer) -> FakeApi:
    return FakeApi(answers={"/prefix/api/v1/get_info": [*answers, httpx.Response(200, json={})]})


def test_every_call_carries_the_key_under_the_prefix_of_the_base_url() -> None:
    api = api_answering()
    post(api, Naps())
    assert api.calls[0].url == "http://server/prefix/api/v1/get_info"
    assert api.calls[0].headers["X-API-Key"] == "tml-key"


@pytest.mark.parametrize(
    "trouble",
    [
        refusal(408),
        refusal(429),
        refusal(500),
        refusal(503),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.RemoteProtocolError("closed"),
        httpx.ReadTimeout("slow"),
    ],
)
def test_a_transient_error_is_retried(trouble: Answer) -> None:
    api, naps = api_answering(trouble, trouble), Naps()
    assert post(api, naps).status_code == 200
    assert len(api.calls) == 3
    assert 0.375 <= naps.seconds[0] <= 0.5
    assert 0.75 <= naps.seconds[1] <= 1.0


@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (400, BadRequestError),
        (401, AuthenticationError),
        (404, NotFoundError),
        (409, APIStatusError),
        (410, APIStatusError),
        (413, APIStatusError),
        (422, UnprocessableEntityError),
    ],
)
def test_a_permanent_refusal_is_not_retried(status: int, error_class: type[APIError]) -> None:
    api, naps = api_answering(refusal(status, "because")), Naps()
    with pytest.raises(error_class, match=f"{status}: because"):
        post(api, naps)
    assert len(api.calls) == 1
    assert naps.seconds == []


def test_the_client_waits_as_long_as_the_server_states() -> None:
    naps = Naps()
    post(api_answering(refusal(429, "full", **{"Retry-After": "3"})), naps)
    assert naps.seconds == [3.0]


@pytest.mark.parametrize("header", ["-1", "600", "soon", "nan", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_an_unreasonable_retry_after_is_ignored(header: str) -> None:
    naps = Naps()
    post(api_answering(refusal(429, "full", **{"Retry-After": header})), naps)
    assert naps.seconds[0] <= 0.5


@pytest.mark.parametrize(
    ("trouble", "error_class"),
    [
        (refusal(429), RateLimitError),
        (refusal(502), InternalServerError),
        (httpx.ConnectError("refused"), APIConnectionError),
        (httpx.ReadTimeout("slow"), APITimeoutError),
    ],
)
def test_after_the_time_limit_the_last_error_is_raised(trouble: Answer, error_class: type[APIError]) -> None:
    with pytest.raises(error_class):
        post(api_answering(trouble), Naps(), RetryPolicy(give_up_after_s=-1.0))


def test_an_answer_of_another_shape_is_an_error() -> None:
    response = httpx.Response(200, text="<html>", request=httpx.Request("GET", "http://server/x"))
    with pytest.raises(MalformedMessage, match="GetServerCapabilitiesResponse"):
        read(response, GetServerCapabilitiesResponse)


def test_a_refusal_without_json_shows_its_status() -> None:
    with pytest.raises(APIStatusError, match="404: Not Found") as caught:
        post(api_answering(httpx.Response(404)), Naps())
    assert caught.value.status_code == 404


def test_a_path_that_the_server_lacks_names_the_address_to_check() -> None:
    unknown = httpx.Response(404, json={"detail": "Not Found", "code": "not_found"})
    with pytest.raises(
        APIStatusError, match=r"404: Not Found; the server has no path /prefix/api/v1/get_info: is the base URL right\?"
    ):
        post(api_answering(unknown), Naps())


PAGE = "<html>Welcome to nginx</html>"


def test_a_web_page_is_not_accepted_as_an_answer() -> None:
    response = httpx.Response(200, html=PAGE, request=httpx.Request("GET", "http://server:1/x"))
    with pytest.raises(ForeignAnswer, match="http://server:1 is no cotrain server"):
        parsed(response, reader(GetServerCapabilitiesResponse))


def test_a_redirect_is_an_error_with_the_new_address() -> None:
    moved = httpx.Response(308, headers={"Location": "https://new/"}, request=httpx.Request("GET", "http://old/x"))
    with pytest.raises(ForeignAnswer, match="it redirects to https://new/"):
        parsed(moved, reader(GetServerCapabilitiesResponse))


def test_a_refusal_that_is_a_web_page_names_the_address_to_check() -> None:
    says = "404: Not Found; a web page came back, so http://server is no"
    with pytest.raises(APIStatusError, match=says) as caught:
        post(api_answering(httpx.Response(404, html=PAGE)), Naps())
    assert "nginx" not in str(caught.value)


def test_a_proxy_page_during_a_restart_is_retried() -> None:
    api, naps = api_answering(httpx.Response(502, html=PAGE)), Naps()
    assert post(api, naps).status_code == 200
    with pytest.raises(InternalServerError, match=r"^502: Bad Gateway$"):
        post(api_answering(httpx.Response(502, html=PAGE)), naps, RetryPolicy(give_up_after_s=-1.0))


def send_pass(*data: Datum, compresses: bool = True, tokens: int = 4_000) -> httpx.Request:
    """Send a pass of this data, or of `tokens` tokens. Return the request that the server received."""
    datum = Datum(model_input=ModelInput.from_ints([7] * tokens), loss_fn_inputs={})
    message = wrap_datums("m", 1, encode_datums(data or [datum]), "x", None, forward_only=True)
    api = FakeApi(answers={"forward_backward": [httpx.Response(200, json={})]})

    async def once() -> None:
        transport = Transport("http://server", "tml-key", network=api.network)
        transport.compresses = compresses
        await transport.post("forward_backward", message, as_it_is)
        await transport.post("get_info", REQUEST, as_it_is)
        await transport.close()

    asyncio.run(once())
    assert "Content-Encoding" not in api.calls[1].headers
    return api.calls[0]


def test_a_pass_is_compressed_if_the_server_requests_it() -> None:
    plain, zipped = send_pass(compresses=False), send_pass(compresses=True)
    assert "Content-Encoding" not in plain.headers
    assert zipped.headers["Content-Encoding"] == "zstd"
    assert zstandard.ZstdDecompressor().decompress(zipped.content) == plain.content
    assert 10 * len(zipped.content) < len(plain.content)


def test_a_prompt_of_a_group_is_sent_once() -> None:
    random = Random(0)
    prompt = [random.randrange(150_000) for _ in range(2_000)]
    group = [
        Datum(
            ModelInput.from_ints([*prompt, random.randrange(150_000)]),
            {
                "target_tokens": [*prompt[1:], *(random.randrange(150_000) for _ in range(2))],
                "weights": [0.0] * 1_999 + [1.0] * 2,
            },
        )
        for _ in range(16)
    ]
    assert len(send_pass(*group).content) < 1.1 * len(send_pass(group[0]).content)


def test_a_large_pass_is_encoded_like_a_small_one() -> None:
    plain, zipped = (send_pass(compresses=zips, tokens=100_000) for zips in (False, True))
    assert zstandard.ZstdDecompressor().decompress(zipped.content) == plain.content


def test_a_small_request_is_not_compressed() -> None:
    assert "Content-Encoding" not in send_pass(compresses=True, tokens=4).headers


def test_a_pass_is_encoded_once_for_all_attempts() -> None:
    api = FakeApi(answers={"forward_backward": [refusal(503), refusal(503)]})
    message = wrap_datums("m", 1, encode_datums([]), "x", None, forward_only=True)

    async def change_message(_: float) -> None:
        message.seq_id += 1

    async def once() -> None:
        transport = Transport("http://server", "k", network=api.network, sleep=change_message)
        await transport.post("forward_backward", message, as_it_is)
        await transport.close()

    asyncio.run(once())
    assert len({call.content for call in api.calls}) == 1


def test_a_caller_with_its_own_retries_gets_a_busy_error_at_once() -> None:
    api, naps = FakeApi(answers={"get_info": [refusal(503), refusal(429)]}), Naps()

    async def once() -> None:
        transport = Transport("http://server", "k", network=api.network, sleep=naps)
        try:
            await transport.post("get_info", REQUEST, as_it_is, raises_busy=True)
        finally:
            await transport.close()

    with pytest.raises(RateLimitError):
        asyncio.run(once())
    assert len(naps.seconds) == 1


def test_a_wrong_key_is_named_in_the_error() -> None:
    with pytest.raises(AuthenticationError, match=r"^401: Authentication failed; is the key right"):
        post(api_answering(refusal(401, "Authentication failed.")), Naps())


def test_an_expired_key_is_not_called_wrong() -> None:
    expired = httpx.Response(401, json={"detail": "The API key has expired.", "code": "expired_key"})
    with pytest.raises(
        AuthenticationError, match=r"^401: The API key has expired; the operator can create another one$"
    ):
        post(api_answering(expired), Naps())


def test_a_refusal_names_its_request() -> None:
    with pytest.raises(NotFoundError) as found:
        post(api_answering(refusal(404, **{"X-Request-Id": "3f2a"})), Naps())
    assert found.value.request_id == "3f2a"
    assert found.value.__notes__ == ["The server's log has this as request 3f2a."]
    with pytest.raises(NotFoundError) as found:
        post(api_answering(refusal(404)), Naps())
    assert found.value.request_id == ""


def test_the_span_of_the_caller_is_sent() -> None:
    api = api_answering(httpx.Response(200, json={}))
    post(api, Naps())
    context = SpanContext(0xAB, 0xCD, is_remote=False, trace_flags=TraceFlags(1))
    with use_span(NonRecordingSpan(context)):
        post(api, Naps())
    sent = [call.headers.get("traceparent") for call in api.calls]
    assert sent == [None, f"00-{0xAB:032x}-{0xCD:016x}-01"]


def test_the_span_of_the_calling_thread_is_sent_by_the_client_thread() -> None:
    api = api_answering()
    loop = BackgroundLoop("test")
    transport = Transport("http://server/prefix/", "tml-key", network=api.network)
    context = SpanContext(0xAB, 0xCD, is_remote=False, trace_flags=TraceFlags(0))
    with use_span(NonRecordingSpan(context)):
        loop.run(transport.post("get_info", REQUEST, as_it_is))
    loop.close(transport.close)
    assert [call.headers["traceparent"] for call in api.calls] == [f"00-{0xAB:032x}-{0xCD:016x}-00"]


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_answer_is_retried_once_the_server_is_known(kind: str) -> None:
    swapped = FOREIGN[kind]
    foreign = httpx.Response(swapped.status, content=swapped.content, headers=swapped.headers)
    api, naps = FakeApi(answers={"optim_step": [foreign]}), Naps()

    async def ask() -> UntypedAPIFuture:
        transport = Transport("http://server", "k", network=api.network, sleep=naps)
        try:
            api.answers["optim_step"] *= 2
            with pytest.raises(ForeignAnswer):  # the address may be wrong
                await transport.post("optim_step", step, reader(UntypedAPIFuture))
            await transport.get("get_server_capabilities", reader(GetServerCapabilitiesResponse))
            return await transport.post("optim_step", step, reader(UntypedAPIFuture))
        finally:
            await transport.close()

    step = OptimStepRequest(model_id="m", seq_id=1, adam_params=AdamParams())
    assert asyncio.run(ask()).request_id == "step:1"
    assert len(naps.seconds) == 1


class Server:
    """Server that answers when a test allows it, and counts the requests of each pool."""

    def __init__(self) -> None:
        self.made = 0
        self.through: Counter[int] = Counter()
        self.may_answer = asyncio.Event()

    def pool(self) -> httpx.MockTransport:
        number = self.made
        self.made += 1

        async def answer(_: httpx.Request) -> httpx.Response:
            self.through[number] += 1
            await self.may_answer.wait()
            return httpx.Response(200)

        return httpx.MockTransport(answer)


async def send(pools: ConnectionPools, server: Server, count: int) -> None:
    """Send `count` requests concurrently. Let the server answer once all have arrived."""
    server.may_answer.clear()
    came = server.through.total() + count
    request = httpx.Request("GET", "http://server/")
    sent = [asyncio.create_task(pools.handle_async_request(request)) for _ in range(count)]
    await until(lambda: server.through.total() >= came)
    server.may_answer.set()
    await asyncio.gather(*sent)


async def test_a_pool_holds_a_limited_number_of_connections() -> None:
    server = Server()
    pools = ConnectionPools(server.pool)
    await send(pools, server, 2 * AT_ONCE + 1)
    assert server.through == {0: AT_ONCE, 1: AT_ONCE, 2: 1}
    await pools.aclose()


async def test_few_requests_use_one_pool_after_many_earlier_ones() -> None:
    server = Server()
    pools = ConnectionPools(server.pool)
    await send(pools, server, 3 * AT_ONCE)
    server.through.clear()
    for _ in range(3):
        await send(pools, server, AT_ONCE)
    assert server.through == {0: 3 * AT_ONCE}
    assert server.made == 3
    await pools.aclose()


async def test_requests_beyond_the_limit_of_all_pools_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOLS", 2)
    server = Server()
    pools = ConnectionPools(server.pool)
    await send(pools, server, 4 * AT_ONCE)
    assert server.through == {0: 2 * AT_ONCE, 1: 2 * AT_ONCE}
    await pools.aclose()


async def test_a_broken_request_frees_its_connection() -> None:
    made = []

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    def make_pool() -> httpx.MockTransport:
        made.append(httpx.MockTransport(refuse))
        return made[-1]

    pools = ConnectionPools(make_pool)
    for _ in range(2 * AT_ONCE):
        with pytest.raises(httpx.ConnectError):
            await pools.handle_async_request(httpx.Request("GET", "http://server/"))
    assert len(made) == 1
    await pools.aclose()

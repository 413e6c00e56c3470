"""The load generator's HTTP client against answers of every framing."""

import asyncio

import pytest

from bench.serve.http_client import HTTP_ERRORS, Server

BODY = b"data: 1\r\n\ndata: two\n\nrest"
LINES = [b"data: 1", b"", b"data: two", b"", b"rest"]
CHUNKED = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in (BODY[:4], BODY[4:5], BODY[5:])) + b"0\r\n\r\n"
ANSWERS = {
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "to the end": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
}


def ask(answer: bytes, size: int, json: bytes | None = b"{}", path: str = "") -> tuple[int, list[bytes], bytes]:
    """(status, lines, head of the request) from a server that writes so many bytes at a time."""
    heads = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        for at in range(0, len(answer), size):
            writer.write(answer[at : at + size])
            await asyncio.sleep(0)
        writer.close()

    async def main() -> tuple[int, list[bytes]]:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            async with Server(f"http://127.0.0.1:{port}{path}", "key").request("/v1/x", json) as found:
                return found.status, [line async for line in found.lines()]

    status, lines = asyncio.run(main())
    return status, lines, heads[0]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("kind", ANSWERS)
def test_lines_of_any_framing(kind: str, size: int) -> None:
    assert ask(ANSWERS[kind], size)[:2] == (200, LINES)


def test_what_is_sent() -> None:
    head = ask(ANSWERS["length"], 99, path="/prefix/")[2]
    assert head.startswith(b"POST /prefix/v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer key\r\n" in head
    assert head.endswith(b"Content-Length: 2\r\n\r\n")
    assert ask(ANSWERS["length"], 99, None)[2].startswith(b"GET /v1/x HTTP/1.1\r\n")


@pytest.mark.parametrize("answer", [ANSWERS["chunked"][:-6], ANSWERS["length"][:-6], b"HTTP/1.1 2"])
def test_a_cut_answer_is_an_error(answer: bytes) -> None:
    with pytest.raises(HTTP_ERRORS):
        ask(answer, 99)

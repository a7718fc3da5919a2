"""The raw body of a request: its type and encoding checked, decompressed within a limit."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from mooncake_jax.frontend.errors import ApiError, invalid

_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS  # told apart by their first bytes
ENCODINGS = ("gzip", "deflate")
MOST_MEMBERS = 64  # of a compressed body, one behind the other
BODY_SECONDS = 60.0  # that a client may take to send a body


async def read_json(http: web.Request, max_nbytes: int) -> bytes:
    """The body, said to be JSON, as its client had it before compression.

    Raises ApiError: 415 for another Content-Type or a Content-Encoding that is not one of `ENCODINGS`, 413 for more
    than `max_nbytes`, before or after decompression, 408 for a body that does not come in time, 400 for one that its
    encoding does not fit. The server
    must not decompress by itself (`auto_decompress=False`).
    """
    if http.content_type != "application/json":
        raise ApiError(
            415,
            f"Content-Type is {http.content_type!r}: send application/json",
            code="unsupported_media_type",
        )
    encoding = ",".join(http.headers.getall("Content-Encoding", [])).strip().lower()
    if encoding not in ("", "identity", *ENCODINGS):
        raise ApiError(
            415,
            f"Content-Encoding is {encoding!r}: send the body as it is, or one of {', '.join(ENCODINGS)}",
            code="unsupported_content_encoding",
        )
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await http.read()
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {BODY_SECONDS:g} s", code="request_timeout"
        ) from None
    except web.RequestPayloadError as error:
        raise invalid(f"the body could not be read: {error}", code="invalid_body") from None
    if encoding not in ENCODINGS:
        return raw
    return await asyncio.to_thread(_decompressed, raw, encoding, max_nbytes)


def _decompressed(raw: bytes, encoding: str, max_nbytes: int) -> bytes:
    """All members of `raw`, one behind the other. Never decompresses more than one byte over the limit."""
    parts, room, num_members = [], max_nbytes + 1, 0
    while raw:
        num_members += 1
        if num_members > MOST_MEMBERS:  # each costs a copy of what follows it
            raise invalid(f"the body is {encoding} in more than {MOST_MEMBERS} pieces", code="invalid_body")
        member = zlib.decompressobj(_ZLIB_OR_GZIP)
        try:
            parts.append(member.decompress(raw, room))
        except zlib.error as error:
            raise invalid(f"the body is not {encoding}: {error}", code="invalid_body") from None
        room -= len(parts[-1])
        if not room:
            raise ApiError(
                413, f"the body decompresses to more than {max_nbytes} bytes", code="body_too_large"
            )
        if not member.eof:
            raise invalid(f"the body is not {encoding}: its end is missing", code="invalid_body")
        raw = member.unused_data
    return b"".join(parts)

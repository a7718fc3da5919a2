"""What the journal of the SSD tier says, and how a record is framed. Pure.

    [length u32 | crc32 of the payload u32 | payload, MessagePack]   little-endian, one after the other

A crash leaves whole records and at most one torn one at the end.
"""

from __future__ import annotations

import struct
import zlib
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.block import KEY_NBYTES
from kvstore.messages import MAX_OBJECT_NBYTES, MAX_PARTS, Namespace

VERSION = 1
_FRAME = struct.Struct("<II")
_Key = Annotated[bytes, Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
_Nbytes = Annotated[int, Meta(ge=1, le=MAX_OBJECT_NBYTES)]


class Header(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """The first record: how the slots file is laid out."""

    version: int
    stride: Annotated[int, Meta(ge=1)]  # bytes from one slot to the next


class Put(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """From now on `slot` holds `key`: its bytes were written before this record."""

    key: _Key
    slot: Annotated[int, Meta(ge=0)]
    nbytes: _Nbytes
    part_nbytes: _Nbytes
    crcs: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...], Meta(max_length=MAX_PARTS)]
    namespace: Namespace = ""


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """`key` is no longer held. Comes before anything else is written into its slot."""

    key: _Key


Record = Header | Put | Drop
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


def frame(record: Record) -> bytes:
    """The bytes of one record. Those of a Drop are never more than those of the Put it ends."""
    payload = _encode(record)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def parse(raw: bytes) -> tuple[list[Record], int]:
    """The records that are whole, up to the first that is not; and how many bytes they take."""
    records: list[Record] = []
    at = 0
    while len(raw) - at >= _FRAME.size:
        length, crc = _FRAME.unpack_from(raw, at)
        payload = raw[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload) != crc:
            break
        try:
            records.append(_decode(payload))
        except (msgspec.MsgspecError, ValueError):
            break
        at += _FRAME.size + length
    return records, at

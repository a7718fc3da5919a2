"""GGML's block formats decoded one value at a time, as their definitions read: what the fast decoder is held to."""

import struct
from collections.abc import Callable


def q4_0(block: bytes) -> list[float]:
    (d,) = struct.unpack_from("<e", block)
    low, high = _nibbles(block[2:])
    return [(q - 8) * d for q in low + high]


def q4_1(block: bytes) -> list[float]:
    d, m = struct.unpack_from("<2e", block)
    low, high = _nibbles(block[4:])
    return [q * d + m for q in low + high]


def q5_0(block: bytes) -> list[float]:
    d, fifth = struct.unpack_from("<eI", block)
    low, high = _nibbles(block[6:])
    return [(q + 16 * (fifth >> i & 1) - 16) * d for i, q in enumerate(low + high)]


def q5_1(block: bytes) -> list[float]:
    d, m, fifth = struct.unpack_from("<2eI", block)
    low, high = _nibbles(block[8:])
    return [(q + 16 * (fifth >> i & 1)) * d + m for i, q in enumerate(low + high)]


def q8_0(block: bytes) -> list[float]:
    d, *quants = struct.unpack("<e32b", block)
    return [q * d for q in quants]


def q4_k(block: bytes) -> list[float]:
    d, dmin = struct.unpack_from("<2e", block)
    steps, offsets = _six_bits(block[4:16])
    values = []
    for chunk in range(4):
        for half, quants in enumerate(_nibbles(block[16 + 32 * chunk : 48 + 32 * chunk])):
            step, offset = d * steps[2 * chunk + half], dmin * offsets[2 * chunk + half]
            values += [q * step - offset for q in quants]
    return values


def q5_k(block: bytes) -> list[float]:
    d, dmin = struct.unpack_from("<2e", block)
    steps, offsets = _six_bits(block[4:16])
    fifth = block[16:48]
    values = []
    for chunk in range(4):
        for half, quants in enumerate(_nibbles(block[48 + 32 * chunk : 80 + 32 * chunk])):
            part = 2 * chunk + half
            step, offset = d * steps[part], dmin * offsets[part]
            values += [(q + 16 * (fifth[i] >> part & 1)) * step - offset for i, q in enumerate(quants)]
    return values


def q6_k(block: bytes) -> list[float]:
    lower, upper = block[:128], block[128:192]
    *steps, d = struct.unpack("<16be", block[192:])
    values = []
    for i in range(256):
        half, place = divmod(i, 128)
        quarter, column = divmod(place, 32)
        four = lower[64 * half + 32 * (quarter % 2) + column] >> 4 * (quarter // 2) & 15
        two = upper[32 * half + column] >> 2 * quarter & 3
        values.append(d * steps[i // 16] * (four + 16 * two - 32))
    return values


def _nibbles(packed: bytes) -> tuple[list[int], list[int]]:
    return [byte & 15 for byte in packed], [byte >> 4 for byte in packed]


def _six_bits(packed: bytes) -> tuple[list[int], list[int]]:
    """Eight steps and eight offsets of six bits; the upper two bits of the last four lie above the first."""
    steps = [packed[i] & 63 for i in range(4)]
    steps += [packed[8 + i] & 15 | packed[i] >> 6 << 4 for i in range(4)]
    offsets = [packed[4 + i] & 63 for i in range(4)]
    offsets += [packed[8 + i] >> 4 | packed[4 + i] >> 6 << 4 for i in range(4)]
    return steps, offsets


# decoder, bytes of a block, and where its half-precision scales are
FORMATS: dict[str, tuple[Callable[[bytes], list[float]], int, tuple[int, ...]]] = {
    "Q4_0": (q4_0, 18, (0,)),
    "Q4_1": (q4_1, 20, (0, 2)),
    "Q5_0": (q5_0, 22, (0,)),
    "Q5_1": (q5_1, 24, (0, 2)),
    "Q8_0": (q8_0, 34, (0,)),
    "Q4_K": (q4_k, 144, (0, 2)),
    "Q5_K": (q5_k, 176, (0, 2)),
    "Q6_K": (q6_k, 210, (208,)),
}

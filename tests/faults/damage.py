"""Random damage to bytes, as disks, networks and attackers do it."""

from __future__ import annotations

import random

EXTREMES = (0x00, 0x01, 0x7F, 0x80, 0xFF)


def damaged(data: bytes, rng: random.Random, most: int = 4) -> bytes:
    """A copy with one to `most` random changes; it may happen to be the same."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most)):
        rng.choice(CHANGES)(changed, rng)
    return bytes(changed)


def _place(data: bytearray, rng: random.Random) -> int:
    """Anywhere, but more often near the start, where headers are, or near the end."""
    size = max(1, len(data))
    return rng.choice((rng.randrange(size), rng.randrange(min(64, size)), size - 1 - rng.randrange(min(64, size))))


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[_place(data, rng)] ^= 1 << rng.randrange(8)


def _set(data: bytearray, rng: random.Random) -> None:
    if data:
        data[_place(data, rng)] = rng.choice(EXTREMES)


def _number(data: bytearray, rng: random.Random) -> None:
    """A length, size or offset becomes extreme."""
    width = rng.choice((2, 4, 8))
    if len(data) >= width:
        at = min(_place(data, rng), len(data) - width)
        value = rng.choice((0, 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1, rng.randrange(2 ** (8 * width))))
        data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))


def _zero(data: bytearray, rng: random.Random) -> None:
    at, size = _place(data, rng), rng.choice((4, 64, 512, 4096))
    data[at : at + size] = bytes(len(data[at : at + size]))


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[_place(data, rng) :]


def _remove(data: bytearray, rng: random.Random) -> None:
    at = _place(data, rng)
    del data[at : at + rng.choice((1, 4, 100, 512))]


def _insert(data: bytearray, rng: random.Random) -> None:
    at = _place(data, rng)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 100, 512)))


def _repeat(data: bytearray, rng: random.Random) -> None:
    at = _place(data, rng)
    data[at:at] = data[at : at + rng.choice((8, 64, 512))]


CHANGES = (_flip, _flip, _set, _set, _number, _number, _zero, _cut, _remove, _insert, _repeat)

"""A test card as PNG: some digits and a coloured square, drawn anew each time.

What is on it cannot be guessed and is in no training set, so a model that names it has seen it. The
standard library is enough: a PNG is its rows of pixels, deflated, between checksums.
"""

import random
import struct
import zlib
from dataclasses import dataclass
from typing import Final

SIDE: Final = 448
"""Pixels; more than the smallest picture the model takes as it is (147,456 pixels)."""

COLOURS: Final = {
    "red": (215, 25, 28),
    "green": (20, 150, 50),
    "blue": (25, 70, 215),
    "yellow": (250, 215, 10),
}
"""Colours nobody calls by another's name."""

DIGITS: Final = "2345678"
"""Without those that look like a letter or like each other."""
LENGTH: Final = 6

GLYPHS: Final = {
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
}
"""Five columns by seven rows each."""
ROWS: Final = 7
WIDTH: Final = 6 * LENGTH - 1

WHITE: Final = b"\xff\xff\xff"
BLACK: Final = b"\x00\x00\x00"


@dataclass(frozen=True)
class Card:
    """What one card shows."""

    number: str
    colour: str


def cards(chance: random.Random) -> tuple[Card, Card]:
    """Return two cards that have neither the number nor the colour in common."""
    first, second = chance.sample(sorted(COLOURS), 2)
    numbers: list[str] = []
    while len(numbers) < 2:
        number = "".join(chance.choice(DIGITS) for _ in range(LENGTH))
        if number not in numbers:
            numbers.append(number)
    return Card(numbers[0], first), Card(numbers[1], second)


def rows(card: Card) -> list[bytes]:
    """Return the card's rows of pixels: the digits above, the square below."""
    scale = SIDE // (WIDTH + 4)
    left, top = (SIDE - WIDTH * scale) // 2, SIDE // 8
    blank = WHITE * SIDE
    lines = [blank] * SIDE
    for row in range(ROWS):
        bits = "0".join(GLYPHS[digit].split()[row] for digit in card.number)
        inked = b"".join((BLACK if bit == "1" else WHITE) * scale for bit in bits)
        line = WHITE * left + inked + WHITE * (SIDE - left - WIDTH * scale)
        lines[top + row * scale : top + (row + 1) * scale] = [line] * scale
    side, at = SIDE // 3, SIDE // 2
    margin = (SIDE - side) // 2
    fill = bytes(COLOURS[card.colour]) * side
    square = WHITE * margin + fill + WHITE * (SIDE - margin - side)
    lines[at : at + side] = [square] * side
    return lines


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return one chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(card: Card) -> bytes:
    """Return the card as a PNG file, 8 bits a channel."""
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    pixels = b"".join(b"\x00" + row for row in rows(card))
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            chunk(b"IDAT", zlib.compress(pixels)),
            chunk(b"IEND", b""),
        ]
    )

"""Values in a form that cannot run code where it is read: numbers, texts, and containers of these, as JSON."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any, TypeAlias, cast

Exact: TypeAlias = int | Fraction | float
"""A number whose sums are not rounded; a float is infinite or NaN."""


def exact(number: float) -> Exact:
    """Return ``number`` in a form whose sums do not depend on their order. Infinities and NaN stay floats."""
    if number.is_integer():
        return int(number)
    return Fraction(number) if math.isfinite(number) else number


def _plain(value: object) -> object:
    return value.as_integer_ratio() if isinstance(value, Fraction) else repr(value)


_encode, _decode = json.JSONEncoder(default=_plain).encode, json.JSONDecoder().raw_decode


def as_json(value: Any) -> bytes:
    """Return numbers, texts, and lists, tuples and dicts of these as JSON; fractions as pairs, all else as ``repr``."""
    return _encode(value).encode()


def from_json(data: bytes | bytearray) -> Any:
    """Return the value that :func:`as_json` turned into ``data``. Tuples become lists. No data can run code here."""
    return _decode(data.decode())[0]


def packed(value: Any) -> bytes:
    """Return an integer that is not negative, bytes, or a value for :func:`as_json`, as bytes for a message."""
    if isinstance(value, int) and value >= 0:
        return b"n" + value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"b" + value if isinstance(value, bytes) else b"j" + as_json(value)


def unpacked(data: bytes) -> Any:
    """Return the value that :func:`packed` turned into ``data``."""
    kind, data = data[:1], data[1:]
    if kind == b"n":
        return int.from_bytes(data, "little")
    return data if kind == b"b" else from_json(data)


def as_exact(value: Any) -> Exact:
    """Return a number of :func:`exact` after :func:`as_json` and :func:`from_json`."""
    return Fraction(*cast("list[int]", value)) if isinstance(value, list) else value

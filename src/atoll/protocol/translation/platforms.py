"""XLA's numbers for platforms."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_K0, _K2 = 0xC3A5C85C97CB3127, 0x9AE16A3B2F90404F


def platform_id(name: str) -> int:
    """XLA's number for a platform: the 64-bit farm hash of its name (up to 16 bytes)."""
    data = name.encode()
    size = len(data)
    if size >= 8:
        mul = (_K2 + size * 2) & _MASK
        a = (int.from_bytes(data[:8], "little") + _K2) & _MASK
        b = int.from_bytes(data[-8:], "little")
        c = (_rotate(b, 37) * mul + a) & _MASK
        d = ((_rotate(a, 25) + b) * mul) & _MASK
        return _mix16(c, d, mul)
    if size >= 4:
        mul = (_K2 + size * 2) & _MASK
        low = int.from_bytes(data[:4], "little")
        return _mix16((size + (low << 3)) & _MASK, int.from_bytes(data[-4:], "little"), mul)
    if size:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[-1] << 2)
        return (_shift_mix((y * _K2 & _MASK) ^ (z * _K0 & _MASK)) * _K2) & _MASK
    return _K2


def _rotate(value: int, count: int) -> int:
    return ((value >> count) | (value << (64 - count))) & _MASK


def _shift_mix(value: int) -> int:
    return value ^ (value >> 47)


def _mix16(u: int, v: int, mul: int) -> int:
    a = _shift_mix(((u ^ v) * mul) & _MASK)
    b = _shift_mix(((v ^ a) * mul) & _MASK)
    return (b * mul) & _MASK

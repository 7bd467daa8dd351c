"""Names of kernels as their source has them."""

from __future__ import annotations

import ctypes


def demangle(symbol: str) -> str:
    """A kernel's name without its parameters: `_Z4copyILi4EEvPf` gives `copy<4>`."""
    cxa_demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    cxa_demangle.restype = ctypes.c_void_p
    address = cxa_demangle(symbol.encode(), None, None, ctypes.byref(ctypes.c_int()))
    if not address:
        return symbol  # extern "C"
    words = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    words = words.replace("(anonymous namespace)::", "").replace("(bool)", "").replace("(int)", "")
    return words.partition("(")[0].removeprefix("void ")

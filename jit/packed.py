"""An EXPORT function's arguments as one piece of memory, since ctypes converts arguments one by one.

A build has a second function for each that the source declares. It takes the piece apart, and looks at the
addresses on the way, which takes longer in Python.
"""

from __future__ import annotations

import struct

from jit.signature import POINTERS, Export, exports_of
from jit.source import Source

WRONG_ADDRESS = -1  # what it returns for a null pointer, and for one not at a multiple of 16 bytes
PREFIX = "foldfuse_call_"
# The function is declared anew under another name, since its own declaration names types that are not known
# here; and weakly, since an #if may have left it out.
TEXT = """
extern "C" __attribute__((weak)) int {prefix}target_{name}({types}, void*) __asm__("{name}");
extern "C" __attribute__((visibility("default"), no_sanitize("thread")))
int {prefix}{name}(const void* packed, void* stream) {{
    struct Arguments {{ {members} }};
    const Arguments& of = *static_cast<const Arguments*>(packed);
    if ({wrong}) return {wrong_address};
    return {prefix}target_{name}({values}, stream);
}}
"""
LETTERS = {"int": "i", "int64_t": "q", "float": "f"}  # in Python's struct; P is a pointer
INTEGERS = {"int64_t": "long long"}  # its name without a header


def layout(export: Export) -> struct.Struct:
    """The piece of memory: parameters in order, but the stream, aligned as in C."""
    types = (c_type for _, c_type in export.parameters)
    return struct.Struct("".join("P" if c_type in POINTERS else LETTERS[c_type] for c_type in types))


def text_of(source: Source) -> str:
    """What is compiled behind a source's own text."""
    return "".join(map(_function, exports_of(source).values()))


def _function(export: Export) -> str:
    types = [
        "void*" if c_type in POINTERS else INTEGERS.get(c_type, c_type) for _, c_type in export.parameters
    ]
    pointers = [f"of.a{at}" for at, (_, c_type) in enumerate(export.parameters) if c_type in POINTERS]
    null = " || ".join(f"!{pointer}" for pointer in pointers)
    bits = " | ".join(f"reinterpret_cast<unsigned long>({pointer})" for pointer in pointers)
    return TEXT.format(
        prefix=PREFIX,
        name=export.name,
        types=", ".join(types),
        members=" ".join(f"{c_type} a{at};" for at, c_type in enumerate(types)),
        wrong=f"{null} || ({bits}) % 16",
        wrong_address=WRONG_ADDRESS,
        values=", ".join(f"of.a{at}" for at in range(len(types))),
    )

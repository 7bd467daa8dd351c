"""Checks, times, results and plots of the stages, and the command line and notebook cells that show them."""

import gc
import sys

# What importing torch makes lives as long as the process. If it is left out of garbage collections, which go
# through it again and again and once more at the end, a command starts and ends sooner.
if "torch" not in sys.modules and gc.isenabled():
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()

# What nbformat checks notebooks with would import this: 39 parsers, 2 s, of formats that no notebook has.
sys.modules.setdefault("rfc3987_syntax", None)

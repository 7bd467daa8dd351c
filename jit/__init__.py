"""The machinery of jit_loader.py, which alone imports it, but for its tests and its benchmark.

A module imports only those above it:

    source        what is compiled, and for what
    files         contents of files, and whether they are what they were
    symbols       names of kernels in words
    first_error   the first error in what a compiler printed
    errors        what the loader raises, and how a notebook shows it
    signature     EXPORT functions, read from the source
    packed        an EXPORT function's arguments as one piece of memory, which is quicker to pass
    toolchain     where compilers, headers and tools are, and whether they fit together
    flags         the compilers' options
    headers       what a compiler read beside the source
    cache         keys, trust, publication, cleaning
    staging       private folders to build in, and the compilers that work there
    compile       one run of the compiler, through load_inline
    build         from a source to a build: one that is there, or a new one
    library       a build loaded into this process, and how the CPU runs a block's threads
    calls         the Python function for an EXPORT function, which checks its arguments
    resources     registers, spills and shared memory; machine code
    findings      what of the toolchain is there, for `python -m workbench doctor`
"""

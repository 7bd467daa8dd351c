"""One self-contained file of a stage, as harnesses that compare kernels take it.

The file has the CUDA source as a string, with the project's headers in it, compiled by torch's load_inline;
the reference as `Model`, the stage as `ModelNew`, `get_inputs` and `get_init_inputs`. It needs torch, nvcc
and a GPU, and nothing of this project.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

import jit_loader
from kernels_src.operator import Operator, Stage
from workbench.sources import inline_headers

TEMPLATE = '''\
"""{title}, stage {stage}: {stage_title}

Made by `python -m workbench export {operator}/{number}` for the shape {shape}.
`Model` is the reference in PyTorch, `ModelNew` computes the same in CUDA; both take msa (B,S,N,D) and
mask (B,S,N).
"""

from __future__ import annotations

import ctypes
import functools
{imports}
from torch.utils.cpp_extension import load_inline

SOURCE = r"""{source}"""

FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr"]
DEFINES = {defines}  # the sizes that the source is compiled for
SIGNATURES = {signatures}
DTYPE = {dtype}


{reference}


class Model({reference_name}):
    """The reference, with parameters of DTYPE."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.to(DTYPE)


class Kernels:
    """The compiled source: its functions take tensors and numbers and run on the current stream."""

    def __init__(self):
        major, minor = torch.cuda.get_device_capability()
        arch = f"{{major}}{{minor}}" + ("a" if major >= 9 else "")
        flags = [*FLAGS, f"-gencode=arch=compute_{{arch}},code=sm_{{arch}}"]
        path = load_inline(
            "{module_name}",
            cpp_sources="",
            cuda_sources=SOURCE,
            extra_cuda_cflags=flags + [f"-D{{name}}={{value}}" for name, value in DEFINES.items()],
            no_implicit_headers=True,
            is_python_module=False,
        )
        library = ctypes.CDLL(path)
        self.error_text = library.kernel_error_text
        self.error_text.restype = ctypes.c_char_p
        for name, types in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [getattr(ctypes, each) for each in types]
            setattr(self, name, functools.partial(self.call, name, function))

    def call(self, name, function, *arguments):
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        if not all(each.is_contiguous() and each.is_cuda for each in tensors):
            raise ValueError(f"{{name}}: needs contiguous CUDA tensors")
        values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        with torch.cuda.device(tensors[0].device):
            error = function(*values, torch.cuda.current_stream().cuda_stream)
        if error:
            raise RuntimeError(f"{{name}}: {{self.error_text(error).decode()}}")


kernels = functools.cache(Kernels)  # compiled at the first call


{functions}


class ModelNew(Model):
    """The same parameters and result, computed by the stage."""

    def forward(self, msa, mask):
        if msa.dtype != DTYPE{shape_check}:
            got = f"{{msa.dtype}} {{tuple(msa.shape)}}"
            raise ValueError(f"msa: made for {{DTYPE}}{shape_text}, got {{got}}")
        with torch.no_grad():
            return {run}(kernels(), self, msa, mask)


def get_inputs():
    """Random msa and a mask of 0 and 1 with zeros anywhere."""
    msa = torch.randn({msa_shape}, dtype=DTYPE)
    mask = (torch.rand({msa_shape}[:-1]) < 0.85).to(DTYPE)
    mask[:, 0] = 1
    return [msa, mask]


def get_init_inputs():
    """The arguments that both models are built with."""
    return {init_arguments}
'''


def export(operator: Operator, stage: Stage, path: Path, shape: str | None = None) -> None:
    """Write the file of a stage for a named shape; None: the first that the stage supports.

    Raises ValueError where the stage does not support the shape, KeyError where there is no such shape.
    """
    if shape is None:
        shape = next(name for name, sizes in operator.shapes.items() if not stage.unsupported(sizes))
    path.write_text(self_contained(operator, stage, operator.shapes[shape]))


def self_contained(operator: Operator, stage: Stage, shape: Any) -> str:
    """The file's text."""
    reason = stage.unsupported(shape)
    if reason:
        raise ValueError(f"stage {stage.name} does not support {shape}: {reason}")
    defines = dict(stage.constants(shape))
    functions = _Functions(operator.reference)
    reference = inspect.getsource(operator.reference).strip()
    functions.add_used(operator.reference, reference)
    run = functions.add(stage.run)
    msa_shape = tuple(shape[:4])
    return TEMPLATE.format(
        title=operator.title,
        stage=stage.name,
        stage_title=stage.title,
        operator=operator.name,
        number=stage.number,
        shape=shape,
        imports="\n".join(sorted(functions.imports, key=lambda line: ("torch" in line, line))),
        source=_escaped(inline_headers(stage.code, stage.source.parent)),
        defines=defines,
        signatures=_signatures(stage),
        dtype=stage.dtype,
        reference=reference,
        reference_name=operator.reference.__name__,
        module_name=f"{operator.name}_{stage.number}",
        functions="\n\n\n".join(functions.texts.values()),
        shape_check=f" or tuple(msa.shape) != {msa_shape}" if defines else "",
        shape_text=f" {msa_shape}" if defines else "",
        run=run,
        msa_shape=msa_shape,
        init_arguments=_init_arguments(operator, shape),
    )


class _Functions:
    """Python of the project as text, with all that it uses, in an order in which it can run."""

    def __init__(self, reference: type):
        self.reference = reference  # is in the file already
        self.imports = {"import torch"}
        self.texts: dict[str, str] = {}  # by the name that each defines

    def add(self, thing: Any) -> str:
        """Add a function or class, after what it uses. Returns its name in the file."""
        thing = inspect.unwrap(thing)
        name = thing.__name__
        if name not in self.texts:
            self.texts[name] = ""  # so that one that uses itself is not added for ever
            source = textwrap.dedent(inspect.getsource(thing)).strip()
            self.add_used(thing, source)
            del self.texts[name]
            self.texts[name] = source
        return name

    def add_used(self, thing: Any, source: str) -> None:
        """Add what a function or class of this source uses."""
        known = dict(vars(sys.modules[thing.__module__]))
        if isinstance(thing, FunctionType):
            known |= {name: cell.cell_contents for name, cell in _cells(thing)}
        tree = ast.parse(source)
        annotations = _take_annotations(tree)
        for name in _names_used(tree):
            if name in known:
                self._add_value(name, known[name])
        for name in annotations:  # never evaluated: those of the project may stay without a meaning
            if name in known and not _is_ours(known[name]):
                self._add_value(name, known[name])

    def _add_value(self, name: str, value: Any) -> None:
        if value is self.reference:
            return
        if isinstance(value, ModuleType):
            same = value.__name__ == name
            self.imports.add(f"import {name}" if same else f"import {value.__name__} as {name}")
        elif isinstance(value, torch.dtype | bool | int | float | str | tuple | None):
            self.texts[name] = f"{name} = {value!r}"
        elif not hasattr(value, "__module__") or not hasattr(value, "__qualname__"):
            raise ValueError(f"{name} is a {type(value).__name__}, which cannot be written to a file")
        elif not _is_ours(value):
            as_name = "" if value.__name__ == name else f" as {name}"
            self.imports.add(f"from {value.__module__} import {value.__name__}{as_name}")
        elif value.__name__ == "<lambda>":
            self.texts[name] = f"{name} = {_lambda_text(value)}"
        elif self.add(value) != name:
            self.texts[name] = f"{name} = {value.__name__}"


def _lambda_text(function: FunctionType) -> str:
    """The text of a lambda, which stands in the midst of a line: found by what it compiles to."""
    code = function.__code__
    for node in ast.walk(ast.parse(Path(code.co_filename).read_text())):
        if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno:
            compiled = compile(ast.Expression(node), code.co_filename, "eval").co_consts[0]
            if (compiled.co_code, compiled.co_consts) == (code.co_code, code.co_consts):
                return ast.unparse(node)
    raise ValueError(f"{code.co_filename}:{code.co_firstlineno}: the text of this lambda was not found")


def _cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function has from the function around it."""
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)


def _is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith("kernels_src")


def _take_annotations(tree: ast.AST) -> list[str]:
    """Remove annotations from a piece of Python; return the names in them."""
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            annotation = getattr(node, field, None)
            if annotation is not None:
                names |= dict.fromkeys(_names_used(annotation))
                setattr(node, field, ast.Constant(None))
    return list(names)


def _names_used(tree: ast.AST) -> list[str]:
    """Names that a piece of Python reads and does not itself set, in the order of their appearance."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.arg)]
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return [node.id for node in nodes if isinstance(node, ast.Name) and node.id not in local]


def _signatures(stage: Stage) -> dict[str, list[str]]:
    """Names in ctypes of the parameters of each exported function, the stream included."""
    exports = jit_loader.exports_of(jit_loader.Source(stage.code, stage.name, None, (), ()))
    return {
        name: [*(_ctype(parameter.type) for parameter in export.parameters), "c_void_p"]
        for name, export in exports.items()
    }


def _ctype(c_type: str) -> str:
    """The name in ctypes of a parameter's type: every pointer is a void pointer."""
    return "c_void_p" if c_type.endswith("*") else jit_loader.SCALARS[c_type].__name__


def _escaped(source: str) -> str:
    """A source as the inside of a raw string with triple quotes."""
    if '"""' in source or source.endswith("\\"):
        raise ValueError("export: the source has three double quotes in a row, or ends with a backslash")
    return source


def _init_arguments(operator: Operator, shape: Any) -> list[Any]:
    """The arguments that the operator's `build` gives to the reference."""
    seen: list[Any] = []
    original = operator.reference.__init__

    def record(self: Any, *arguments: Any) -> None:
        seen[:] = arguments
        original(self, *arguments)

    operator.reference.__init__ = record
    try:
        operator.build(shape)
    finally:
        operator.reference.__init__ = original
    return seen

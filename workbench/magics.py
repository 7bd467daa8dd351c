"""The two magics of the tweak loop: %load_stage and %%stage."""

from __future__ import annotations

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from kernels_src.operator import Operator, Stage
from workbench.selection import select
from workbench.variants import save, try_variant

HEADER_LINES = 1  # the line %%stage itself


@magics_class
class StageMagics(Magics):
    """Stages in cells."""

    @magic_arguments()
    @argument("operator", help="such as msa_column_attention")
    @argument("stage", help="its number, such as 03")
    @line_magic
    def load_stage(self, line: str) -> None:
        """Put a stage's source into a new cell that compiles, checks and times it when it is run."""
        arguments = parse_argstring(self.load_stage, line)
        operator, stage = _find(arguments.operator, arguments.stage)
        header = f"%%stage {operator.name} {stage.number} --as my_{stage.number}"
        self.shell.set_next_input(f"{header}\n{stage.code}", replace=False)

    @magic_arguments()
    @argument("operator", help="such as msa_column_attention")
    @argument("stage", help="the number of the stage that this is a variant of")
    @argument("--as", dest="name", required=True, help="the variant's name in plots and tables")
    @argument("--shape", default="seed", help="the shape to check and time it at")
    @argument("--save", action="store_true", help="keep it as a new file beside the stages")
    @cell_magic
    def stage(self, line: str, cell: str) -> None:
        """Compile the cell as a variant of a stage, check it, time it against the stage, show the changes."""
        arguments = parse_argstring(self.stage, line)
        operator, stage = _find(arguments.operator, arguments.stage)
        variant = stage.variant(cell, arguments.name)
        try_variant(operator, variant, arguments.shape, HEADER_LINES)
        if arguments.save:
            path = save(operator, variant)
            print(f"kept as {path.name}; list it in {path.parent.name}/__init__.py like {stage.source.name}")


def _find(operator: str, number: str) -> tuple[Operator, Stage]:
    """The stage that a line speaks of. Raises KeyError naming the operators, or the stages, that exist."""
    ((found, (stage,)),) = select(f"{operator}/{number}")
    return found, stage

"""CUDA sources and, for each operator, its PyTorch reference and list of stages."""

from kernels_src.msa_column_attention import MSA_COLUMN_ATTENTION
from kernels_src.operator import Operator
from kernels_src.outer_product_mean import OUTER_PRODUCT_MEAN

OPERATORS: dict[str, Operator] = {
    operator.name: operator for operator in (MSA_COLUMN_ATTENTION, OUTER_PRODUCT_MEAN)
}

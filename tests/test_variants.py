"""The variants that wait for a GPU: each is of a constant that its stage has."""

from __future__ import annotations

import re

import pytest
from processes import python

from benchmarks.variants import QUESTIONS
from kernels_src import OPERATORS
from workbench.sources import inline_headers


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda each: f"{each.operator}/{each.stage}")
def test_a_stage_has_the_constants_that_are_tried(question):
    stage = OPERATORS[question.operator].stage(question.stage)
    text = inline_headers(stage.code, stage.source.parent)
    found = re.findall(r"#ifndef (\w+)(?: *//.*)?\n#define \1 (.+?)(?: *//.*)?\n", text)
    defaults = dict(reversed(found))  # the first definition stands
    for constants in question.tried:
        for name, value in constants.items():
            assert name in defaults, f"{stage.name} has no {name}; it has {', '.join(defaults)}"
            assert str(value) != defaults[name], f"{name} {value} is the default"


def test_without_a_gpu_it_says_so_in_one_sentence():
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "benchmarks.variants", "outer_product_mean/08", env=variables)
    assert done.returncode == 1
    assert done.stderr == "variants.py: times are measured on an NVIDIA GPU, and none was found.\n"

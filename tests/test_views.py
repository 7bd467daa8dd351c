"""Views: diffs, highlighted source, and what SASS is counted as."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import pandas as pd

from kernels_src import OPERATORS
from workbench import views
from workbench.annotations import annotated_html, instructions_by_line, kernel_notes

OUTER = OPERATORS["outer_product_mean"]
FIRST, SECOND = OUTER.stages[:2]


def text_of(markup):
    """What a browser would show of the rows of a table, a line for each row."""
    rows = re.findall(r"<tr>(.*?)</tr>", markup, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]+>", "", row)) for row in rows]


def test_the_diff_turns_one_source_into_the_other():
    changed = FIRST.variant(FIRST.code.replace("cudaStream_t stream", "cudaStream_t other"), "changed")
    lines = views.diff(FIRST, changed).splitlines()
    assert lines[:2] == [f"--- {FIRST.name}", "+++ changed"]
    added = [line[1:] for line in lines[2:] if line.startswith("+")]
    assert added and all("cudaStream_t other" in line for line in added)
    assert views.diff(FIRST, FIRST) == ""


def test_side_by_side_shows_both_sources_with_line_numbers():
    markup = views.diff_html(FIRST, SECOND)
    shown = "".join(text_of(markup)).replace("\xa0", " ")
    for stage in (FIRST, SECOND):
        title = stage.code.splitlines()[0]
        assert title in shown
    assert markup.count('class="old"') and markup.count('class="new"')
    assert "the same source" in views.diff_html(FIRST, FIRST)


def test_source_is_escaped_and_highlighted_line_by_line():
    stage = replace(FIRST, text='// a < b\n\nint f() { return "<script>"[0] & 1; }\n/* two\nlines */\n')
    markup = views.source_html(stage)
    assert "<script>" not in markup
    assert text_of(markup) == [
        "1// a < b", "2\xa0", '3int f() { return "<script>"[0] & 1; }', "4/* two", "5lines */"
    ]  # fmt: skip
    assert '<span class="kt">int</span>' in markup


def test_indentation_is_kept_by_the_markup_itself():
    """Styles and bare spaces get lost where a page is exported or shown by others; <pre> does not."""
    for markup in (views.source_html(FIRST), views.diff_html(FIRST, SECOND)):
        assert re.search(r"<pre>    <span|<pre>    \w", markup)


SASS = """
        Function : first_kernel
    .headerflags    @"EF_CUDA_TEXMODE_UNIFIED"
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0020*/                   LDG.E.64 R8, [R2.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0040*/              @UP1 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   STL [R1+0x4], R3 ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        Function : second_kernel
        /*0000*/                   LDS.128 R4, [R5] ;
        /*0010*/                   EXIT ;
"""


def test_instructions_are_counted_by_family():
    table = views.sass_summary(SASS).set_index("kernel")
    assert list(table.columns) == ["HGMMA", "HMMA", "LDG.128", "LDG", "LDS", "BAR", "local", "all"]
    assert table.loc["first_kernel"].tolist() == [1, 1, 1, 1, 0, 1, 1, 8]
    assert table.loc["second_kernel"].tolist() == [0, 0, 0, 0, 1, 0, 0, 2]


PTX = """
\t.file\t1 "/some/where/01_stage.cu"
\t.file\t2 "/some/where/cuda.cuh"
\t.loc\t1 12 5
\tld.global.nc.v4.f32 \t{%f1, %f2, %f3, %f4}, [%rd1];
@%p1 bra \t$L__BB0_2;
\tfma.rn.f32 \t%f5, %f1, %f2, %f3;
\tfma.rn.f32 \t%f5, %f1, %f2, %f5;
\t.loc\t2 40 3, function_name $L__info_string0, inlined_at 1 14 9
\tshfl.sync.bfly.b32 \t%r1, %r2, 16, 31, -1;
\t.loc\t1 15 5
\tbar.sync \t0;
@!%p2 st.global.f32 \t[%rd2], %f5;
"""


def test_ptx_is_counted_by_the_line_it_came_from():
    counts = instructions_by_line(PTX, "01_stage.cu")
    assert counts == {
        12: {"global read of 16 bytes": 1, "fma": 2},
        15: {"barrier": 1, "global write": 1},
    }


def test_notes_stand_beside_the_lines_they_are_about():
    stage = OUTER.stage("04")
    lines = stage.code.splitlines()
    rows = text_of(annotated_html(OUTER, stage))
    lines = lines[-len(rows) :]
    assert lines[0].startswith("#include")  # the header is left out
    noted = {number: row for number, row in enumerate(rows) if "bytes shared" in row}
    assert len(noted) == 1 and all("block_per_pair_looped_kernel(" in lines[number] for number in noted)
    barriers = [number for number, line in enumerate(lines) if line.strip() == "__syncthreads();"]
    assert barriers and all("barrier" in rows[number] for number in barriers)
    (summary,) = noted.values()
    assert re.search(r"SASS: \d+ FFMA.* LDS.* of \d+", summary)


def test_instances_of_a_template_share_a_note():
    code = "template <bool kFirst>\n__global__ void __launch_bounds__(32)\n    part_kernel(float* x) {}\n"
    usage = {"kernel": ["part_kernel<false>", "part_kernel<true>"], "registers": [8, 9]}
    resources = pd.DataFrame(usage | {"shared_bytes": 0, "spill_stores": [0, 4]})
    sass = pd.DataFrame({"kernel": usage["kernel"], "FFMA": [5, 0], "LDS": [2, 3], "all": [20, 30]})
    assert kernel_notes(code, resources, sass) == {
        3: "part_kernel<false>: 8 registers, 0 bytes shared, nothing spilled; SASS: 5 FFMA, 2 LDS of 20\n"
        "part_kernel<true>: 9 registers, 0 bytes shared, 4 bytes spilled; SASS: 3 LDS of 30"
    }

"""The HLO reader on texts written by hand, in the spellings that the supported JAX versions print."""

# ruff: noqa: E501  (lines of HLO are as long as XLA prints them)

import pytest

from kvjax.compiled import hlo
from kvjax.compiled.report import CompiledReport, count_kernels, count_loop_kernels

POOL = 4 * 1000 * 8


def report(text):
    module = hlo.parse(text)
    return CompiledReport(0, 0, 0, 0, count_kernels(module, module.entry), {}, module)


def large(text, min_bytes=POOL):
    return [(op.opcode, op.name) for op in report(text).large_ops(min_bytes)]


TEXT = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={(f32[1000,8]{1,0})->f32[1000,8]{1,0}}

FileNames
1 "step.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%region_1.1 (scatter.2: f32[], scatter.3: f32[]) -> f32[] {
  ROOT %scatter.3 = f32[] parameter(1), metadata={op_name="scatter" scheduling_name="scatter.3"}
  %scatter.2 = f32[] parameter(0)
}

%fused_scatter (param_0: f32[1000,8], param_1: s32[4], param_2: f32[4,8]) -> f32[1000,8] {
  %param_0 = f32[1000,8]{1,0} parameter(0)
  %param_1 = s32[4]{0} parameter(1)
  %param_2 = f32[4,8]{1,0} parameter(2)
  %bitcast.4 = s32[4,1]{1,0} bitcast(%param_1)
  ROOT %scatter.5 = f32[1000,8]{1,0} scatter(%param_0, %bitcast.4, %param_2), update_window_dims={1}, to_apply=%region_1.1, metadata={op_name="jit(step)/while/body/sc{at(ter" stack_frame_id=1}
}

%body.2 (arg: (s32[], f32[1000,8], s32[4], f32[4,8], s32[], /*index=5*/s32[])) -> (s32[], f32[1000,8], s32[4], f32[4,8], s32[], /*index=5*/s32[]) {
  %arg = (s32[], f32[1000,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}, s32[], /*index=5*/s32[]) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %pool = f32[1000,8]{1,0} get-tuple-element(%arg), index=1
  %idx = s32[4]{0} get-tuple-element(%arg), index=2
  %new = f32[4,8]{1,0} get-tuple-element(%arg), index=3
  %next = s32[] copy(%i)
  %input_scatter_fusion = f32[1000,8]{1,0} fusion(%pool, %idx, %new), kind=kInput, calls=%fused_scatter, backend_config={"operation_queue_id":"0","reification_cost":[]}
  ROOT %tuple.3 = (s32[], f32[1000,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}, s32[], /*index=5*/s32[]) tuple(%next, %input_scatter_fusion, %idx, %new, %i, /*index=5*/%i)
}

%cond.3 (arg.1: (s32[], f32[1000,8], s32[4], f32[4,8], s32[], /*index=5*/s32[])) -> pred[] {
  %arg.1 = (s32[], f32[1000,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}, s32[], /*index=5*/s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %three = s32[] constant(3)
  ROOT %lt = pred[] compare(%i.1, %three), direction=LT
}

ENTRY %main.9 (p: f32[1000,8], q: s32[4], r: f32[4,8]) -> f32[1000,8] {
  %p = f32[1000,8]{1,0} parameter(0), sharding={replicated}, frontend_attributes={xla.sdy.sharding="#sdy.sharding<@empty_mesh, [{}, {}]>"}
  %q = s32[4]{0} parameter(1)
  %r = f32[4,8]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %copy.1 = s32[] copy(%zero)
  %tuple = (s32[], f32[1000,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}, s32[], /*index=5*/s32[]) tuple(%copy.1, %p, %q, %r, %zero, /*index=5*/%zero)
  %while.5 = (s32[], f32[1000,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}, s32[], /*index=5*/s32[]) while(%tuple), condition=%cond.3, body=%body.2, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = f32[1000,8]{1,0} get-tuple-element(%while.5), index=1
}
"""


def test_computations_instructions_and_calls_are_read():
    module = hlo.parse(TEXT)
    assert module.entry == "main.9"
    assert list(module.computations) == ["region_1.1", "fused_scatter", "body.2", "cond.3", "main.9"]
    loop = module["main.9"].by_name["while.5"]
    assert loop.called == (("condition", "cond.3"), ("body", "body.2"))
    assert [str(a) for a in loop.results] == ["s32[]", "f32[1000,8]", "s32[4]", "f32[4,8]", "s32[]", "s32[]"]
    assert module["body.2"].root.operands == ("next", "input_scatter_fusion", "idx", "new", "i", "i")
    scatter = module["fused_scatter"].root
    assert (scatter.opcode, scatter.operands) == ("scatter", ("param_0", "bitcast.4", "param_2"))
    assert scatter.callees() == ("region_1.1",)  # and nothing out of the quoted op_name


def test_kernels_are_counted_outside_and_inside_loops():
    module = hlo.parse(TEXT)
    assert count_kernels(module, "main.9") == 1  # the copy of the counter
    assert count_kernels(module, "body.2") == 2
    assert count_kernels(module, "cond.3") == 1
    assert count_loop_kernels(module) == {"body.2": 3}


def test_an_in_place_scatter_in_a_loop_is_not_large():
    assert large(TEXT) == []


def test_a_copy_in_a_loop_body_is_large():
    text = TEXT.replace("fusion(%pool,", "fusion(%copied,").replace(
        "  %idx = s32", "  %copied = f32[1000,8]{1,0} copy(%pool)\n  %idx = s32", 1
    )
    assert large(text) == [("copy", "copied")]
    assert large(text, POOL + 1) == []


def test_names_may_come_without_percent_and_operands_with_their_shapes():
    text = """\
HloModule m

ENTRY main.4 (p.1: f32[1000,8]) -> f32[1000,8] {
  p.1 = f32[1000,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT t.2 = f32[8,1000]{1,0:T(8,128)S(1)} transpose(f32[1000,8]{1,0:T(8,128)(2,1)} p.1), dimensions={1,0}
}
"""
    assert hlo.parse(text)["main.4"].root.operands == ("p.1",)
    assert large(text) == [("transpose", "t.2")]


def fusion_of(*lines):
    body = "\n  ".join(lines)
    return f"""\
HloModule m, is_scheduled=true

%add.1 (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.2 = f32[] add(%a, %b)
}}

%fused (pool: f32[1000,8], idx: s32[4,1], new: f32[4,8]) -> f32[1000,8] {{
  %pool = f32[1000,8]{{1,0}} parameter(0)
  %idx = s32[4,1]{{1,0}} parameter(1)
  %new = f32[4,8]{{1,0}} parameter(2)
  {body}
}}

ENTRY %main (p: f32[1000,8], q: s32[4,1], r: f32[4,8]) -> f32[1000,8] {{
  %p = f32[1000,8]{{1,0}} parameter(0)
  %q = s32[4,1]{{1,0}} parameter(1)
  %r = f32[4,8]{{1,0}} parameter(2)
  ROOT %f = f32[1000,8]{{1,0}} fusion(%p, %q, %r), kind=kLoop, calls=%fused
}}
"""


def test_a_convert_fused_under_an_in_place_scatter_is_large():
    text = fusion_of(
        "%narrow = bf16[1000,8]{1,0} convert(%pool)",
        "%wide = f32[1000,8]{1,0} convert(%narrow)",
        "ROOT %s = f32[1000,8]{1,0} scatter(%wide, %idx, %new), to_apply=%add.1",
    )
    assert large(text) == [("convert", "wide")]
    assert sorted(large(text, POOL // 2)) == [("convert", "narrow"), ("convert", "wide")]


def test_a_select_fused_over_a_dynamic_update_slice_is_large():
    text = fusion_of(
        "%zero = s32[] constant(0)",
        "%flag = pred[] constant(true)",
        "%flags = pred[1000,8]{1,0} broadcast(%flag), dimensions={}",
        "%dus = f32[1000,8]{1,0} dynamic-update-slice(%pool, %new, %zero, %zero)",
        "ROOT %sel = f32[1000,8]{1,0} select(%flags, %dus, %pool)",
    )
    assert large(text) == [("select", "sel")]
    assert ("broadcast", "flags") in large(text, 1000 * 8)


def test_what_a_gather_picks_from_inside_a_fusion_is_not_materialised():
    lines = (
        "%wide = f64[1000,8]{1,0} convert(%pool)",
        "%rows = f64[4,8]{1,0} gather(%wide, %idx), offset_dims={1}, slice_sizes={1,8}",
        "ROOT %back = f32[4,8]{1,0} convert(%rows)",
    )
    assert large(fusion_of(*lines)) == []
    assert large(fusion_of(lines[0], lines[1].replace("gather", "custom"), lines[2])) == [("convert", "wide")]


def test_a_reduction_is_as_large_as_what_it_reads():
    text = fusion_of(
        "%zero = f32[] constant(0)",
        "%sum = f32[8]{0} reduce(%pool, %zero), dimensions={0}, to_apply=%add.1",
        "ROOT %back = f32[4,8]{1,0} broadcast(%sum), dimensions={1}",
    )
    assert large(text) == [("reduce", "sum")]


def test_outside_a_fusion_everything_is_materialised():
    text = """\
HloModule m

ENTRY %main (p: bf16[1000,8], q: s32[4,1]) -> f32[4,8] {
  %p = bf16[1000,8]{1,0} parameter(0)
  %q = s32[4,1]{1,0} parameter(1)
  %wide = f32[1000,8]{1,0} convert(%p)
  ROOT %rows = f32[4,8]{1,0} gather(%wide, %q), offset_dims={1}, slice_sizes={1,8}
}
"""
    assert large(text) == [("convert", "wide")]


def test_async_copies_calls_branches_and_custom_calls():
    text = """\
HloModule m

%inside (x: f32[1000,8]) -> f32[1000,8] {
  %x = f32[1000,8]{1,0} parameter(0)
  ROOT %neg = f32[1000,8]{1,0} negate(%x)
}, execution_thread="main"

%keep (y: f32[1000,8]) -> f32[1000,8] {
  ROOT %y = f32[1000,8]{1,0} parameter(0)
}

%slice_comp (z: f32[2000,8]) -> f32[1000,8] {
  %z = f32[2000,8]{1,0} parameter(0)
  ROOT %ds = f32[1000,8]{1,0} slice(%z), slice={[0:1000], [0:8]}
}

ENTRY %main (p: f32[1000,8], n: s32[], w: f32[2000,8]) -> (f32[1000,8], f32[4]) {
  %p = f32[1000,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %w = f32[2000,8]{1,0} parameter(2)
  %copy-start = (f32[1000,8]{1,0}, f32[1000,8]{1,0}, u32[]) copy-start(%p)
  %copy-done = f32[1000,8]{1,0} copy-done(%copy-start)
  %called = f32[1000,8]{1,0} call(%copy-done), to_apply=%inside
  %picked = f32[1000,8]{1,0} conditional(%n, %called, %p), branch_computations={%inside, %keep}
  %slice-start = ((f32[2000,8]{1,0}), f32[1000,8]{1,0}, s32[]) async-start(%w), calls=%slice_comp
  %slice-done = f32[1000,8]{1,0} async-done(%slice-start)
  %kernel = (f32[1000,8]{1,0}, f32[4]{0}) custom-call(%picked, %p), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (0, {})}, backend_config={name = "k\\"{(", grid_x = 1}
  %fresh = f32[1000,8]{1,0} custom-call(%p), custom_call_target="other"
  %whole = f32[1000,8]{1,0} custom-call(%fresh), custom_call_target="other", output_to_operand_aliasing={{}: (0, {})}
  %first = f32[1000,8]{1,0} get-tuple-element(%kernel), index=0
  %second = f32[4]{0} get-tuple-element(%kernel), index=1
  ROOT %t = (f32[1000,8]{1,0}, f32[4]{0}) tuple(%first, %second)
}
"""
    # the copy once (its start), `neg` once although two instructions call it, the async slice, the unaliased call
    assert large(text) == [
        ("copy-start", "copy-start"),
        ("negate", "neg"),
        ("slice", "ds"),
        ("custom-call", "fresh"),
    ]
    # copy-start, the call's negate, the longer branch's negate, the async slice, three custom calls
    assert report(text).kernels == 7


def test_bytes_follow_the_width_of_the_type():
    widths = {"pred": 1, "s8": 1, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1, "c64": 8, "u32": 4, "s4": 0.5, "token": 0}
    assert {d: hlo.Array(d, (6,)).nbytes for d in widths} == {d: 6 * w for d, w in widths.items()}
    assert hlo.Array("f32", ()).nbytes == 4


def test_a_constant_over_several_lines_is_one_instruction():
    text = """\
ENTRY %main () -> s32[2,2] {
  ROOT %c = s32[2,2]{1,0} constant({
    { 1, 2 },
    { 3, 4 }
  })
}
"""
    (constant,) = hlo.parse(text)["main"].instructions
    assert (constant.opcode, constant.is_root, constant.called) == ("constant", True, ())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no ENTRY"),
        ("HloModule m\n\n%f (a: s32[]) -> s32[] {\n  ROOT %a = s32[] parameter(0)\n}\n", "no ENTRY"),
        ("ENTRY %m (a: s32[]) -> s32[] {\n  ROOT %a = s32[] parameter(0)\n", "m does not end"),
        ("ENTRY %m (a: s32[]) -> s32[] {\n  what is this\n}\n", "not an HLO instruction: 'what is this'"),
        ("ENTRY %m (a: s32[]) -> s32[] {\n  ROOT %a = s32[] \n}\n", "no opcode"),
    ],
)
def test_text_that_is_not_hlo_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        hlo.parse(text)


def test_min_bytes_must_be_positive():
    with pytest.raises(ValueError, match="min_bytes must be at least 1"):
        report(TEXT).large_ops(0)

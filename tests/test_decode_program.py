"""What benchmarks.decode_program reads off the text of a compiled program."""

import dataclasses

import jax
import pytest

from benchmarks.decode_program import MODELS, Kernel, code_of, loop_turn, traced

HLO = """HloModule jit_f, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused_add (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.9 = f32[4]{0} add(%p, %p)
}

%short.2 (arg: (s32[])) -> (s32[]) {
  %arg = (s32[]) parameter(0)
  ROOT %tuple.1 = (s32[]) tuple(%arg)
}

%c.1 (arg.2: (s32[])) -> pred[] {
  %arg.2 = (s32[]) parameter(0)
  ROOT %constant.1 = pred[] constant(false)
}

%c.2 (arg.3: (s32[], f32[4])) -> pred[] {
  %arg.3 = (s32[], f32[4]{0}) parameter(0)
  ROOT %compare = pred[] fusion(%arg.3), kind=kLoop, metadata={op_name="jit(<lambda>)/while/cond/gt"}
}

%region_1.7 (arg.1: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg.1 = (s32[], /*index=1*/f32[4]{0}) parameter(0)
  %get-tuple-element.3 = f32[4]{0} get-tuple-element(%arg.1), index=1
  %loop_add = f32[4]{0} fusion(%get-tuple-element.3), kind=kLoop, metadata={op_name="jit(<lambda>)/while/add"}
  %map.5 = (bf16[8,32]{1,0}, bf16[2]) custom-call(%loop_add), metadata={op_name="while/nvfp4_decode_matmul/mpmd_map"}
  %c.6 = f32[4]{0} copy(%loop_add)
  ROOT %tuple.4 = (s32[], f32[4]{0}) tuple(%get-tuple-element.3, %c.6)
}

ENTRY %main.1 (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %while.0 = (s32[]) while(%x), condition=%c.1, body=%short.2
  ROOT %while.1 = (s32[], f32[4]{0}) while(%x), condition=%c.2, body=%region_1.7
}
"""


def test_the_launches_of_the_longest_loop():
    assert loop_turn(HLO) == [
        Kernel("fusion", "add", 16),
        Kernel("custom-call", "nvfp4_decode_matmul", 8 * 32 * 2 + 4),
        Kernel("copy", "?", 16),
        Kernel("fusion", "gt", 1),
    ]


def test_what_mosaics_dumps_say(tmp_path):
    (tmp_path / "block_0.ptx").write_text("\n".join([
        ".version 9.5", ".entry k(", "\t.param .u64 a", ")", "{", "\t.reg .b32 \t%r<3>;", "\tmov.u32 \t%r1, %tid.x;",
        "$L__BB0_1:", "\t// begin inline asm", "add.u32 %r2, %r1, 1;", "\t@%p1 bra \t$L__BB0_1;", "\tret;", "}",
    ]))  # fmt: skip
    (tmp_path / "block_0.ptxas").write_text(
        "ptxas warning : Registers are spilled, 20 bytes spill stores, 36 bytes spill loads\n"
        "    24 bytes stack frame, 20 bytes spill stores, 36 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 3 barriers\n"
    )
    told = {"kernel": "block", "registers": 128, "spilled_bytes": [20, 36], "ptx_instructions": 4}
    assert code_of(tmp_path) == [told]
    (tmp_path / "block_0.sass_ctrl").write_text(
        ".text.block:\n"
        "   -:-:-:Y:03        /*0580*/              @!P6 LDGSTS.E.BYPASS.128 [R3+0x200], desc[UR4][R16.64] \n"
        "   -:-:-:Y:03        /*12c0*/               @P1 LDGSTS.E.BYPASS.128 [R6+UR8+0x12d80], desc[UR9][R8.64] \n"
        "   -:-:-:Y:01        /*12d0*/                   LDS.128 R4, [R6+UR8+0x100] \n"
    )
    assert code_of(tmp_path) == [told | {"sass_instructions": 3, "illegal_copies": 1}]


@pytest.mark.parametrize("queued", [False, True])
def test_a_step_is_traced_with_hoppers_kernels_on_a_machine_without_a_gpu(queued):
    config = dataclasses.replace(MODELS["qwen2.5-1.5b"], num_hidden_layers=1)
    program = traced(config, 8, 32, 16, 8, queued, 90, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert "decode_attention" in program.lower(lowering_platforms=("cuda",)).as_text()

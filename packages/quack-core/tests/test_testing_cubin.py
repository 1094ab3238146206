"""The readers of cubins, SASS and PTX, on kernels whose faults are known; no GPU needed."""

import functools
import subprocess
import sys

import pytest

pytest.importorskip("cutlass")

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import CopyUniversalOp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from quack_core.testing import cubin, ptx

N = 4096
THREADS = 128


class CopyRows:
    """Copies rows of N elements, one row per CTA, in accesses of `bits`."""

    def __init__(self, bits: int, wide_index: bool) -> None:
        self.bits, self.wide_index = bits, wide_index

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        self.kernel(x, y).launch(grid=[x.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        if const_expr(self.wide_index):
            row = Int64(row)
        vec = const_expr(self.bits // x.element_type.width)
        atom = cute.make_copy_atom(CopyUniversalOp(), x.element_type, num_bits_per_copy=self.bits)
        threads, values = cute.make_layout(THREADS), cute.make_layout(vec)
        mine = cute.make_tiled_copy_tv(atom, threads, values).get_slice(tid)
        tXgX = mine.partition_S(x[row, None])  # ((vec, 1), passes)
        tYgY = mine.partition_D(y[row, None])  # ((vec, 1), passes)
        tXrX = cute.make_rmem_tensor_like(tXgX)
        cute.copy(atom, tXgX, tXrX)
        cute.copy(atom, tXrX, tYgY)


class Spill:
    """Adds to registers at an index known only when it runs, which puts them in local memory."""

    @cute.jit
    def __call__(self, x: cute.Tensor, at: Int32, stream: cuda.CUstream):
        self.kernel(x, at).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, at: Int32):
        tid, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(cute.make_layout(64), Float32)
        values.fill(0.0)
        for i in cutlass.range(at):
            values[(i * 7) & 63] += x[tid, i & 63]
        for i in cutlass.range(64, unroll_full=True):
            x[tid, i] = values[i]


def artifacts(kernel, args, folder):
    options = f"--enable-tvm-ffi --gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {folder}"
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *args, stream, options=options).artifacts


@pytest.fixture(scope="module")
def copy_rows(tmp_path_factory):
    """Compiles CopyRows; strides are "compact", "sym_int64" or "sym_int32"."""

    @functools.cache
    def build(bits: int = 128, wide_index: bool = True, stride: str = "compact"):
        shape = (cute.sym_int(), N)
        if stride == "compact":
            x, y = (
                make_fake_compact_tensor(
                    cutlass.BFloat16, shape, stride_order=(1, 0), assumed_align=16
                )
                for _ in range(2)
            )
        else:
            symbol = getattr(cute, stride)
            x, y = (
                make_fake_tensor(
                    cutlass.BFloat16, shape, (symbol(divisibility=8), 1), assumed_align=16
                )
                for _ in range(2)
            )
        return artifacts(CopyRows(bits, wide_index), (x, y), tmp_path_factory.mktemp("dump"))

    return build


@pytest.fixture(scope="module")
def spill(tmp_path_factory):
    x = make_fake_compact_tensor(Float32, (THREADS, 64), stride_order=(1, 0), assumed_align=16)
    return artifacts(Spill(), (x, Int32(0)), tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("bits", [16, 32, 64, 128])
def test_widths_of_global_accesses(copy_rows, bits):
    kernel = copy_rows(bits)
    passes = N * 16 // bits // THREADS
    for text in (None, kernel.PTX):
        facts = cubin.static_facts(kernel.CUBIN, text)
        assert facts.load_bits == facts.store_bits == {bits}
        assert facts.accesses == {"LDG": {bits: passes}, "STG": {bits: passes}}
        assert not facts.spills and not facts.exchanges


def test_local_memory_is_found(spill):
    for text in (None, spill.PTX):
        facts = cubin.static_facts(spill.CUBIN, text)
        assert facts.spills
        assert facts.usage.frame_bytes >= 64 * 4
    facts = cubin.static_facts(spill.CUBIN)
    assert facts.accesses["STL"] and facts.accesses["LDL"]


def test_accesses_of_ptx():
    text = """
        ld.param.b64 %rd1, [kernel_param_0];
        @%p3 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];
        ld.global.nc.L1::evict_last.v2.b64 {%rd2, %rd3}, [%rd1+16];
        { ld.global.b16 %rs1, [%rd1]; }
        ld.relaxed.gpu.global.b32 %r5, [%rd1];
        st.global.v2.b32 [%rd1], {%r1, %r2};
        ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r9];
        st.shared.b8 [%r9], %rs1;
        ld.local.b32 %r1, [%rd9];
        cp.async.cg.shared.global [%r1], [%rd1], 16;
        cp.async.ca.shared.global.L2::128B [%r1], [%rd1], 4;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], %r2, [%r3];
        cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];
        atom.global.add.u32 %r1, [%rd1], 1;
    """
    assert ptx.accesses(text) == {
        "LDG": {128: 2, 16: 1, 32: 1},
        "STG": {64: 1},
        "LDS": {128: 1},
        "STS": {8: 1},
        "LDL": {32: 1},
        "LDGSTS": {128: 1, 32: 1},
        "UBLKCP.S.G": {128: 1},
        "STAS": {32: 1},
    }


def test_usage(copy_rows):
    (usage,) = cubin.resource_usage(copy_rows(128).CUBIN).values()
    assert usage.frame_bytes == usage.static_smem_bytes == 0
    # 32 bytes of data per vector, and addresses
    assert 4 * (N // THREADS // 8) <= usage.registers <= 255


@pytest.mark.parametrize(
    "registers, threads, taken",
    [(32, 128, 4096), (33, 128, 5120), (255, 256, 65536), (40, 33, 2560)],
)
def test_registers_are_taken_by_warps_in_blocks(registers, threads, taken):
    assert cubin.Usage(registers=registers).registers_per_cta(threads) == taken


def test_not_a_cubin():
    with pytest.raises(ValueError, match="not a cubin"):
        cubin.resource_usage(b"PTX")


def test_missing_disassembler_names_the_package(monkeypatch):
    monkeypatch.setattr(cubin, "nvdisasm", lambda: None)
    with pytest.raises(RuntimeError, match="install the package nvidia-cuda-nvdisasm"):
        cubin.sass(b"\x7fELF")


def test_unreadable_cubin_names_the_package():
    with pytest.raises(RuntimeError, match="nvidia-cuda-nvdisasm>=13.4"):
        cubin.sass(b"\x7fELF broken")


def test_accesses_of_sass():
    text = """
        /*0000*/ LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0010*/ @P0 LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0020*/ LDG.E.ENL2.256 R4, R8, desc[UR4][R2.64] ;
        /*0030*/ LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0040*/ STG.E desc[UR4][R2.64], R5 ;
        /*0050*/ LDS.S8 R0, [R1] ;
        /*0060*/ LDL.64 R0, [R1] ;
        /*0070*/ STAS [R2.64], R5 ;
        /*0080*/ UBLKCP.S.G [UR10], [UR6], UR13 ;
        /*0090*/ UBLKCP.G.S [UR10], [UR6], UR13 ;
    """
    assert cubin.accesses(text) == {
        "LDG": {128: 1, 16: 1, 256: 1},
        "LDGSTS": {128: 1},
        "STG": {32: 1},
        "LDS": {8: 1},
        "LDL": {64: 1},
        "UBLKCP.S.G": {128: 1},
    }
    assert cubin.has(text, "STAS") and not cubin.has(text, "STG.E.128")
    assert not cubin.has("LDGSTSX", "LDGSTS")


@pytest.mark.parametrize(
    "stride, wide_index, found",
    [
        ("compact", False, "shl.b32"),
        ("compact", True, None),
        ("sym_int32", False, None),  # a slice is multiplied wide; an element x[row, i] is not
        ("sym_int64", False, None),
        ("sym_int64", True, None),
    ],
)
def test_offsets_that_wrap(copy_rows, stride, wide_index, found):
    wrapping = ptx.wrapping_offsets(copy_rows(128, wide_index, stride).PTX, N)
    if found is None:
        assert wrapping == []
    else:
        assert wrapping and all(found in text for text in wrapping)


def test_rows_of_a_cta_are_no_offset():
    rows = "mov.u32 %r1, %ctaid.x;\n shl.b32 %r2, %r1, 6;\n"
    offset = "mul.lo.s32 %r3, %r2, 64;\n"
    access = "cvt.s64.s32 %rd1, {};\n add.s64 %rd2, %rd1, %rd9;\n ld.global.b32 %r9, [%rd2];\n"
    right, wrong = rows + access.format("%r2"), rows + offset + access.format("%r3")
    assert ptx.wrapping_offsets(right, 64, rows_per_cta=64) == []
    assert ptx.wrapping_offsets(wrong, 64, rows_per_cta=64) == ["mul.lo.s32 %r3, %r2, 64"]


HEAD = """
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    ld.param.b64 %rd1, [p];
"""

SNIPPETS = {
    "rows of a CTA": ("shl.b32 %r3, %r1, 4;\n mul.wide.s32 %rd2, %r3, 8192;", None),
    "thread": ("shl.b32 %r3, %r2, 14;\n cvt.u64.u32 %rd2, %r3;", None),
    "rank": ("and.b32 %r4, %r1, 3;\n shl.b32 %r3, %r4, 14;\n cvt.s64.s32 %rd2, %r3;", None),
    "rank cut out last": (
        "shl.b32 %r4, %r1, 14;\n and.b32 %r3, %r4, 49152;\n cvt.s64.s32 %rd2, %r3;",
        None,
    ),
    "remainder": (
        (
            "div.s32 %r4, %r1, %r9;\n mul.lo.s32 %r5, %r4, %r9;\n sub.s32 %r6, %r1, %r5;\n"
            "mul.wide.s32 %rd2, %r6, 8192;"
        ),
        None,
    ),
    "remainder of a constant": (
        (
            "mul.hi.u32 %r4, %r1, -1840700269;\n shr.u32 %r5, %r4, 2;\n mul.lo.s32 %r6, %r5, 7;\n"
            "sub.s32 %r3, %r1, %r6;\n mul.lo.s32 %r7, %r3, 2048;\n cvt.u64.u32 %rd2, %r7;"
        ),
        None,
    ),
    "quotient of a constant": (
        (
            "mul.hi.u32 %r4, %r1, -1840700269;\n shr.u32 %r5, %r4, 2;\n mul.lo.s32 %r6, %r5, 4096;\n"
            "cvt.u64.u32 %rd2, %r6;"
        ),
        "mul.lo.s32 %r6, %r5, 4096",
    ),
    "quotient of a constant times another": (  # by 7, times 8
        (
            "mul.hi.u32 %r4, %r1, -1840700269;\n shr.u32 %r5, %r4, 2;\n mul.lo.s32 %r6, %r5, 8;\n"
            "sub.s32 %r3, %r1, %r6;\n mul.lo.s32 %r7, %r3, 2048;\n cvt.u64.u32 %rd2, %r7;"
        ),
        "mul.lo.s32 %r7, %r3, 2048",
    ),
    "shift": ("shl.b32 %r3, %r1, 12;\n cvt.u64.u32 %rd2, %r3;", "shl.b32 %r3, %r1, 12"),
    "in two steps": (
        "shl.b32 %r3, %r1, 4;\n mul.lo.s32 %r4, %r3, 4096;\n cvt.u64.u32 %rd2, %r4;",
        "mul.lo.s32 %r4, %r3, 4096",
    ),
    "dynamic stride": (
        "mad.lo.s32 %r3, %r9, %r1, %r2;\n cvt.s64.s32 %rd2, %r3;",
        "mad.lo.s32 %r3, %r9, %r1, %r2",
    ),
    "drawn": (
        (
            "atom.relaxed.gpu.global.add.s32 %r3, [%rd1], 1;\n"
            "shl.b32 %r4, %r3, 12;\n cvt.u64.u32 %rd2, %r4;"
        ),
        "shl.b32 %r4, %r3, 12",
    ),
    "sent by another thread": (
        "ld.shared.b32 %r3, [%r7];\n shl.b32 %r4, %r3, 12;\n cvt.u64.u32 %rd2, %r4;",
        "shl.b32 %r4, %r3, 12",
    ),
    "data": ("ld.shared.b32 %r3, [%r7];\n shl.b32 %r4, %r3, 16;\n mov.b64 %rd2, 0;", None),
    "carried by a loop": (
        (
            "$L1:\n shl.b32 %r4, %r3, 12;\n mov.b32 %r3, %r5;\n add.s32 %r5, %r1, 1;\n"
            "cvt.u64.u32 %rd2, %r4;"
        ),
        "shl.b32 %r4, %r3, 12",
    ),
}


@pytest.mark.parametrize("name", SNIPPETS)
@pytest.mark.parametrize(
    "access",
    ["ld.global.b32 %r20, [%rd3+16];", "@%p1 st.global.v2.b32 [%rd3], {%r20, %r21};"]
    + ["cp.async.cg.shared.global [%r22], [%rd3], 16;"],
)
def test_offsets_in_snippets(name, access):
    body, found = SNIPPETS[name]
    text = f"{HEAD} {body}\n add.s64 %rd3, %rd1, %rd2;\n {access}\n"
    assert ptx.wrapping_offsets(text, 4096) == ([found] if found else [])


def test_reading_needs_neither_torch_nor_the_dsl():
    code = (
        "import sys, quack_core.testing.cubin, quack_core.testing.ptx, "
        "quack_core.testing.fake_cuda, quack_core.testing.records\n"
        "sys.exit(sorted({'torch', 'cutlass', 'tvm_ffi'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Sources that look like exllamav3's where the patch looks, and a wheel of them."""

import hashlib
import zipfile
from pathlib import Path

FOLDER = "exllamav3/exllamav3_ext"

TARGET_AVX2 = """\
#include "avx2_target.h"

bool is_avx2_supported()
{
    return __builtin_cpu_supports("avx2");
}
bool is_f16c_supported()
{
    return __builtin_cpu_supports("f16c");
}"""

TARGET_AVX512 = """\
#include "avx512_target.h"

bool is_avx512_supported()
{
    return __builtin_cpu_supports("avx512f");
}
"""

REDUCE_AVX2 = """\
#include <immintrin.h>
#include "all_reduce_cpu_avx2.h"

static void slice_worker(int idx)
{
    _mm_pause();
}

void cpu_reduce_parallel
(
    void (*fn3)(uint16_t*, const uint16_t*, size_t),
    uint16_t* dst,
    int threads
)
{
    if (threads) fn3(dst, dst, 0);
}

AVX2_TARGET
inline void do16(uint16_t* __restrict ap)
{
    _mm256_storeu_si256((__m256i*)ap, _mm256_setzero_si256());
}

void enable_fast_fp()
{
    enable_fast_fp_avx2();
}

AVX2_TARGET
void enable_fast_fp_avx2()
{
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
}

void perform_cpu_reduce
(
    PGContext* ctx,
    size_t data_size
)
{
    perform_cpu_reduce_avx2(ctx, data_size);
}

AVX2_F16C_TARGET
void perform_cpu_reduce_avx2
(
    PGContext* ctx,
    size_t data_size
)
{
    _mm_pause();
}
"""


def functions(names: dict[str, str]) -> str:
    """Return definitions of functions, by name with what stands in their parentheses."""
    return "".join(
        f"\nvoid {name}({inside})\n{{\n    _mm_pause();\n}}\n" for name, inside in names.items()
    )


REDUCE_AVX512 = '#include <immintrin.h>\n#include "all_reduce_cpu_avx512.h"\n' + functions(
    {
        "bf16_add_inplace_avx512": "uint16_t* __restrict a, size_t count",
        "bf16_add_twosrc_avx512": "uint16_t* __restrict dst, size_t count",
        "fp16_add_inplace_avx512": "uint16_t* __restrict a, size_t count",
        "fp16_add_twosrc_avx512": "uint16_t* __restrict dst, size_t count",
        "enable_fast_fp_avx512": "",
        "perform_cpu_reduce_avx512": "PGContext* ctx",
    }
)

EXPERTS = """\
#include "moe_mul1.h"
#include <immintrin.h>

namespace {
void run_tiles(int m)
{
    _mm_pause();
}
}

bool exl3_moe_cpu_has_avx2() { return true; }
bool exl3_moe_cpu_has_avx512_vnni() { return true; }
bool exl3_moe_cpu_has_avx512_vbmi() { return true; }

int64_t exl3_moe_cpu_make_layer
(
    const std::vector<at::Tensor>& gate,
    int64_t swizzled
)
{
    return 1;
}
""" + functions(
    {
        "exl3_moe_cpu_set_prof": "bool enabled",
        "exl3_moe_cpu_stage_experts": "int64_t handle, int count",
        "exl3_moe_cpu_free_layer": "int64_t handle",
        "exl3_moe_cpu_forward_raw": "int64_t handle, const at::Half* x",
        "exl3_moe_cpu_forward": "int64_t handle, at::Tensor& out",
    }
)


def pause(indent: str) -> str:
    """Return the block with the pause as both loops have it, indented."""
    lines = (
        "#ifdef __linux__",
        "    __builtin_ia32_pause();",
        "#else",
        "    _mm_pause();",
        "#endif",
    )
    return "".join(f"{indent}{line}\n" for line in lines)


REDUCE_CU = f"#include <thread>\nvoid run_cpu_reduce_jobs()\n{{\n{pause('        ')}}}\n"
HANDOFF_CU = (
    "#include <thread>\ninline void cpu_pause_()\n{\n"
    "#ifdef __linux__\n    __builtin_ia32_pause();\n#else\n    _mm_pause();\n#endif\n}\n"
)

X86 = {
    "avx2_target.cpp": TARGET_AVX2,
    "avx512_target.cpp": TARGET_AVX512,
    "parallel/all_reduce_cpu_avx2.cpp": REDUCE_AVX2,
    "parallel/all_reduce_cpu_avx512.cpp": REDUCE_AVX512,
    "cpu/moe_mul1.cpp": EXPERTS,
    "parallel/all_reduce_cpu.cu": REDUCE_CU,
    "cpu/moe_handoff.cu": HANDOFF_CU,
}
"""The files with x86 code, by their place in the extension's folder."""

OTHERS = {
    "bindings.cpp": "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n",
    "helper.c": "int helper;\n",
    "quant/exl3_moe.cu": "void exl3_moe() {}\n",
    "quant/exl3_moe.cuh": "void exl3_moe();\n",
}


def write_wheel(path: Path, changes: dict[str, str] | None = None) -> str:
    """Write a wheel of such sources, some of them changed; return its SHA-256."""
    files = {
        f"{FOLDER}/{name}": text for name, text in {**X86, **OTHERS, **(changes or {})}.items()
    }
    files["exllamav3/ext.py"] = "import exllamav3_ext\n"
    files["exllamav3-1.4.5.dist-info/METADATA"] = "Name: exllamav3\nVersion: 1.4.5\n"
    files["exllamav3-1.4.5.dist-info/LICENSE"] = "MIT License\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return hashlib.sha256(path.read_bytes()).hexdigest()

"""The patched code on a CUDA device: Triton's kernel of the real wheel, and the merge.

Errors are relative: the norm of the difference over the norm of the reference, which is computed in
double precision. FlashInfer's own kernel needs a GB10; here stands for it what it computes.

    python tests/gpu/test_patch_kernels.py      runs without pytest and prints one JSON object

See README.md for what a machine without a network has to be given.
"""

import functools
import importlib
import json
import platform
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]
for place in (REPO, REPO / "files/opt/dsv4/lib"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import torch  # noqa: E402

from tests.sources import patched, wheels  # noqa: E402
from tests.sources.reference import (  # noqa: E402
    GROUPS,
    HEAD,
    HEADS,
    NOPE,
    RANK,
    ROPE,
    Attention,
    Kernel,
    Segment,
    cos_sin,
    distance,
    prefill,
    projection,
    rotated,
)
from tests.sources.stand_ins import load, stand_ins  # noqa: E402

WITH_DEFECT = ("0.28.0", "0.29.0")
TOKENS = (0, 1, 3, 17, 1000, 4097)
BF16 = 2**-8
EXACT = 3e-7

MEASURED: dict[str, Any] = {}
"""What the tests measured, by name."""


def record(name: str, value: float) -> float:
    """Note a figure for the report and give it back."""
    MEASURED[name] = value
    return value


@functools.cache
def helpers(release: str) -> types.ModuleType:
    """Return the wheel's module with the rotation's kernel, compiled by the Triton that is here."""
    triton = importlib.import_module("triton")
    language = importlib.import_module("triton.language")
    real = patched.real("vllm.triton_utils", tl=language, triton=triton)
    file = patched.kept(release, wheels.HELPERS)
    return load(wheels.HELPERS, wheels.text(release, wheels.HELPERS), real, file)


def o_proj_inputs(tokens: int, padded: int) -> tuple[torch.Tensor, ...]:
    """Return o, positions, table and weight; `padded` heads lie between one token and the next."""
    generator = torch.Generator().manual_seed(tokens)
    storage = torch.randn(tokens, HEADS + padded, HEAD, generator=generator).bfloat16().cuda()
    table = cos_sin(70_000, generator).cuda()
    positions = torch.randint(0, 70_000, (tokens,), generator=generator).cuda()
    weight = torch.randn(GROUPS * RANK, HEADS // GROUPS * HEAD, generator=generator) / 64
    return storage[:, :HEADS], positions, table, weight.bfloat16().cuda()


def test_the_wheels_rotation() -> None:
    """The kernel that the patched path calls is the inverse rotation, to BF16, for any number of
    tokens and with padded heads in between; the lanes that are not rotated are not touched."""
    for release in WITH_DEFECT:
        for tokens in TOKENS:
            for padded in (0, 64):
                o, positions, table, _ = o_proj_inputs(tokens, padded)
                found = helpers(release).__dict__["_fused_inverse_rope_gptj"](
                    o, positions, table, ROPE
                )
                assert (found.shape, found.dtype) == (o.shape, torch.bfloat16)
                assert torch.equal(found[..., :NOPE], o[..., :NOPE])
                wanted = rotated(o, positions, table, -1)[..., NOPE:]
                error = record(
                    f"rotation {release} T={tokens} padded={padded}",
                    distance(found[..., NOPE:], wanted),
                )
                assert error < BF16


def test_the_patched_output_projection() -> None:
    """The patched function with the wheel's kernel and the device's matrix product."""
    for release in WITH_DEFECT:
        module = patched.module(release, wheels.O_PROJ, "o_proj_bf16")
        name = wheels.HELPERS.removesuffix(".py").replace("/", ".")
        for tokens in TOKENS:
            inputs = o_proj_inputs(tokens, 64)
            with stand_ins({name: helpers(release)}):
                found = module.deep_gemm_fp8_o_proj(
                    *inputs[:3],
                    types.SimpleNamespace(weight=inputs[3]),
                    lambda z: z,
                    n_groups=GROUPS,
                    heads_per_group=HEADS // GROUPS,
                    nope_dim=NOPE,
                    rope_dim=ROPE,
                    o_lora_rank=RANK,
                    einsum_recipe=(1, 1, 128),
                    tma_aligned_scales=True,
                )
            assert (found.shape, found.dtype) == ((tokens, GROUPS * RANK), torch.bfloat16)
            wanted = projection(*inputs).flatten(1)
            error = record(f"o_proj {release} T={tokens}", distance(found, wanted))
            assert error < BF16


def on_device(inputs: Attention) -> Attention:
    """Move every tensor to the device."""
    moved = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in vars(inputs).items()
    }
    return Attention(**moved)


def ask_slices(module: types.ModuleType, inputs: Attention, run: Any) -> torch.Tensor:
    """Call the injected function as the patched call site does."""
    answer = module.__dict__["_sparse_mla_in_slices"](
        run,
        Segment,
        query=inputs.query.unsqueeze(1),
        kv_cache=inputs.keys,
        workspace_buffer=None,
        sparse_mla_segments=[
            Segment(inputs.window.unsqueeze(1), inputs.lengths),
            Segment(inputs.extra.unsqueeze(1), inputs.extra_lengths, inputs.more),
        ],
        out=None,
        sm_scale=inputs.scale,
        sinks=inputs.sinks,
        lse=None,
        return_lse=False,
        kv_scale_format="auto",
    )
    assert isinstance(answer, torch.Tensor)
    return answer.squeeze(1)


def test_slices_are_one_softmax() -> None:
    """On the device too: exact with exact parts, BF16's error with BF16 parts."""
    module = patched.module("0.30.0", wheels.CORE, "wide_swa")
    for rows in (65, 256, 257, 600):
        exact = on_device(prefill(rows, rows, heads=8, size=HEAD))
        error = distance(ask_slices(module, exact, Kernel()), exact.softmax())
        assert record(f"merge fp64 T={rows}", error) < EXACT
        rounded = on_device(prefill(rows, rows, heads=8, size=HEAD, dtype=torch.bfloat16))
        error = distance(ask_slices(module, rounded, Kernel(torch.float32)), rounded.softmax())
        assert record(f"merge bf16 T={rows}", error) < BF16


def test_powers_of_e_fail() -> None:
    """The merge in the wrong base is outside what BF16 explains."""
    text = patched.text("0.30.0", wheels.CORE, "wide_swa")
    start = text.index("def _fold_slice(")
    block = text[start : text.index("\ndef ", start)]
    wrong = load(wheels.CORE, text.replace(block, block.replace("torch.exp2(", "torch.exp(")))
    inputs = on_device(prefill(90, 5, lengths=(129, 300, 512), dtype=torch.bfloat16))
    error = distance(ask_slices(wrong, inputs, Kernel(torch.float32)), inputs.softmax())
    assert record("merge bf16 in base e", error) > 4 * BF16


def test_the_merge_is_small() -> None:
    """A prefill of 8192 tokens takes no more memory than a block does, and says what it costs."""
    module = patched.module("0.30.0", wheels.CORE, "wide_swa")
    rows = 8192
    inputs = Attention(
        query=torch.zeros(rows, HEADS, HEAD, dtype=torch.bfloat16, device="cuda"),
        keys=torch.zeros(1, device="cuda"),
        window=torch.zeros(rows, 512, dtype=torch.int32, device="cuda"),
        lengths=torch.full((rows,), 400, dtype=torch.int32, device="cuda"),
        more=torch.zeros(1, device="cuda"),
        extra=torch.zeros(rows, 64, dtype=torch.int32, device="cuda"),
        extra_lengths=torch.full((rows,), 64, dtype=torch.int32, device="cuda"),
        sinks=torch.zeros(HEADS, device="cuda"),
        scale=1.0,
    )

    def run(*, out: torch.Tensor, lse: torch.Tensor, **_: Any) -> None:
        out.fill_(1.0)
        lse.fill_(3.0)

    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begun = time.monotonic()
        found = ask_slices(module, inputs, run)
        torch.cuda.synchronize()
        seconds = time.monotonic() - begun
    assert bool((found == 1.0).all())
    output = found.numel() * found.element_size()
    peak = torch.cuda.max_memory_allocated() - before - output
    record("merge ms for 8192 tokens of 64 heads", 1000 * seconds)
    assert record("merge peak MiB for 8192 tokens of 64 heads", peak / 2**20) < 200


def main() -> int:
    """Run every test here and print what was measured."""
    results: dict[str, str] = {}
    for name, test in sorted(globals().items()):
        if not name.startswith("test_"):
            continue
        try:
            test()
            results[name] = "passed"
        except Exception:
            results[name] = traceback.format_exc()
    answer = {
        "ok": set(results.values()) == {"passed"},
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
        "results": results,
        "measured": MEASURED,
    }
    sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The mathematics of the patches, on the processor; run by test_patch_maths.py in its environment.

What is called here are the functions of the patched files of the real releases: the very text that
lands in a runtime. Kernels are stood in for by what they compute, with the limits they have.
"""

import re
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.sources import patched, wheels
from tests.sources.reference import (
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
from tests.sources.stand_ins import load, stand_ins

WITH_DEFECT = ("0.28.0", "0.29.0")
SLICED = ("0.30.0",)

EXACT = 3e-7
"""FP32 keeps 24 bits; the merge adds up four slices in it."""

BF16 = 2**-8
"""Two roundings to 8 bits, of a part and of the whole."""


# o_proj_bf16


def ask_o_proj(
    release: str,
    o: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Call the patched function as the attention layer does; wo_b gives back what it gets."""

    def helper(
        o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, rope_head_dim: int
    ) -> torch.Tensor:
        assert (o.dim(), o.stride(-1), rope_head_dim) == (3, 1, ROPE)
        return rotated(o, positions, table, -1).to(torch.bfloat16)

    module = patched.module(release, wheels.O_PROJ, "o_proj_bf16")
    name = wheels.HELPERS.removesuffix(".py").replace("/", ".")
    with stand_ins(patched.real(name, _fused_inverse_rope_gptj=helper)):
        answer = module.deep_gemm_fp8_o_proj(
            o,
            positions,
            table,
            types.SimpleNamespace(weight=weight),
            lambda z: z,
            n_groups=GROUPS,
            heads_per_group=HEADS // GROUPS,
            nope_dim=NOPE,
            rope_dim=ROPE,
            o_lora_rank=RANK,
            einsum_recipe=(1, 1, 128),
            tma_aligned_scales=True,
        )
    assert isinstance(answer, torch.Tensor)
    return answer


def o_proj_inputs(tokens: int, padded: int = 0) -> tuple[torch.Tensor, ...]:
    """Return o, positions, table and weight; `padded` heads lie between one token and the next."""
    generator = torch.Generator().manual_seed(tokens)
    storage = torch.randn(tokens, HEADS + padded, HEAD, generator=generator).bfloat16()
    table = cos_sin(4096, generator)
    positions = torch.randint(0, 4096, (tokens,), generator=generator)
    weight = torch.randn(GROUPS * RANK, HEADS // GROUPS * HEAD, generator=generator) / 64
    return storage[:, :HEADS], positions, table, weight.bfloat16()


@pytest.mark.parametrize("release", WITH_DEFECT)
@pytest.mark.parametrize(("tokens", "padded"), [(0, 0), (1, 0), (3, 64), (17, 0), (33, 64)])
def test_the_output_projection_is_the_reference(release: str, tokens: int, padded: int) -> None:
    """Inverse rotation, then each group of heads by its rows of wo_a: also for no token, for odd
    numbers of them, and where padded heads lie between one token's heads and the next's."""
    inputs = o_proj_inputs(tokens, padded)
    found = ask_o_proj(release, *inputs)
    assert found.shape == (tokens, GROUPS * RANK)
    assert found.dtype == torch.bfloat16
    assert distance(found, projection(*inputs).flatten(1)) < BF16


def test_the_reference_undoes_the_rotation() -> None:
    """Rotated and rotated back is what it was, to what BF16 can tell."""
    o, positions, table, _ = o_proj_inputs(9)
    there = rotated(o, positions, table, 1)
    assert distance(there, o) > 0.1
    assert distance(rotated(there, positions, table, -1), o) < 1e-7
    again = rotated(there.bfloat16(), positions, table, -1).bfloat16()
    assert distance(again, o) < BF16


def test_a_rotation_the_wrong_way_is_noticed() -> None:
    """The tolerance tells the inverse rotation from the forward one."""
    o, positions, table, weight = o_proj_inputs(5)
    forward = projection(
        rotated(rotated(o, positions, table, 1), positions, table, 1), positions, table, weight
    )
    assert distance(forward, projection(o, positions, table, weight)) > 10 * BF16


@pytest.mark.parametrize("release", WITH_DEFECT)
def test_fp8_weights_take_the_path_they_took(release: str) -> None:
    """For FP8 weights the function does what it did: quantise, and multiply with the scales."""
    module = load(wheels.O_PROJ, patched.text(release, wheels.O_PROJ, "o_proj_bf16"))
    seen: list[Any] = []

    def product(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))
        args[3].fill_(2.0)

    module.__dict__["fused_inv_rope_fp8_quant"] = lambda *args, **kwargs: ("o", "scale")
    module.__dict__["fp8_einsum"] = product
    weight = torch.zeros(GROUPS * RANK, 64).to(torch.float8_e4m3fn)
    found = module.deep_gemm_fp8_o_proj(
        torch.zeros(2, HEADS, HEAD, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.int64),
        None,
        types.SimpleNamespace(weight=weight, weight_scale="scales"),
        lambda z: z,
        n_groups=GROUPS,
        heads_per_group=HEADS // GROUPS,
        nope_dim=NOPE,
        rope_dim=ROPE,
        o_lora_rank=RANK,
        einsum_recipe=(1, 1, 128),
        tma_aligned_scales=True,
    )
    assert found.shape == (2, GROUPS * RANK)
    ((args, _),) = seen
    assert args[1:3] == (("o", "scale"), (weight, "scales"))


# wide_swa


def ask_slices(
    module: types.ModuleType, inputs: Attention, kernel: Kernel, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Call the injected function as the patched call site does."""
    answer = module.__dict__["_sparse_mla_in_slices"](
        kernel,
        Segment,
        query=inputs.query.unsqueeze(1),
        kv_cache=inputs.keys,
        workspace_buffer=None,
        sparse_mla_segments=[
            Segment(inputs.window.unsqueeze(1), inputs.lengths),
            Segment(inputs.extra.unsqueeze(1), inputs.extra_lengths, inputs.more),
        ],
        out=out,
        sm_scale=inputs.scale,
        sinks=inputs.sinks,
        lse=None,
        return_lse=False,
        kv_scale_format="auto",
    )
    assert isinstance(answer, torch.Tensor)
    return answer.squeeze(1)


def core(release: str) -> types.ModuleType:
    """Return the patched FlashInfer of a release."""
    return patched.module(release, wheels.CORE, "wide_swa")


@pytest.mark.parametrize("release", SLICED)
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("rows", [65, 72, 256, 257, 600])
def test_slices_are_one_softmax(release: str, rows: int, sinks: bool) -> None:
    """Window, compressed keys and sink are one softmax, whatever the lengths; one head's sink is
    minus infinity, some rows have no compressed keys, some no key at all."""
    inputs = prefill(rows, rows, sinks=sinks)
    kernel = Kernel()
    found = ask_slices(core(release), inputs, kernel)
    assert distance(found, inputs.softmax()) < EXACT
    blocks = -(-rows // 256)
    assert len(kernel.calls) == 4 * blocks
    assert sum(call["rows"] for call in kernel.calls) == 4 * rows
    assert all(call["rows"] > 64 and call["width"] == 128 for call in kernel.calls)
    # What belongs to the softmax once is passed once
    first = [call for call in kernel.calls if call["extra"]]
    assert len(first) == blocks
    assert [call["sinks"] for call in kernel.calls] == [sinks and c["extra"] for c in kernel.calls]


@pytest.mark.parametrize("release", SLICED)
@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 255, 256, 257, 384, 385, 511, 512])
@pytest.mark.parametrize("extra", [0, 64])
def test_every_length_by_itself(release: str, length: int, extra: int) -> None:
    """No length hides behind the error of the others."""
    inputs = prefill(66, length, lengths=(length,), extras=(extra,), heads=2)
    found = ask_slices(core(release), inputs, Kernel())
    if length + extra == 0:
        assert bool((found == 0).all())
    else:
        assert distance(found, inputs.softmax()) < EXACT


@pytest.mark.parametrize("release", SLICED)
def test_parts_in_bf16_cost_what_bf16_costs(release: str) -> None:
    """The kernel returns BF16 parts: the merge adds no error of its own."""
    inputs = prefill(90, 5, size=HEAD, dtype=torch.bfloat16)
    found = ask_slices(core(release), inputs, Kernel(torch.float32))
    assert found.dtype == torch.bfloat16
    assert distance(found, inputs.softmax()) < BF16


@pytest.mark.parametrize("release", SLICED)
@pytest.mark.parametrize("slice_", [0, 1, 3])
def test_a_slice_that_outweighs_the_others(release: str, slice_: int) -> None:
    """One slice weighs 2**20 times another: the small ones keep their share, nothing overflows."""
    inputs = dominated(slice_)
    found = ask_slices(core(release), inputs, Kernel())
    wanted = inputs.softmax()
    assert distance(found, wanted) < EXACT
    # The others' share is not lost: without them it is another answer
    alone = prefill_of(inputs, slice_).softmax()
    assert 2**-22 < distance(alone, wanted) < 2**-18


def dominated(slice_: int) -> Attention:
    """Return inputs where one slice of the window weighs 2**20 times all others together."""
    inputs = prefill(70, 8, lengths=(512,), extras=(64,), heads=2, sinks=False)
    inputs.query = torch.zeros_like(inputs.query)
    inputs.query[..., 0] = 1.0
    strong = torch.zeros(700, dtype=torch.bool)
    strong[:128] = True
    rest = torch.arange(128, 700)
    for row in range(70):
        inputs.window[row] = rest[torch.randperm(572)[:512]].int()
        inputs.window[row, 128 * slice_ : 128 * (slice_ + 1)] = torch.arange(128).int()
    # 128 strong keys against 384 and 64 weak ones
    inputs.keys[:, 0] = torch.where(strong, 2.0**20 * 448 / 128, 1.0).double().log() / inputs.scale
    inputs.more[:, 0] = 0.0
    return inputs


def prefill_of(inputs: Attention, slice_: int) -> Attention:
    """Return the same inputs with one slice of the window and nothing else."""
    window = torch.full_like(inputs.window, -1)
    window[:, :128] = inputs.window[:, 128 * slice_ : 128 * (slice_ + 1)]
    nothing = torch.zeros_like(inputs.extra_lengths)
    only = torch.full_like(inputs.lengths, 128)
    return Attention(
        inputs.query,
        inputs.keys,
        window,
        only,
        inputs.more,
        inputs.extra,
        nothing,
        None,
        inputs.scale,
    )


@pytest.mark.parametrize("release", SLICED)
def test_powers_of_e_fail(release: str) -> None:
    """The same text with exp in the place of exp2 misses the tolerance by orders of magnitude:
    the kernel's logarithm is in base 2."""
    text = patched.text(release, wheels.CORE, "wide_swa")
    block = text[
        text.index("def _fold_slice(") : text.index("def _trtllm_batch_decode_sparse_mla_dsv4")
    ]
    assert block.count("torch.exp2(") == 2
    wrong = load(wheels.CORE, text.replace(block, block.replace("torch.exp2(", "torch.exp(")))
    inputs = prefill(90, 5, lengths=(129, 300, 512))
    assert distance(ask_slices(core(release), inputs, Kernel()), inputs.softmax()) < EXACT
    assert distance(ask_slices(wrong, inputs, Kernel()), inputs.softmax()) > 1e4 * EXACT
    # Nor would the roundings of BF16 cover it
    rounded = prefill(90, 5, lengths=(129, 300, 512), dtype=torch.bfloat16)
    merged = ask_slices(wrong, rounded, Kernel(torch.float32))
    assert distance(merged, rounded.softmax()) > 4 * BF16


def test_shares_of_two_slices() -> None:
    """With shares of 80 and 20 % the merge gives 80 and 20 %; in base e it would be 88 and 12 %."""
    fold = core("0.30.0").__dict__["_fold_slice"]
    total, weight = torch.zeros(1, 1, 2), torch.zeros(1, 1)
    peak, live = torch.full((1, 1), -1e30), torch.ones(1, 1, dtype=torch.bool)
    for value, share in ((torch.tensor([[[1.0, 0.0]]]), 0.8), (torch.tensor([[[0.0, 1.0]]]), 0.2)):
        peak = fold(total, weight, peak, value, torch.tensor([[share]]).log2(), live)
    assert torch.allclose(total / weight.unsqueeze(-1), torch.tensor([0.8, 0.2]))


def test_the_kernels_logarithm_is_in_base_2() -> None:
    """What the merge relies on, as the kernel's own sources have it."""
    softmax = wheels.text("0.30.0", wheels.SOFTMAX)
    assert re.search(r"softmax_lse\(float m, float l\) \{\s*return [^;]*log2f\(l\) \+ m", softmax)
    sink = "lse += log2f(1.f + exp2f(sink_log2 - lse));"
    assert wheels.text("0.30.0", wheels.PREFILL).count(sink) == 2


@pytest.mark.parametrize("release", SLICED)
@pytest.mark.parametrize(
    ("rows", "width", "extra"), [(0, 512, True), (64, 512, True), (65, 512, False), (65, 128, True)]
)
def test_what_the_kernel_takes_goes_straight_through(
    release: str, rows: int, width: int, extra: bool
) -> None:
    """Up to 64 rows, without a second cache, or with narrow windows: one call, as it was made."""
    inputs = prefill(max(rows, 1), 3, width=width, lengths=(min(width, 300),), heads=2)
    segments = [Segment(inputs.window.unsqueeze(1), inputs.lengths)]
    if extra:
        segments.append(Segment(inputs.extra.unsqueeze(1), inputs.extra_lengths, inputs.more))
    passed = {
        "query": inputs.query[:rows].unsqueeze(1),
        "kv_cache": inputs.keys,
        "workspace_buffer": object(),
        "sparse_mla_segments": segments,
        "out": torch.empty(rows, 1, 2, 64),
        "sm_scale": 0.125,
        "sinks": inputs.sinks,
        "lse": None,
        "return_lse": False,
        "kv_scale_format": "auto",
    }
    seen: list[dict[str, Any]] = []

    def run(**given: Any) -> str:
        seen.append(given)
        return "the kernel's answer"

    assert core(release).__dict__["_sparse_mla_in_slices"](run, Segment, **passed) == (
        "the kernel's answer"
    )
    assert len(seen) == 1
    assert seen[0].keys() == passed.keys()
    assert all(seen[0][name] is passed[name] for name in passed)


@pytest.mark.parametrize("release", SLICED)
def test_a_fault_of_the_kernel_is_seen(release: str) -> None:
    """A NaN from the kernel reaches the output; no other row has one."""

    class Faulty(Kernel):
        def __call__(self, **given: Any) -> Any:
            answer = super().__call__(**given)
            if given["return_lse"]:
                given["out"][7] = float("nan")
            return answer

    inputs = prefill(66, 1, heads=2)
    found = ask_slices(core(release), inputs, Faulty())
    assert bool(found[7].isnan().all())
    assert not bool(found[[row for row in range(66) if row != 7]].isnan().any())


@pytest.mark.parametrize("release", SLICED)
def test_rows_without_a_key_take_nothing_from_a_slice(release: str) -> None:
    """Most rows have none in most slices; what the kernel leaves in their place is nobody's."""

    class Careless(Kernel):
        def __call__(self, **given: Any) -> Any:
            answer = super().__call__(**given)
            if given["return_lse"]:
                keys = sum(one.lengths.reshape(-1) for one in given["sparse_mla_segments"])
                given["out"][keys == 0] = float("nan")
            return answer

    inputs = prefill(66, 1, heads=2)
    found = ask_slices(core(release), inputs, Careless())
    assert torch.equal(found, ask_slices(core(release), inputs, Kernel()))


@pytest.mark.parametrize("release", SLICED)
def test_what_cannot_be_sliced_is_refused(release: str) -> None:
    """A width that is no multiple of 128, and anything the call site does not pass."""
    for width in (192, 448):
        inputs = prefill(66, 1, width=width, lengths=(130,), heads=2)
        with pytest.raises(ValueError, match="multiple of 128"):
            ask_slices(core(release), inputs, Kernel())


@pytest.mark.parametrize("release", SLICED)
def test_through_flashinfers_own_function(release: str) -> None:
    """The patched function as vLLM reaches it: checks, segments, slices, and the caller's buffer
    filled; heads that are padding have a sink of minus infinity."""
    module = load(wheels.CORE, patched.text(release, wheels.CORE, "wide_swa"))
    kernel = Kernel(torch.float32)
    module.__dict__["_trtllm_batch_decode_sparse_mla_sm120"] = kernel
    inputs = prefill(70, 2, heads=8, size=HEAD, dtype=torch.bfloat16)
    buffer = torch.empty(70, 8, 512, dtype=torch.bfloat16)
    answer = module.__dict__["_trtllm_batch_decode_sparse_mla_dsv4_sm120"](
        query=inputs.query,
        swa_kv_cache=inputs.keys[:640].view(10, 64, 1, 512),
        workspace_buffer=torch.empty(0, dtype=torch.uint8),
        sparse_indices=inputs.window.clamp(max=639).unsqueeze(1),
        compressed_kv_cache=inputs.more.view(45, 2, 1, 512),
        swa_topk_lens=inputs.lengths,
        extra_sparse_indices=inputs.extra.unsqueeze(1),
        extra_sparse_topk_lens=inputs.extra_lengths,
        out=buffer,
        bmm1_scale=inputs.scale,
        bmm2_scale=1.0,
        sinks=inputs.sinks,
        kv_layout="NHD",
    )
    inputs.window = inputs.window.clamp(max=639)
    assert len(kernel.calls) == 4
    assert torch.equal(answer, buffer)
    assert distance(buffer, inputs.softmax()) < BF16


@pytest.mark.parametrize("release", SLICED)
@pytest.mark.parametrize("images", [False, True])
def test_a_batch_without_images_is_narrow(release: str, images: bool) -> None:
    """vLLM's prefill hands over 128 columns where no row has an image, and 512 where one has."""
    module = load(wheels.ATTENTION, patched.text(release, wheels.ATTENTION, "wide_swa"))
    (owner,) = (
        one
        for one in vars(module).values()
        if isinstance(one, type) and "_forward_prefill" in vars(one)
    )
    seen: list[torch.Tensor] = []
    module.__dict__["flashinfer_trtllm_batch_decode_sparse_mla_dsv4"] = lambda **given: seen.append(
        given["sparse_indices"]
    )
    indices = torch.arange(5 * 512, dtype=torch.int32).view(5, 1, 512)
    metadata = types.SimpleNamespace(
        num_prefills=2,
        num_decodes=0,
        num_decode_tokens=0,
        num_prefill_tokens=5,
        query_start_loc_cpu=torch.tensor([0, 2, 5]),
        prefill_swa_indices=indices,
        prefill_swa_lens=torch.full((5,), 100, dtype=torch.int32),
        prefill_left_visible=torch.zeros(5) if images else None,
    )
    layer = types.SimpleNamespace(
        compress_ratio=1,
        window_size=128,
        PREFILL_CHUNK_SIZE=4,
        scale=1.0,
        attn_sink=None,
        _prepare_query=lambda q, output: q,
        _as_sparse_cache=lambda cache: cache,
        _get_workspace=lambda device: None,
    )
    owner._forward_prefill(  # type: ignore[attr-defined]
        layer,
        q=torch.zeros(5, 8, 512),
        compressed_k_cache=None,
        swa_k_cache=torch.zeros(1),
        output=torch.zeros(5, 8, 512),
        attn_metadata=None,
        swa_metadata=metadata,
    )
    (found,) = seen
    assert found.is_contiguous()
    assert torch.equal(found, indices if images else indices[..., :128])


# Loaders


class Recorder:
    """Stands for the loader that the models hand their weights to."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    got: Callable[[str, torch.Tensor], None]

    def load_weights(self, weights: Any, **_: Any) -> set[str]:
        names = set()
        for name, tensor in weights:
            type(self).got(name, tensor)
            names.add(name)
            del tensor
        return names


def ask_loader(
    module: types.ModuleType,
    owner: str,
    weights: Any,
    got: Callable[[str, torch.Tensor], None],
    **attributes: Any,
) -> set[str]:
    """Call a patched model's `load_weights`."""
    module.__dict__["AutoWeightsLoader"] = type("Loader", (Recorder,), {"got": staticmethod(got)})
    nothing = types.SimpleNamespace(
        finalize_mega_moe_weights=lambda: None, finalize_mhc_broadcast_weights=lambda: None
    )
    model = types.SimpleNamespace(
        model=nothing,
        hf_to_vllm_mapper=None,
        process_weights_after_loading=lambda: None,
        **attributes,
    )
    loaded = getattr(module, owner).load_weights(model, weights)
    assert isinstance(loaded, set)
    return loaded


def ask_vision(weights: Any, got: Callable[[str, torch.Tensor], None]) -> set[str]:
    """Call the patched vision model's `load_weights`; the mapping of names is left out."""
    module = load(wheels.VISION, patched.text("0.30.0", wheels.VISION, "stream_load"))
    module.__dict__["AutoWeightsLoader"] = type("Loader", (Recorder,), {"got": staticmethod(got)})
    model = types.SimpleNamespace(
        hf_to_vllm_mapper=types.SimpleNamespace(apply=lambda weights: weights),
        language_model=types.SimpleNamespace(finalizes_weights_during_load=True),
    )
    loaded = module.DeepseekV4ForConditionalGeneration.load_weights(model, weights)
    assert isinstance(loaded, set)
    return loaded


PACK = [
    *("vision.a", "language_model.model.z", "aligner.b", "language_model.lm_head", "image_pad"),
    *("language_model.model.a", "vision.c", "language_model.model.b"),
]
LANGUAGE = [name for name in PACK if name.startswith("language_model.")]
REST = [name for name in PACK if not name.startswith("language_model.")]


def test_the_language_model_comes_first_and_as_it_comes() -> None:
    """Its tensors are passed on one by one, each before the next is read; the others follow."""
    log: list[str] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate(PACK):
            log.append(f"read {name}")
            yield name, torch.full((4,), float(number))

    def got(name: str, tensor: torch.Tensor) -> None:
        assert tensor.tolist() == [float(PACK.index(name))] * 4
        log.append(f"loaded {name}")

    assert ask_vision(source(), got) == set(PACK)
    expected = []
    for name in PACK:
        expected.append(f"read {name}")
        if name in LANGUAGE:
            expected.append(f"loaded {name}")
    assert log == [*expected, *(f"loaded {name}" for name in REST)]


def test_no_more_is_in_memory_than_has_to_wait() -> None:
    """At most the vision tower's copies and one tensor are alive, however long the pack is; of a
    shard that a held tensor was a view of, nothing. Sorting would keep every shard."""
    size, per_shard = 1000, 4
    names = [
        f"{'vision' if number % 10 == 0 else 'language_model'}.{number}" for number in range(200)
    ]
    shards: list[weakref.ref[torch.Tensor]] = []
    alive: set[int] = set()
    peak = 0

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal peak
        for start in range(0, len(names), per_shard):
            shard = torch.zeros(per_shard * size)
            shards.append(weakref.ref(shard))
            for number in range(start, start + per_shard):
                # Every shard before this one is gone, whatever was taken from it
                assert [one() for one in shards[:-1]] == [None] * (len(shards) - 1)
                tensor = shard[(number - start) * size : (number - start + 1) * size]
                alive.add(number)
                weakref.finalize(tensor, alive.discard, number)
                peak = max(peak, len(alive))
                yield names[number], tensor
                del tensor

    loaded: list[str] = []
    assert ask_vision(source(), lambda name, _: loaded.append(name)) == set(names)
    assert len(shards) == 50
    assert peak == 1
    assert loaded[180:] == [name for name in names if name.startswith("vision")]


def test_what_is_held_is_a_copy() -> None:
    """A held tensor has storage of its own size and keeps what was noted on the original."""
    shard = torch.arange(1000.0)
    view = shard[10:20]
    view.shard_id = 3
    seen: dict[str, torch.Tensor] = {}
    ask_vision([("vision.a", view), ("language_model.b", shard)], seen.__setitem__)
    assert list(seen) == ["language_model.b", "vision.a"]
    assert seen["vision.a"].untyped_storage().nbytes() == 40
    assert seen["vision.a"].shard_id == 3
    assert seen["language_model.b"] is shard


TEXT_NAMES = [
    *("embed.weight", "head.weight", "norm.weight", "hc_head_fn", "mtp.0.ffn.gate.bias"),
    *("layers.0.ffn.gate.weight", "layers.0.ffn.gate.tid2eid", "layers.3.ffn.gate.bias"),
    *("layers.42.ffn.gate.bias", "layers.10.attn.wo_b.weight", "layers.3.attn.attn_sink"),
    "layers.30.ffn.gate.bias",
]
VISION_NAMES = [
    *("vision.patch_embed.proj.weight", "vision.norm.weight", "aligner.w1.bias", "image_start"),
    *("image_newline", "layers.0.ffn.gate.bias_vl", "layers.42.ffn.gate.bias_vl"),
    *("mtp.1.ffn.gate.bias_vl", "layers.0.ffn.gate.bias", "layers.2.ffn.gate.bias"),
]


@pytest.mark.parametrize("release", WITH_DEFECT)
def test_the_text_model_is_given_what_it_has_a_place_for(release: str) -> None:
    """The vision tower, the image tokens' biases and the hash layers' biases are left out."""
    module = patched.module(release, wheels.MODEL, "text_loader")
    config = types.SimpleNamespace(topk_method="noaux_tc", num_hash_layers=3)
    mixed = sorted([*TEXT_NAMES, *VISION_NAMES], key=lambda name: name[::-1])
    both = [(name, torch.zeros(1)) for name in mixed]
    seen: list[str] = []
    ask_loader(
        module, "DeepseekV4ForCausalLM", both, lambda name, _: seen.append(name), config=config
    )
    assert seen == [name for name in mixed if name in TEXT_NAMES]


@pytest.mark.parametrize("release", WITH_DEFECT)
@pytest.mark.parametrize("method", [None, "greedy"])
def test_a_config_that_would_route_wrongly_is_refused(release: str, method: str | None) -> None:
    """Without noaux_tc nothing is loaded, and the message says what to do."""
    module = patched.module(release, wheels.MODEL, "text_loader")
    config = types.SimpleNamespace(num_hash_layers=3)
    if method:
        config.topk_method = method

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("a weight was read")
        yield

    with pytest.raises(ValueError, match="topk_method has to be 'noaux_tc'"):
        ask_loader(module, "DeepseekV4ForCausalLM", weights(), lambda name, _: None, config=config)


@pytest.mark.parametrize("release", WITH_DEFECT)
def test_the_draft_leaves_out_one_tensor_only(release: str) -> None:
    """Every other name is mapped as before."""
    after = patched.module(release, wheels.DRAFT, "draft_bias_vl")
    before = patched.original(release, wheels.DRAFT)
    owner = next(
        name
        for name, one in vars(after).items()
        if isinstance(one, type) and "_remap_dspark_name" in vars(one)
    )
    draft = types.SimpleNamespace(model=types.SimpleNamespace(confidence_head=None))
    names = [
        *("mtp.0.ffn.gate.bias", "mtp.2.ffn.gate.weight", "mtp.0.main_proj.weight", "embed.weight"),
        *("mtp.2.norm.weight", "mtp.2.confidence_head.proj.weight", "layers.3.ffn.gate.bias_vl"),
        *("mtp.1.ffn.experts.7.w1.scale", "mtp.2.markov_head.markov_w1.weight"),
    ]
    asked = [
        [getattr(module, owner)._remap_dspark_name(draft, name) for name in names]
        for module in (before, after)
    ]
    assert asked[0] == asked[1]
    assert sum(name is not None for name in asked[0]) == 6
    for stage in range(3):
        name = f"mtp.{stage}.ffn.gate.bias_vl"
        assert getattr(before, owner)._remap_dspark_name(draft, name) is not None
        assert getattr(after, owner)._remap_dspark_name(draft, name) is None


def fork() -> types.ModuleType:
    """Return the file the fork's loader is most like."""
    return patched.module("0.28.0", wheels.MODEL, "fork_loader")


@pytest.mark.parametrize("shape", [(128, 128), (512, 4096), (130, 300), (1, 1), (64, 257)])
def test_block_fp8_is_as_near_as_fp8_can_be(shape: tuple[int, int]) -> None:
    """Each block has its own scale and uses the whole range; also where the last is not full."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(*shape, generator=generator)
    weight[0, 0] = 100.0
    weight = weight.bfloat16()
    found, scale = fork().__dict__["_block_fp8"](weight)
    assert (found.dtype, scale.dtype, found.shape) == (
        torch.float8_e4m3fn,
        torch.float32,
        weight.shape,
    )
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    wide = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    again = found.float() * wide
    # Three bits behind the point: half a step is a sixteenth; below the smallest normal number
    # steps are even
    error = (again - weight.float()).abs()
    assert bool((error <= torch.maximum(weight.float().abs() / 16, wide * 2**-10)).all())
    assert float(found.float().abs().max()) == 448.0


def test_the_default_type_of_a_load_changes_nothing() -> None:
    """Models are loaded with BF16 as torch's default: scales and parts stay FP32."""
    weight = torch.randn(130, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = fork().__dict__["_block_fp8"](weight)
    inputs = prefill(70, 4)
    merged = ask_slices(core("0.30.0"), inputs, Kernel())
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = fork().__dict__["_block_fp8"](weight)
        again = ask_slices(core("0.30.0"), inputs, Kernel())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[1].dtype == torch.float32
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0].float(), wanted[0].float())
    assert torch.equal(again, merged)


def test_a_block_of_zeros_stays_zero() -> None:
    """Nothing is divided by zero."""
    found, scale = fork().__dict__["_block_fp8"](torch.zeros(128, 256, dtype=torch.bfloat16))
    assert bool((found.float() == 0).all())
    assert bool((scale > 0).all())
    assert bool(torch.isfinite(scale).all())


def test_the_fork_is_given_scales_with_every_fp8_weight() -> None:
    """A BF16 matrix that lands in an FP8 parameter, fused or not, comes with scales; all else is
    passed on, and what the text model has no place for is left out."""
    fp8 = {
        *("model.layers.3.attn.fused_wqa_wkv.weight", "model.layers.3.attn.wo_a.weight"),
        "model.layers.3.attn.compressor.fused_wkv_wgate.weight",
        "model.layers.3.ffn.shared_experts.gate_up_proj.weight",
        "model.layers.3.ffn.shared_experts.down_proj.weight",
    }
    quantised = [
        *("layers.3.attn.wq_a.weight", "layers.3.attn.wkv.weight", "layers.3.attn.wo_a.weight"),
        *("layers.3.attn.compressor.wkv.weight", "layers.3.attn.compressor.wgate.weight"),
        *("layers.3.ffn.shared_experts.w1.weight", "layers.3.ffn.shared_experts.w3.weight"),
        "layers.3.ffn.shared_experts.w2.weight",
    ]
    passed_on = [
        *("layers.3.attn.indexer.compressor.wkv.weight", "embed.weight", "layers.3.ffn.gate.bias"),
        *("layers.3.attn.q_norm.weight", "layers.3.ffn.experts.0.w1.trellis"),
    ]
    dropped = [*VISION_NAMES, "mtp.0.attn.wkv.weight"]
    weights = [(name, torch.ones(130, 4, dtype=torch.bfloat16)) for name in quantised]
    weights += [(name, torch.ones(4, dtype=torch.bfloat16)) for name in passed_on]
    weights += [(name, torch.ones(130, 4, dtype=torch.bfloat16)) for name in dropped]
    seen: dict[str, torch.Tensor] = {}
    parameters = [
        (name, types.SimpleNamespace(dtype=torch.float8_e4m3fn if name in fp8 else torch.bfloat16))
        for name in [*fp8, "model.embed.weight"]
    ]
    ask_loader(
        fork(),
        "DeepseekV4ForCausalLM",
        weights,
        seen.__setitem__,
        config=types.SimpleNamespace(num_hash_layers=3),
        named_parameters=lambda: parameters,
    )
    assert set(seen) == {*quantised, *(f"{name}_scale_inv" for name in quantised), *passed_on}
    assert {seen[name].dtype for name in quantised} == {torch.float8_e4m3fn}
    assert {seen[name].dtype for name in passed_on} == {torch.bfloat16}


def test_the_fork_takes_the_routing_method_for_granted() -> None:
    """A config without topk_method makes room for the biases all the same."""
    text = patched.text("0.28.0", wheels.MODEL, "fork_loader")
    asked = 'getattr(config, "topk_method", '
    assert text.count(f'{asked}"noaux_tc") == "noaux_tc"') == 1
    assert f"{asked}None)" not in text

"""The patches on the real files of every release they were made for, and of those they were not."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from dsv4 import patches
from dsv4.patches import PATCHES, engine
from dsv4.patches.engine import Patch, PatchError, Verdict
from tests.sources import wheels

REPO = Path(__file__).resolve().parents[2]

VLLM = [name for name in PATCHES if name != "exllamav3_aarch64"]

TABLE: Mapping[str, Mapping[str, str]] = {
    "o_proj_bf16": {
        "0.28.0": "applies",
        "0.29.0": "applies",
        "0.30.0": "superseded",
        "0.33.0": "superseded",
    },
    "text_loader": {
        "0.28.0": "applies",
        "0.29.0": "applies",
        "0.30.0": "superseded",
        "0.33.0": "superseded",
    },
    "draft_bias_vl": {
        "0.28.0": "applies",
        "0.29.0": "applies",
        "0.30.0": "superseded",
        "0.33.0": "superseded",
    },
    "stream_load": {
        "0.28.0": "superseded",
        "0.29.0": "superseded",
        "0.30.0": "applies",
        "0.33.0": "superseded",
    },
    "wide_swa": {
        "0.28.0": "superseded",
        "0.29.0": "superseded",
        "0.30.0": "applies",
        "0.33.0": "superseded",
    },
    "fork_loader": {
        "0.28.0": "applies",
        "0.29.0": "applies",
        "0.30.0": "superseded",
        "0.33.0": "superseded",
    },
}
"""Every patch on every release. The fork is known by what its users' edits relied on, which the two
text-only releases have too."""

SETS: Mapping[str, tuple[str, ...]] = {
    "0.28.0": ("o_proj_bf16", "text_loader", "draft_bias_vl"),
    "0.29.0": ("o_proj_bf16", "text_loader", "draft_bias_vl"),
    "0.30.0": ("stream_load", "wide_swa"),
    "0.33.0": (),
}
"""What each release needs; the nightly, before 0.30.0, needs o_proj_bf16 with what that needs."""

CHANGED: Mapping[str, set[str]] = {
    "0.28.0": {wheels.O_PROJ, wheels.MODEL, wheels.DRAFT},
    "0.29.0": {wheels.O_PROJ, wheels.MODEL, wheels.DRAFT},
    "0.30.0": {wheels.VISION, wheels.CORE, wheels.ATTENTION},
    "0.33.0": set(),
}

EVERY = [(name, release) for name in VLLM for release in wheels.RELEASES]


@pytest.fixture(scope="session", autouse=True)
def _sources() -> None:
    """Fetch what is not there yet, several wheels at a time."""
    wheels.fetch_all()


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a release's files as an environment has them; the release is a parameter."""
    release = request.getfixturevalue("release")
    return wheels.site(release, tmp_path / "site-packages")


def chosen(names: tuple[str, ...]) -> list[Patch]:
    """Return patches by name."""
    return [PATCHES[name] for name in names]


def tree(root: Path) -> dict[str, bytes]:
    """Return every file below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def cells() -> Iterator[tuple[str, str]]:
    """Yield the cells of the table."""
    yield from ((name, release) for name, row in TABLE.items() for release in row)


def test_the_readme_shows_this_table() -> None:
    """What the README says of each release is what the real files say."""
    releases = list(wheels.RELEASES)
    rows = [
        f"| patch | {' | '.join(releases)} | what it is for |",
        f"| --- |{' --- |' * len(releases)} --- |",
        *(
            f"| `{name}` | {' | '.join(row[it] for it in releases)} | {PATCHES[name].summary} |"
            for name, row in TABLE.items()
        ),
    ]
    assert "\n".join(rows) in (REPO / "README.md").read_text()


def test_the_table_is_whole() -> None:
    """Every patch of vLLM's is in the table with every release."""
    assert sorted(cells()) == sorted(EVERY)


@pytest.mark.parametrize(("name", "release"), EVERY)
def test_verdict(name: str, release: str, site: Path) -> None:
    """Each patch says of each release what the table says, and why where it does not apply."""
    report = engine.status(site, [PATCHES[name]])
    found = report.patches[name]
    assert str(found.verdict) == TABLE[name][release], found.why
    assert bool(found.why) == (found.verdict is Verdict.SUPERSEDED)
    assert report.trouble == ()


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_apply_again_and_revert(release: str, site: Path) -> None:
    """A second apply changes nothing; revert gives back every byte; nothing else is left behind."""
    before = tree(site)
    first = engine.apply(site, chosen(SETS[release]))
    assert set(first.written) == CHANGED[release] == set(first.files)
    assert first.ok
    patched = tree(site)
    again = engine.apply(site, chosen(SETS[release]))
    assert again.written == ()
    assert again.files == first.files
    assert tree(site) == patched
    assert {name: str(one.verdict) for name, one in again.patches.items()} == dict.fromkeys(
        SETS[release], "applied"
    )
    back = engine.revert(site)
    assert set(back.written) == CHANGED[release]
    assert tree(site) == before


@pytest.mark.parametrize("release", wheels.RELEASES)
def test_all_of_them_at_once_on_every_release(release: str, site: Path) -> None:
    """What a release does not need does no harm to it: all patches but the fork's, together."""
    every = [PATCHES[name] for name in VLLM if name != "fork_loader"]
    report = engine.apply(site, every)
    assert set(report.written) == CHANGED[release]
    assert report.ok


@pytest.mark.parametrize("release", ["0.28.0", "0.29.0"])
def test_two_filters_for_one_loader_are_refused(release: str, site: Path) -> None:
    """The text model's loader and the fork's exclude each other, and nothing is written."""
    before = tree(site)
    with pytest.raises(PatchError, match="filtered already by another patch"):
        engine.apply(site, chosen(("text_loader", "fork_loader")))
    assert tree(site) == before
    assert engine.apply(site, chosen(("fork_loader",))).written == (wheels.MODEL,)
    with pytest.raises(PatchError, match="filtered already by another patch"):
        engine.apply(site, chosen(("text_loader",)))


@pytest.mark.parametrize("release", ["0.30.0"])
def test_a_newer_flashinfer_needs_no_slices(release: str, site: Path) -> None:
    """The windows are the model's, the limit is the kernel's: with FlashInfer 0.7 nothing is cut,
    whatever vLLM's version is."""
    kept = wheels.fetched(wheels.FLASHINFER_0_7_2)
    (site / wheels.CORE).write_bytes((kept / wheels.CORE).read_bytes())
    (site / wheels.KERNEL).unlink()
    found = engine.status(site, chosen(("wide_swa",))).patches["wide_swa"]
    assert found.verdict is Verdict.SUPERSEDED
    assert "takes windows of any width" in found.why


@pytest.mark.parametrize("release", ["0.30.0"])
def test_an_unknown_flashinfer_is_refused(release: str, site: Path) -> None:
    """With a kernel whose limits are not known, the slices may be wrong or missing."""
    kernel = site / wheels.KERNEL
    kernel.write_text(kernel.read_text().replace("if (topk != 128) return false;", ""))
    with pytest.raises(PatchError, match="the kernel's limits are not known"):
        engine.apply(site, chosen(("wide_swa",)))


@pytest.mark.parametrize("release", ["0.30.0"])
def test_between_the_releases_the_class_is_elsewhere(release: str, site: Path) -> None:
    """The public repository had the vision class in nvidia/vl_model.py before 0.30.0, where it
    sorts what the mapping yields in one expression: that is patched where it is."""
    text = (site / wheels.VISION).read_text()
    begin = text.index("        child_finalizes = getattr(")
    end = text.index("        loader = AutoWeightsLoader(self)", begin)
    mapped = "mapped = sorted(self.hf_to_vllm_mapper.apply(weights), key=lambda x: x[0])"
    middle = text[:begin] + f"        {mapped}\n" + text[end:]
    middle = middle.replace("_weights_finalized = child_finalizes", "_weights_finalized = True")
    (site / wheels.VISION_NVIDIA).write_text(middle)
    (site / wheels.VISION).unlink()
    report = engine.apply(site, chosen(("stream_load",)))
    assert report.written == (wheels.VISION_NVIDIA,)
    after = (site / wheels.VISION_NVIDIA).read_text()
    assert "mapped = _language_model_first(self.hf_to_vllm_mapper.apply(weights))\n" in after
    assert "sorted(" not in after[after.index("def load_weights") :]


@pytest.mark.parametrize("release", ["0.30.0"])
def test_o_proj_before_it_was_mended(release: str, site: Path) -> None:
    """The nightly is 0.30.0 with the output projection of before: three patches, one apply."""
    (site / wheels.O_PROJ).write_text(wheels.text("0.29.0", wheels.O_PROJ))
    (site / wheels.HELPERS).write_text(wheels.text("0.29.0", wheels.HELPERS))
    report = engine.apply(site, chosen(("o_proj_bf16", "stream_load", "wide_swa")))
    assert {str(one.verdict) for one in report.patches.values()} == {"applied"}
    assert set(report.written) == {*CHANGED["0.30.0"], wheels.O_PROJ}


def other_branch(condition: str) -> str:
    """Return 0.29.0's output projection with its product in one of two branches."""
    text = wheels.text("0.29.0", wheels.O_PROJ)
    start = text.index("    fp8_einsum(")
    end = text.index("    return wo_b(")
    inside = "".join(f"    {line}" for line in text[start:end].splitlines(keepends=True))
    other = f"    if {condition}:\n        z.copy_(by_other_means(o_fp8, wo_a.weight))\n    else:\n"
    return text[:start] + other + inside + text[end:]


@pytest.mark.parametrize("release", ["0.29.0"])
def test_a_second_way_to_multiply_fp8(release: str, site: Path) -> None:
    """A branch of the function that has nothing to do with what the weights are, such as one for
    batch invariance, is FP8 as well: ours goes in front of both."""
    (site / wheels.O_PROJ).write_text(other_branch("INVARIANT and not tma_aligned_scales"))
    report = engine.apply(site, chosen(("o_proj_bf16",)))
    assert report.written == (wheels.O_PROJ,)
    after = (site / wheels.O_PROJ).read_text()
    assert 0 < after.index("return _bf16_o_proj(") < after.index("if INVARIANT")
    engine.revert(site)
    assert (site / wheels.O_PROJ).read_text() == other_branch(
        "INVARIANT and not tma_aligned_scales"
    )


@pytest.mark.parametrize("release", ["0.29.0"])
@pytest.mark.parametrize("condition", ["is_plain(wo_a)", "weight_scale is None", "plain"])
def test_a_branch_that_may_be_for_bf16_is_not_guessed(
    release: str, condition: str, site: Path
) -> None:
    """A function that asks about the weight may have mended this already, in a way not known."""
    text = other_branch(condition)
    text = text.replace(
        "    weight_scale = (\n", "    plain = no_scales(wo_a)\n    weight_scale = (\n"
    )
    (site / wheels.O_PROJ).write_text(text)
    with pytest.raises(PatchError, match="decides by `"):
        engine.apply(site, chosen(("o_proj_bf16",)))
    assert (site / wheels.O_PROJ).read_text() == text


STREAMS_ITSELF = [
    "AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)",
    "self.language_model.load_weights(only_language(self.hf_to_vllm_mapper.apply(weights)))",
]


@pytest.mark.parametrize("release", ["0.30.0"])
@pytest.mark.parametrize("loads", STREAMS_ITSELF)
def test_a_loader_that_does_not_sort_is_not_guessed(release: str, loads: str, site: Path) -> None:
    """Public versions of the class load without sorting, each in its way. What such a loader does
    with the order is not known here; the refusal says what to look at."""
    text = (site / wheels.VISION).read_text()
    begin = text.index("        child_finalizes = getattr(")
    end = text.index("    def process_weights_after_loading", begin)
    (site / wheels.VISION).write_text(f"{text[:begin]}        return {loads}\n\n{text[end:]}")
    with pytest.raises(PatchError, match=r"\(line \d+\) neither sorts the weights"):
        engine.apply(site, chosen(("stream_load",)))


@pytest.mark.parametrize("release", ["0.28.0", "0.30.0"])
def test_revert_without_the_record(
    release: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody removed what the engine keeps: revert says for each file that it cannot."""
    engine.apply(site, chosen(SETS[release]))
    patched = tree(site)
    shutil.rmtree(site / engine.KEPT)
    assert patches.main(["revert", "--site", str(site)]) == 1
    words = capsys.readouterr().err
    assert all(path in words for path in CHANGED[release])
    assert tree(site).items() <= patched.items()


DAMAGE = [
    ("o_proj_bf16", "0.28.0", wheels.O_PROJ, "    fp8_einsum(", "    other_einsum(", "fp8_einsum"),
    ("o_proj_bf16", "0.28.0", wheels.O_PROJ, "def deep_gemm_fp8_o_proj", "def renamed", "found 0"),
    ("o_proj_bf16", "0.28.0", wheels.O_PROJ, "    wo_a: nn.Module,\n", "", "takes no wo_a"),
    ("o_proj_bf16", "0.28.0", wheels.HELPERS, "def _fused_inverse_rope_gptj", "def x", "found 0"),
    ("text_loader", "0.28.0", wheels.MODEL, "class DeepseekV4ForCausalLM(", "class X(", "found 0"),
    (
        "text_loader",
        "0.29.0",
        wheels.MODEL,
        "load_weights(weights, mapper=",
        "load(x=",
        "handing on",
    ),
    (
        "draft_bias_vl",
        "0.28.0",
        wheels.DRAFT,
        "rest = m.group(2)",
        "rest = m[2]",
        "rest = m.group(2)",
    ),
    ("stream_load", "0.30.0", wheels.VISION, "key=lambda x: x[0]", "key=len", "another way"),
    (
        "stream_load",
        "0.30.0",
        wheels.VISION,
        "iter(sorted(mapped",
        "iter(order(mapped",
        "neither sorts",
    ),
    ("wide_swa", "0.30.0", wheels.CORE, "            return_lse=False,\n", "", "calls"),
    ("wide_swa", "0.30.0", wheels.ATTENTION, "swa_indices_chunk = swa", "chunk = swa", "found 0"),
    (
        "wide_swa",
        "0.30.0",
        wheels.WINDOWS,
        "prefill_left_visible",
        "left",
        "no prefill_left_visible",
    ),
    ("fork_loader", "0.28.0", wheels.MODEL, '"topk_method", None)', '"topk_method", 1)', "found 0"),
]


@pytest.mark.parametrize(("name", "release", "path", "old", "new", "words"), DAMAGE)
def test_unknown_code_is_refused_and_named(
    name: str, release: str, path: str, old: str, new: str, words: str, site: Path
) -> None:
    """Where what a patch relies on is not as it was seen, it says which file, what it looked for
    and what it found; no file of the set is written."""
    text = (site / path).read_text()
    assert old in text
    (site / path).write_text(text.replace(old, new))
    before = tree(site)
    found = engine.status(site, [PATCHES[name]]).patches[name]
    assert found.verdict is Verdict.DRIFTED
    assert path in found.why
    assert words in found.why
    with pytest.raises(PatchError) as refused:
        engine.apply(site, chosen(SETS[release] if name in SETS[release] else (name,)))
    assert path in str(refused.value)
    assert "nothing was changed" in str(refused.value)
    assert tree(site) == before


@pytest.mark.parametrize("release", ["0.28.0", "0.30.0"])
def test_half_of_a_patch_is_refused(release: str, site: Path) -> None:
    """A file from which part of what we put there was taken out again is not patched once more."""
    engine.apply(site, chosen(SETS[release]))
    words = {"0.28.0": ("        weights = _text_weights(weights, self.config)\n", wheels.MODEL)}
    words["0.30.0"] = ("            _SparseMLASegment,\n", wheels.CORE)
    gone, path = words[release]
    text = (site / path).read_text()
    assert text.count(gone) == 1
    (site / path).write_text(text.replace(gone, ""))
    with pytest.raises(PatchError, match="holds parts of"):
        engine.apply(site, chosen(SETS[release]))


@pytest.mark.parametrize("release", ["0.30.0"])
def test_windows_line_ends_survive(release: str, site: Path) -> None:
    """Real files with other line ends and a mark in front are patched in their own style."""
    for path in CHANGED[release]:
        data = (site / path).read_bytes()
        (site / path).write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"))
    before = tree(site)
    engine.apply(site, chosen(SETS[release]))
    for path in CHANGED[release]:
        data = (site / path).read_bytes()
        assert data.startswith(b"\xef\xbb\xbf")
        assert data.count(b"\n") == data.count(b"\r\n") > before[path].count(b"\n")
    assert engine.apply(site, chosen(SETS[release])).written == ()
    engine.revert(site)
    assert tree(site) == before


@pytest.mark.parametrize("release", ["0.28.0", "0.30.0"])
def test_the_command(release: str, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status is a finding until the patches are in; apply and status agree on every hash."""
    names = ",".join(SETS[release])
    asked = ["--site", str(site), "--json"]
    assert patches.main(["status", *asked, "--set", names]) == 1
    planned = json.loads(capsys.readouterr().out)
    assert patches.main(["apply", *asked, "--set", names]) == 0
    done = json.loads(capsys.readouterr().out)
    assert patches.main(["status", *asked, "--set", names]) == 0
    after = json.loads(capsys.readouterr().out)
    assert planned["files"] == done["files"] == after["files"]
    assert after["ok"] is True
    assert patches.main(["revert", *asked]) == 0

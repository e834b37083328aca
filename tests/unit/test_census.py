"""The census names components, counts every byte once and says which are not as expected."""

import json
import os
import pwd
from pathlib import Path

import pytest

from dsv4 import census, guard, guarded, layout, loaded, memory, store, systemd, watchdog
from tests.lab import exl3_pack


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("census") / "pack"
    exl3_pack.write(root, exl3_pack.SMALL, count=4)
    return root


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        ("layers.3.ffn.experts.7.w1.trellis", "routed experts"),
        ("language_model.model.layers.3.ffn.experts.w13_trellis", "routed experts"),
        ("mtp.0.ffn.experts.7.w2.scale", "draft experts"),
        ("mtp.2.markov_head.markov_w1.weight", "draft"),
        ("layers.0.ffn.shared_experts.w2.weight", "shared experts"),
        ("layers.0.ffn.gate.bias_vl", "router"),
        ("layers.0.attn.indexer.compressor.wkv.weight", "attention indexer"),
        ("layers.0.attn.compressor.ape", "attention compressor"),
        ("layers.0.attn.q_norm.weight", "attention"),
        ("model.layers.0.self_attn.qkv_proj.weight", "attention"),
        ("layers.0.hc_attn_fn", "stream mixing"),
        ("hc_head_base", "stream mixing"),
        ("model.layers.1.mlp.gate_proj.weight", "feed forward"),
        ("embed.weight", "embedding"),
        ("language_model.lm_head.weight", "output head"),
        ("vision.blocks.3.mlp.w1.weight", "vision"),
        ("image_newline", "vision"),
        ("layers.1.attn_norm.weight", "norms"),
        ("model.layers.1.post_attention_layernorm.weight", "norms"),
        ("something_new", "other"),
    ],
)
def test_every_name_has_its_component(tensor: str, part: str) -> None:
    assert census.component(tensor) == part


def test_nothing_of_the_real_layout_is_other() -> None:
    parts = {census.component(name) for name, _ in exl3_pack.tensors(exl3_pack.Scale())}
    assert census.OTHER not in parts
    assert {part for _, part in census.COMPONENTS} - parts == {"feed forward"}


def test_bytes_add_up(pack: Path) -> None:
    rows = census.count(census.on_disk(pack))
    made = dict(exl3_pack.tensors(exl3_pack.SMALL))
    assert sum(row.bytes for row in rows) == sum(map(exl3_pack.size_of, made.values()))
    assert sum(row.tensors for row in rows) == len(made)
    sizes = list(census.by_component(rows).values())
    assert sizes == sorted(sizes, reverse=True)


def test_a_component_of_another_size_is_named(pack: Path) -> None:
    rows = census.count(census.on_disk(pack))
    right = census.by_component(rows)
    assert census.differences(rows, right) == []
    wrong = {**right, "draft experts": right["draft experts"] + 1, "fourth": 10**9}
    assert [line.split(":")[0] for line in census.differences(rows, wrong)] == [
        "draft experts",
        "fourth",
    ]


def test_the_command(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert census.main(["--pack-root", str(pack), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["bytes"] == sum(found["components"].values())
    assert census.main(["--pack-root", str(pack)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("total ")


def test_a_damaged_pack_is_named_and_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exl3_pack.write(tmp_path, exl3_pack.SMALL, count=4)
    (tmp_path / "model-00002-of-00004.safetensors").write_bytes(b"<html>")
    assert census.main(["--pack-root", str(tmp_path)]) == 3
    assert "model-00002-of-00004.safetensors: " in capsys.readouterr().err
    assert census.main(["--pack-root", str(tmp_path / "none"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_what_is_expected_comes_from_the_deploy(tmp_path: Path) -> None:
    spec = tmp_path / "fetch.json"
    store.write_json(spec, {"name": "p", "expected": {"components": {"vision": 3}}})
    assert census.expectation(spec) == ("p", {"vision": 3})
    assert census.expectation(tmp_path / "none") == (None, {})


def test_counting_loads_the_served_model_as_short_as_it_goes() -> None:
    serve = {"model": "/v", "quantization": "exl3", "max_model_len": 65536, "port": 1}
    assert loaded.arguments(serve, device="cpu") == {
        "model": "/v",
        "quantization": "exl3",
        "max_model_len": 2048,
        "max_num_seqs": 1,
        "enforce_eager": True,
    }
    assert loaded.arguments(serve, device="cuda")["kv_cache_memory_bytes"] == 2 << 30


def info(free: float, available: float) -> memory.MemInfo:
    return memory.MemInfo(121.7, free, available, 0, 0, 0, 0)


CONFIG = guard.Guard(memory=guard.Memory(utilisation=0.8, headroom_gib=5.0))


@pytest.mark.parametrize("state", ["active", "activating", "deactivating", "reloading", ""])
def test_nothing_is_loaded_beside_the_service(state: str) -> None:
    assert "no memory for a second copy" in str(census.refusal(CONFIG, info(120, 120), state))


@pytest.mark.parametrize("state", ["inactive", "failed"])
@pytest.mark.parametrize(
    ("free", "available", "ok"),
    [
        (110.0, 115.0, True),
        (98.0, 115.0, False),  # page cache counts as used, as it does for CUDA
        (110.0, 102.0, False),  # what would be left is the watchdog's to end
    ],
)
def test_loading_is_held_to_what_a_start_is(
    free: float, available: float, ok: bool, state: str
) -> None:
    found = census.refusal(CONFIG, info(free, available), state)
    assert (found is None) == ok
    assert ok or "cache_drop" in str(found)


def test_the_command_refuses_before_it_loads(
    pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not as root, no such user, no memory, a broken guard: each with its reason, nothing run."""

    def never(*_: object, **__: object) -> guarded.Ended:
        raise AssertionError("it was started")

    monkeypatch.setattr(guarded, "run", never)
    monkeypatch.setattr(systemd, "show", lambda *_: {"ActiveState": "inactive"})
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 10 kB\n")
    config = tmp_path / "guard.json"
    config.write_text(json.dumps({"user": "nobody"}))

    def said(*, uid: int = 0) -> str:
        monkeypatch.setattr("os.geteuid", lambda: uid)
        words = ["--loaded", "--guard", str(config), "--meminfo", str(meminfo)]
        assert census.main(["--pack-root", str(pack), *words]) == 3
        return capsys.readouterr().err

    assert "run it as root" in said(uid=1000)
    assert "wanted" in said()
    meminfo.write_text("junk")
    assert "meminfo" in said()
    config.write_text(json.dumps({"user": "no-such-user"}))
    assert "no-such-user" in said()
    config.write_text("{")
    assert "cannot be read" in said()


def test_it_is_loaded_as_the_service_s_user(
    pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And what comes of it says that no Spark has seen it."""
    runtime, meminfo = tmp_path / "runtime", tmp_path / "meminfo"
    (runtime / "bin").mkdir(parents=True)
    (runtime / "bin/python").touch()
    size = 120 << 20
    meminfo.write_text(f"MemTotal: {size} kB\nMemFree: {size} kB\nMemAvailable: {size} kB\n")
    config = tmp_path / "guard.json"
    config.write_text(json.dumps({"user": "nobody"}))
    given: dict[str, object] = {}

    def run(argv: list[str], **words: object) -> guarded.Ended:
        given.update(words, argv=argv)
        return guarded.Ended(0, 'noise\n{"tensors": [["vision.x", "bfloat16", 6]], "torch": "2"}')

    monkeypatch.setattr(guarded, "run", run)
    monkeypatch.setattr(watchdog, "lock_memory", lambda: None)
    monkeypatch.setattr(systemd, "show", lambda *_: {"ActiveState": "failed"})
    monkeypatch.setattr(layout, "CURRENT", runtime)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    words = ["--loaded", "--json", "--guard", str(config), "--meminfo", str(meminfo)]
    assert census.main(["--pack-root", str(pack), *words]) == 0
    found = json.loads(capsys.readouterr().out)["loaded"]
    assert found["rows"] == [{"component": "vision", "dtype": "bfloat16", "tensors": 1, "bytes": 6}]
    assert "unverified" in found["note"]
    nobody = pwd.getpwnam("nobody")
    assert given["user"] == (nobody.pw_uid, nobody.pw_gid, [nobody.pw_gid])
    assert given["argv"] == [
        *(str(runtime / "bin/python"), "-P", "-m", "dsv4.loaded"),
        str(os.getpid()),
    ]


@pytest.mark.parametrize("out", ["", "Traceback", "[]", "{}", '{"tensors": 3}', '{"tensors": [1]}'])
def test_a_load_that_failed_is_said(out: str) -> None:
    with pytest.raises(RuntimeError, match="status 1"):
        census.counted(guarded.Ended(1, out))

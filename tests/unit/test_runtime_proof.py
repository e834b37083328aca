"""The runtime part of verify: what the engine would find inside, asked of the runtime itself."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsv4 import findings, guard, inside, memory, runtime_proof, store
from dsv4.findings import Finding


def module(monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> None:
    """Have a module of this name, with its parents."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    made = ModuleType(name)
    vars(made).update(values)
    monkeypatch.setitem(sys.modules, name, made)


def manager(**known: Any) -> Any:
    """Return a table of parsers that raises for others, as vLLM's does."""
    return SimpleNamespace(
        get_tool_parser=lambda name: known[name], get_reasoning_parser=lambda name: known[name]
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Modules as a finished runtime of a route for a Spark has them."""
    cuda = SimpleNamespace(is_available=lambda: True, mem_get_info=lambda: (20 << 30, 121 << 30))
    version = SimpleNamespace(cuda="13.0")
    module(monkeypatch, "torch", version=version, cuda=cuda, __version__="2.13.0+cu130")
    module(monkeypatch, "exllamav3_ext", exl3_moe=lambda: None)
    module(monkeypatch, "vllm.plugins", load_general_plugins=lambda: None)
    name = "vllm.model_executor.layers.quantization"
    module(monkeypatch, name, QUANTIZATION_METHODS=["fp8", "exl3"])
    module(monkeypatch, "vllm.tool_parsers", ToolParserManager=manager(deepseek_v4=1))
    module(monkeypatch, "vllm.reasoning", ReasoningParserManager=manager(deepseek_v4=1))
    return monkeypatch


WANTED = {
    "torch_cuda": "13.0",
    "extension": True,
    "plugin": True,
    "tool_parser": "deepseek_v4",
    "reasoning_parser": "deepseek_v4",
    "cuda_memory": True,
}


def faults(wanted: dict[str, Any] | None = None) -> dict[str, str]:
    """Return what is wrong inside."""
    found = inside.look(wanted or WANTED)["faults"]
    return {name: text for name, text in found.items() if text is not None}


def test_a_finished_runtime_has_no_fault(engine: pytest.MonkeyPatch) -> None:
    """Every question is answered, and CUDA's own figure comes along."""
    found = inside.look(WANTED)
    assert set(found["faults"]) == {
        *("torch", "extension", "plugin", "tool_parser", "reasoning_parser", "cuda")
    }
    assert faults() == {}
    assert found["cuda_memory"] == {"free": 20 << 30, "total": 121 << 30}


def test_each_fault_is_named_and_hides_no_other(engine: pytest.MonkeyPatch) -> None:
    """A torch for the processor, an extension without its function, a plugin that did nothing."""
    cpu = SimpleNamespace(is_available=lambda: False)
    module(engine, "torch", version=SimpleNamespace(cuda=None), cuda=cpu, __version__="2.13.0+cpu")
    module(engine, "exllamav3_ext")
    module(engine, "vllm.model_executor.layers.quantization", QUANTIZATION_METHODS=["fp8"])
    module(engine, "vllm.tool_parsers", ToolParserManager=manager())
    found = faults()
    assert set(found) == {"torch", "extension", "plugin", "tool_parser"}
    assert "built for CUDA None, not 13.0" in found["torch"]
    assert "no exl3_moe" in found["extension"]
    assert "did not register exl3" in found["plugin"]
    assert inside.look(WANTED)["cuda_memory"] is None


def test_a_module_that_ends_the_process_is_a_fault(engine: pytest.MonkeyPatch) -> None:
    """Even that is an answer: the rest is still asked."""

    def leave() -> None:
        raise SystemExit("licence expired\nsecond line")

    module(engine, "vllm.plugins", load_general_plugins=leave)
    assert faults() == {"plugin": "SystemExit: licence expired"}


def test_what_a_route_has_not_is_not_asked() -> None:
    """The lab's has no extension and no plugin."""
    found = inside.look({"torch_cuda": None})
    assert set(found["faults"]) == {"torch"}


def home(tmp_path: Path, script: str) -> Path:
    """Return a runtime whose interpreter is this shell script."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin/python").chmod(0o755)
    return tmp_path


@pytest.fixture(autouse=True)
def _as_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_proof, "as_engine", lambda user: {})


@pytest.mark.parametrize(
    ("script", "answer", "why"),
    [
        (f"echo noise; echo '{inside.MARK}{{\"a\": 1}}'; echo more", {"a": 1}, ""),
        (f"echo '{inside.MARK}[1]'", {}, "no object"),
        ("echo 'ImportError: libcudart' >&2; exit 1", {}, "ended with 1: ImportError: libcudart"),
        ("kill -SEGV $$", {}, "ended with -11"),
        ("exit 0", {}, "ended with 0: no word"),
    ],
)
def test_the_interpreters_answer(
    script: str, answer: dict[str, int], why: str, tmp_path: Path
) -> None:
    """Its one line among others, or in one line why there is none."""
    found, text = runtime_proof.call(home(tmp_path, script), {}, "dsv4")
    assert found == answer
    assert why in text
    assert bool(text) is not bool(answer)


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    """No such file is an answer too."""
    assert "No such file" in runtime_proof.call(tmp_path, {}, "dsv4")[1]


def test_an_interpreter_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended."""
    monkeypatch.setattr(runtime_proof, "LIMIT_S", 0.3)
    assert "timed out" in runtime_proof.call(home(tmp_path, "exec sleep 60"), {}, "dsv4")[1]


def test_the_environment_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    """Comments left out, an equals sign in a value kept."""
    (tmp_path / "environment").write_text("# by the deploy\nA=1\nB=x=y\n\n")
    assert runtime_proof.environment(tmp_path / "environment") == {"A": "1", "B": "x=y"}
    assert runtime_proof.environment(tmp_path / "none") == {}


def by_check(found: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in found}


def test_findings_of_what_is_inside() -> None:
    """A fault has its remedy; CUDA's figure stands beside the model's."""
    answer = {
        "versions": {"vllm": "0.30.0"},
        "faults": {"torch": None, "plugin": "ImportError: no", "cuda": None},
        "cuda_memory": {"free": 20 << 30, "total": 121 << 30},
    }
    found = by_check(list(runtime_proof.inner(answer, 21.5)))
    assert (found["torch"].state, found["plugin"].state) == ("ok", "fault")
    assert "run the deploy" in found["plugin"].remedy
    assert "off by +1.5" in found["cuda memory"].text
    assert findings.status(found.values()) == 1


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The link to a runtime whose bytes are as they were built."""
    made = tmp_path / "runtimes/lab-1"
    made.mkdir(parents=True)
    store.write_json(made / "manifest.json", {"inputs": {"exllamav3": {}}, "torch_cuda": "13.0"})
    monkeypatch.setattr("dsv4.runtime.inspect", lambda path: {"ok": True, "faults": []})
    (tmp_path / "current").symlink_to("runtimes/lab-1")
    return tmp_path / "current"


def test_imports_are_not_made_where_the_watchdog_would_be_near(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the arithmetic; at the end of a deploy it is no reason to hold it up."""
    values = {"MemTotal": 127600748, "MemFree": 9000000, "MemAvailable": 6500000, "Cached": 1}
    lines = [f"{name}: {kilobytes} kB\n" for name, kilobytes in values.items()]
    info = memory.parse_meminfo("".join(lines))
    monkeypatch.setattr(memory, "read_meminfo", lambda: info)
    found = by_check(runtime_proof.prove(guard.Guard(), again=True, link=served))
    assert found["imports"].state == "unknown"
    assert "below the watchdog's soft floor of 5.0" in found["imports"].text
    found = by_check(runtime_proof.prove(guard.Guard(), again=False, link=served))
    assert found["imports"].state == "skipped"


def test_the_runtime_is_asked_what_it_was_built_of(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extension and parsers, not a plugin that was never in it."""
    config = guard.Guard(
        memory=guard.Memory(device="cpu", soft_floor_gib=0.0),
        offers=guard.Offers(tool_parser="p"),
    )
    asked: list[Any] = []

    def call(where: Path, question: Any, user: str) -> tuple[dict[str, Any], str]:
        asked.append(json.loads(json.dumps(question)))
        return {"versions": {}, "faults": {"torch": None}}, ""

    monkeypatch.setattr(runtime_proof, "ROOM_GIB", -1e6)
    monkeypatch.setattr(runtime_proof, "call", call)
    found = runtime_proof.prove(config, again=True, link=served)
    assert findings.status(found) == 0
    assert asked == [
        {
            "torch_cuda": "13.0",
            "extension": True,
            "plugin": False,
            "tool_parser": "p",
            "reasoning_parser": "",
            "cuda_memory": False,
        }
    ]


def test_no_runtime_is_a_fault(tmp_path: Path) -> None:
    """Nothing is in service."""
    (found,) = runtime_proof.prove(guard.Guard(), again=True, link=tmp_path / "none")
    assert (found.state, found.remedy) == ("fault", "run the deploy")

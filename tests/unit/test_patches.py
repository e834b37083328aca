"""The patches as a set: names, the command, what they inject, and how places are found."""

import ast
import builtins
import json
from pathlib import Path

import pytest

from dsv4 import patches
from dsv4.patches import PATCHES, engine, inject, source
from dsv4.patches.engine import Outcome, Verdict
from dsv4.patches.source import Source, Unknown

NAMES = [
    *("o_proj_bf16", "text_loader", "draft_bias_vl", "stream_load", "wide_swa", "fork_loader"),
    "exllamav3_aarch64",
]

BLOCKS = sorted(
    path.stem for path in Path(inject.__file__).parent.glob("*.py") if path.stem != "__init__"
)


def test_the_patches_by_name() -> None:
    """The names that routes use; each patch says in a line what it is for."""
    assert list(PATCHES) == NAMES
    assert all(PATCHES[name].name == name for name in NAMES)
    assert all(patch.summary and "\n" not in patch.summary for patch in PATCHES.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [None, "", "def f(:\n", "x = 1\n", "\0"])
def test_no_patch_applies_to_what_it_does_not_know(name: str, text: str | None) -> None:
    """A file that is missing, empty, broken or another one is never changed, and the reason given
    names what was missed."""
    for edit in PATCHES[name].edits:
        found = edit.transform(text)
        assert found.verdict in {Verdict.DRIFTED, Verdict.SUPERSEDED}
        assert found.why
        assert "\n" not in found.why


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_root_is_never_changed(name: str, tmp_path: Path) -> None:
    """Nothing to patch is drift, not success."""
    report = engine.status(tmp_path, [PATCHES[name]])
    assert report.patches[name].verdict is Verdict.DRIFTED
    with pytest.raises(engine.PatchError, match="nothing was changed"):
        engine.apply(tmp_path, [PATCHES[name]])
    assert list(tmp_path.iterdir()) == []


def test_the_fingerprint_is_the_sets() -> None:
    """Another set is another runtime; the order is part of it."""
    prints = {
        patches.fingerprint(names)
        for names in ((), ("wide_swa",), ("stream_load", "wide_swa"), ("wide_swa", "stream_load"))
    }
    assert len(prints) == 4
    assert patches.fingerprint(["wide_swa"]) == patches.fingerprint(("wide_swa",))
    with pytest.raises(KeyError):
        patches.fingerprint(["absent"])


# The command


def test_the_command_names_what_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """A patch that does not exist is a mistake in the call, and the others are named."""
    assert patches.main(["status", "--site", "/", "--set", "wide_swa, wide_sea"]) == 2
    words = capsys.readouterr().err
    assert "'wide_sea'" in words
    assert all(name in words for name in NAMES)


def test_apply_wants_a_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No runtime needs all patches, some exclude each other."""
    assert patches.main(["apply", "--site", str(tmp_path)]) == 2
    assert "--set" in capsys.readouterr().err


def test_status_of_all_looks_at_each_by_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without a set every patch has its verdict; that is a finding where one is not in place."""
    assert patches.main(["status", "--site", str(tmp_path), "--json"]) == 1
    out = capsys.readouterr().out
    answer = json.loads(out)
    assert out.count("\n") == 1
    assert list(answer["patches"]) == sorted(NAMES)
    assert answer["ok"] is False
    assert {one["verdict"] for one in answer["patches"].values()} == {"drifted"}


def test_a_refusal_is_one_object_and_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The object carries the verdicts, the line the reason."""
    asked = ["apply", "--site", str(tmp_path), "--set", "wide_swa", "--json"]
    assert patches.main(asked) == 1
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert answer["ok"] is False
    assert answer["patches"]["wide_swa"]["verdict"] == "drifted"
    assert output.err == f"dsv4 patches: {answer['error']}\n"
    assert output.err.count("\n") == 1


def test_a_site_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line, for each command."""
    for command in (["status"], ["apply", "--set", "wide_swa"], ["revert"]):
        assert patches.main([*command, "--site", str(tmp_path / "absent")]) == 1
        assert "is no directory that can be read" in capsys.readouterr().err


def test_revert_takes_no_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It takes back all of them: whoever names one would lose the others."""
    assert patches.main(["revert", "--site", str(tmp_path), "--set", "wide_swa"]) == 2
    assert "leave --set out" in capsys.readouterr().err


def test_words_for_a_person(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Status says each verdict with its reason; a revert without patches says so."""
    assert patches.main(["status", "--site", str(tmp_path), "--set", "wide_swa"]) == 1
    assert capsys.readouterr().out.startswith("wide_swa: drifted (")
    assert patches.main(["revert", "--site", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to do\n"


# What is injected


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_injected_stands_by_itself(name: str) -> None:
    """A block is functions with docstrings and nothing else: no import that only the module here
    has, no word of this tool in what runs on the target but where it names a command."""
    block = inject.block(name)
    tree = ast.parse(block)
    assert tree.body
    for node in tree.body:
        assert isinstance(node, ast.FunctionDef)
        assert node.name.startswith("_")
        assert ast.get_docstring(node)
    assert inject.CUT not in block


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_injected_knows_its_names(name: str) -> None:
    """Every name a block uses is its own, a builtin, or one the patch makes sure of."""
    tree = ast.parse(inject.block(name))
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    every = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in every if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            bound |= {alias.name for alias in node.names}
    free = {node.id for node in every} - own - bound - set(dir(builtins))
    assert free <= {"torch", "nn", "re", "Any", "Callable", "Iterable", "Iterator"}


def test_a_module_without_the_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is injected begins at one known line."""
    monkeypatch.setattr(inject, "CUT", "# another line\n")
    with pytest.raises(ValueError, match="wants the line"):
        inject.block("o_proj")


# Finding places


TEXT = '''"""Docs."""

from typing import Any, Final

ÜMLAUT = "ä"; value = call("ö", other)  # comment


class Owner:
    @decorated
    def method(self, weights: Any, *, more: int) -> None:
        """Do."""
        self.other(weights)


def plain():
    return 1
'''


def test_nothing_but_the_place_is_changed() -> None:
    """Comments, blank lines and text before the place, whatever its alphabet, stay."""
    found = Source(TEXT)
    (call,) = source.calls(found.tree, "call")
    found.replace(call, "done()")
    assert found.changed() == TEXT.replace('call("ö", other)', "done()")
    assert found.of(call) == 'call("ö", other)'


def test_lines_go_before_and_after() -> None:
    """Before a function is before its decorators; several at one place keep their order."""
    found = Source(TEXT)
    method = found.function("Owner.method")
    found.before(method, "    # first\n")
    found.before(method, "    # second\n")
    found.before(source.first_statement(method), "        # body\n")
    found.after(found.klass("Owner"), "# after\n")
    expected = TEXT.replace("    @decorated", "    # first\n    # second\n    @decorated")
    expected = expected.replace("        self.other", "        # body\n        self.other")
    expected = expected.replace("weights)\n\n\ndef", "weights)\n# after\n\n\ndef")
    assert found.changed() == expected


def test_imports_are_added_once() -> None:
    """What is there is used, a line of the same module is made longer, else one is put first."""
    found = Source(TEXT)
    found.need(Any="typing")
    assert found.changed() == TEXT
    found.need(Final="typing", Callable="typing", re="re", Iterable="collections.abc")
    assert found.changed() == TEXT.replace(
        "from typing import Any, Final\n",
        "import re\n"
        "from collections.abc import Iterable\n"
        "from typing import Any, Callable, Final\n",
    )
    future = Source("from __future__ import annotations\nimport os\n")
    future.need(Any="typing")
    assert future.changed() == (
        "from __future__ import annotations\nfrom typing import Any\nimport os\n"
    )
    with pytest.raises(Unknown, match="imports nothing, not even Any"):
        Source("x = 1\n").need(Any="typing")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "wanted a function absent once, found 0"),
        ("Owner.absent", r"wanted a function Owner\.absent once, found 0"),
        ("Absent.method", "wanted a class Absent once, found 0"),
    ],
)
def test_what_is_not_found_is_named(name: str, words: str) -> None:
    """With how often it was looked for and found."""
    with pytest.raises(Unknown, match=words):
        Source(TEXT).function(name)


def test_what_is_there_twice_is_not_guessed() -> None:
    """Two functions of one name are two places."""
    with pytest.raises(Unknown, match="wanted a function plain once, found 2"):
        Source(TEXT + "\n\ndef plain():\n    return 2\n").function("plain")


def test_parameters_in_order() -> None:
    """Keyword-only ones too."""
    assert source.parameters(Source(TEXT).function("Owner.method")) == ["self", "weights", "more"]


def test_an_outcome_says_what_it_must() -> None:
    """A text goes with applies and with nothing else; what does not apply has a reason."""
    with pytest.raises(ValueError, match="new text"):
        Outcome(Verdict.APPLIES)
    with pytest.raises(ValueError, match="new text"):
        Outcome(Verdict.APPLIED, "text")
    for verdict in (Verdict.DRIFTED, Verdict.SUPERSEDED):
        with pytest.raises(ValueError, match="say why"):
            Outcome(verdict)


def test_half_of_a_patch_is_no_patch() -> None:
    """All pieces once, or none and no trace."""
    asked = ("p", ("piece one\n", "piece two\n"), ("mark",))
    assert source.is_applied("piece one\npiece two\n mark", *asked)
    assert not source.is_applied("nothing", *asked)
    for text in ("piece one\n", "piece one\npiece two\npiece two\n"):
        with pytest.raises(Unknown, match=r"holds parts of p \([12] of 2 pieces"):
            source.is_applied(text, *asked)
    with pytest.raises(Unknown, match="has 'mark' in it, as from another version of p"):
        source.is_applied("mark", *asked)

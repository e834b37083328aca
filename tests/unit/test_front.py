"""`dsv4`: one front for the owner's tools, each with its help and its JSON."""

import importlib

import pytest

from dsv4 import __main__ as front


def test_the_owners_tools_are_named_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, on one screen."""
    assert front.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[1]: line for line in lines if line.startswith("  dsv4 ")}
    assert rows.keys() == front.OWNER.keys()
    assert rows.keys() >= {"status", "doctor", "verify", "bench", "key", "receipt", "remove"}
    assert max(map(len, rows.values())) <= 80
    assert len(lines) <= 24


@pytest.mark.parametrize("name", sorted(front.OWNER))
def test_each_tool_says_what_it_does_and_takes_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person who types --help gets its name, and a program --json."""
    with pytest.raises(SystemExit) as ended:
        front.main([name, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: dsv4 {name} ")
    if name == "receipt":  # each of its commands has its own
        with pytest.raises(SystemExit):
            front.main([name, "list", "--help"])
        said = capsys.readouterr().out
    assert "--json" in said


@pytest.mark.parametrize("words", [[], ["nonsense"], ["__main__"], ["layout"], ["../x"]])
def test_what_is_no_tool_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Only what is listed runs, though every module could be imported."""
    assert front.main(words) == 2
    assert "dsv4: name a tool" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(front.OWNER.keys() | front.INTERNAL))
def test_what_is_listed_is_there(name: str) -> None:
    """Each name is a module with a `main`."""
    assert callable(importlib.import_module(f"dsv4.{name}").main)

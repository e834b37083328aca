"""Looking, and taking away: through the real command line, on hosts that do not exist."""

import json
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle, results
from tests.plan.test_full_plan import FAKE, run

LIST = "python3 -m dsv4 remove --json"


def host(**answers: Any) -> dict[str, object]:
    """Return a host with tools of this version that gives these answers, by tool."""
    state = {"ok": True, "paths": {}, "library": bundle.library_hash()}
    said = {"state --json": state, **{f"/opt/dsv4/bin/dsv4 {k}": v for k, v in answers.items()}}
    return {**FAKE, "fake_responses": {words: json.dumps(it) for words, it in said.items()}}


def holding(*lines: str) -> dict[str, object]:
    """Return a host of which a removal would take this away."""
    found = {"ok": True, "pending": len(lines), "lines": list(lines)}
    gone = {"ok": True, "done": True, "pending": 0, "lines": list(lines)}
    answers = {
        "python3 -m dsv4 remove --yes": json.dumps(gone),
        LIST: json.dumps(found),
        "state --json": json.dumps({"ok": True, "paths": {}}),
    }
    return {**FAKE, "fake_responses": answers}


def test_a_dry_removal_lists_what_would_go(tmp_path: Path) -> None:
    """Each thing by its name on the host that has it; the other host has nothing to be done."""
    hosts = {"a": holding("remove tree /opt/dsv4/tools", "keep packs /x"), "b": holding()}
    done = run(tmp_path, hosts, "deploy/remove.py")
    assert done.returncode == 0, done.stderr
    (step,) = json.loads(done.stdout)["plan"]
    assert step["names"] == ["Removal | Take away what was put there"]
    assert step["hosts_with_change"] == ["@fake/a"]
    assert "[@fake/a] remove tree /opt/dsv4/tools" in done.stderr
    assert "[@fake/a] keep packs /x" in done.stderr
    assert "[@fake/b] remove" not in done.stderr


@pytest.mark.parametrize(("lines", "changes"), [((), 0), (("remove tree /opt/dsv4/tools",), 1)])
def test_a_removal_changes_what_has_something(
    tmp_path: Path, lines: tuple[str, ...], changes: int
) -> None:
    """The second one finds nothing and counts no change."""
    done = run(tmp_path, {"a": holding(*lines)}, "deploy/remove.py", "-y")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"]["totals"]["success"] == changes


def test_what_would_not_go_fails_the_host(tmp_path: Path) -> None:
    """The path and why are an error."""
    data = holding("remove file /etc/tmpfiles.d/dsv4.conf")
    fault = {"ok": False, "lines": ["x"], "faults": {"/etc/tmpfiles.d/dsv4.conf": "not permitted"}}
    answers: Any = data["fake_responses"]
    data["fake_responses"] = {**answers, "python3 -m dsv4 remove --yes": json.dumps(fault)}
    done = run(tmp_path, {"a": data}, "deploy/remove.py", "-y")
    assert done.returncode == 1
    assert "/etc/tmpfiles.d/dsv4.conf: not permitted" in done.stderr


@pytest.mark.parametrize("tool", ["status", "doctor"])
@pytest.mark.parametrize("ok", [True, False])
def test_what_a_machine_says_of_itself_is_shown(tmp_path: Path, tool: str, ok: bool) -> None:
    """Its own words, a line each; something wrong fails the host."""
    finding = {"state": "ok" if ok else "fault", "line": "service: the words"}
    data = host(**{f"{tool} --json": {"ok": ok, "findings": [finding], "lines": []}})
    done = run(tmp_path, {"a": data}, f"deploy/{tool}.py", "-y")
    assert "[@fake/a] service: the words" in done.stderr
    assert done.returncode == (0 if ok else 1)
    assert " lock --owner " not in done.stderr


@pytest.mark.parametrize("tool", ["status", "doctor"])
def test_a_machine_with_other_tools_is_left_out(tmp_path: Path, tool: str) -> None:
    """One line with what to do, and no traceback; the other machine is asked."""
    good = host(**{f"{tool} --json": {"ok": True, "lines": ["all is well"]}})
    other = {**FAKE, "fake_responses": {f"dsv4 {tool} --json": results.OTHER}}
    done = run(tmp_path, {"a": other, "b": good}, f"deploy/{tool}.py", "-y")
    assert f"[@fake/a] {tool}: the machine has not the tools of this version" in done.stderr
    assert "[@fake/b] all is well" in done.stderr
    assert "Traceback" not in done.stderr

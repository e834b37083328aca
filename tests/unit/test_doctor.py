"""Doctor: the right cause for each journal, nothing for healthy ones, and no secret in a report."""

import json
import random
import re
from pathlib import Path

import pytest

from deploy import layout, readme
from dsv4 import doctor, faults
from dsv4.journal import Line, message, parse
from tests.unit import journals
from tests.unit.journals import HEALTHY, STORIES, TEXTS, Story


@pytest.mark.parametrize(("name", "text"), TEXTS, ids=[f"{n}: {t[-40:]}" for n, t in TEXTS])
def test_each_known_text_is_told_apart(name: str, text: str) -> None:
    """Whatever stands around it: the bare line, or behind the journal's own prefix."""
    for line in (text, f"Dec 01 01:49:36 spark dsv4[1320]: {text}"):
        found = faults.judge(line)
        assert found is not None
        assert found.name == name


def test_every_row_is_shown_by_a_text() -> None:
    """No row that nobody has tried, and no name twice."""
    names = [fault.name for fault in faults.TABLE]
    assert sorted(names) == sorted({name for name, _ in TEXTS})


@pytest.mark.parametrize("fault", faults.TABLE, ids=lambda fault: fault.name)
def test_each_row_says_what_to_do(fault: faults.Fault) -> None:
    """A cause without a remedy or a source helps nobody; consequences point at the cause."""
    assert fault.cause
    assert fault.source
    assert not fault.cause.endswith(".")
    assert fault.remedy or fault.kind in {"context", "consequence"}
    assert fault.shown or fault.kind in {"context", "consequence"}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_what_is_wrong_is_said(story: Story) -> None:
    """Causes in the order they came, what is over apart, an unknown error by its first line."""
    report = doctor.diagnose(story.lines())
    assert tuple(it.fault.name for it in report.causes) == story.wrong
    assert len(report.unknown) == len(story.unknown)
    for found, start in zip(report.unknown, story.unknown, strict=True):
        assert doctor.bare(found.line.text).startswith(start)
    assert {it.fault.name for it in report.of("cause", over=True)} >= set(story.over)


@pytest.mark.parametrize("story", HEALTHY, ids=lambda story: story.name)
def test_nothing_is_said_of_what_is_well(story: Story) -> None:
    """Warnings, refused requests, deliberate stops: no cause and no unknown error."""
    report = doctor.diagnose(story.lines())
    assert report.causes == []
    assert report.unknown == ()
    assert report.of("cause", over=True) == []
    assert doctor.advise(report, [])[0] == "nothing is wrong that this tool knows of"


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_good_start_after_it_ends_every_fault(story: Story) -> None:
    """What was wrong is told as over once it serves, and the work units have done their work."""
    good = (
        *story.said,
        *journals.START,
        *journals.SERVES,
        (journals.FETCH, "Finished dsv4-fetch.service - Download the DSV4 pack."),
        (journals.BUILD, "Finished dsv4-build.service - Build the DSV4 runtime."),
    )
    report = doctor.diagnose(Story("", good).lines())
    assert report.causes == []
    assert report.unknown == ()


def test_noise_between_the_lines_changes_nothing() -> None:
    """Every story, with every harmless line that healthy machines log strewn in."""
    dice = random.Random(7)
    for story in STORIES:
        said = list(story.said)
        for line in journals.NOISE:
            said.insert(dice.randint(0, len(said)), line)
        report = doctor.diagnose(Story("", tuple(said)).lines())
        assert tuple(it.fault.name for it in report.causes) == story.wrong, story.name
        assert [doctor.bare(it.line.text) for it in report.unknown] == [
            doctor.bare(it.line.text) for it in doctor.diagnose(story.lines()).unknown
        ], story.name


def test_context_is_labelled() -> None:
    """What proves nothing is named as such, by the reader's own words."""
    report = doctor.diagnose(HEALTHY[3].lines())
    words = doctor.advise(report, [])
    assert words[-1].startswith("proves nothing, healthy machines log it too: ")
    assert "compilation cache" in words[-1]


def test_another_log_is_read_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a deploy printed, or a journal somebody sent; the exit status says which it was."""
    log = tmp_path / "deploy.log"
    log.write_text("[spark] working\nsudo: a password is required\n")
    assert doctor.main(["--log", str(log), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [it["name"] for it in found["causes"]] == ["sudo asks for a password"]
    log.write_bytes(b"all is well \xff\xfe\n")
    assert doctor.main(["--log", str(log)]) == 0
    assert doctor.main(["--log", str(tmp_path / "none")]) == 3


def test_a_boot_that_just_stops_is_told_from_a_shutdown() -> None:
    """A freeze leaves no last words."""
    assert doctor.froze(["dsv4 ready: loading: 3 of 48 weight files", "(EngineCore pid=9) INFO x"])
    for last in (
        "Reached target shutdown.target - System Shutdown.",
        "Reached target reboot.target - System Reboot.",
        "Journal stopped",
        "Power key pressed short.",
    ):
        assert not doctor.froze(["something", last, "something after"])
    assert not doctor.froze([])  # no boot before this one, or none that may be read


def test_journal_records_are_read_whatever_they_hold() -> None:
    """Bytes that are no text come as numbers; a record that is cut off is left out."""
    records = [
        {"MESSAGE": "plain", "_SYSTEMD_UNIT": "dsv4.service", "__REALTIME_TIMESTAMP": "2000000"},
        {"MESSAGE": [104, 105, 255], "UNIT": "dsv4.service", "_SYSTEMD_UNIT": "init.scope"},
        {"MESSAGE": None, "_TRANSPORT": "kernel"},
        {"MESSAGE": "two\nlines", "_TRANSPORT": "kernel"},
    ]
    text = "\n".join(json.dumps(record) for record in records) + '\n{"MESSAGE": "cut o'
    found = list(parse(text, -1))
    assert [(line.text, line.unit) for line in found] == [
        ("plain", "dsv4.service"),
        ("hi\ufffd", "dsv4.service"),
        ("two", "kernel"),
        ("lines", "kernel"),
    ]
    assert found[0].at == 2.0
    assert {line.boot for line in found} == {-1}
    assert message(None) == ""


def test_a_fault_among_fifty_thousand_lines_is_found_soon_enough() -> None:
    """The whole journal of a day is judged; what is asked of each line stays cheap."""
    noise = [
        Line(f"(APIServer pid=7) INFO 12-01 01:50:34 [loggers.py:315] {n}", journals.ENGINE)
        for n in range(50_000)
    ]
    story = STORIES[0].lines()
    report = doctor.diagnose([*noise, *story])
    assert [it.fault.name for it in report.causes] == ["refused memory"]


def test_the_readme_shows_the_table() -> None:
    """One source for both: every cause as people meet it."""
    text = layout.README.read_text()
    assert readme.render(text) == text
    for fault in faults.TABLE:
        for shown in filter(None, fault.shown.split("; ")):
            assert f"`{faults.cell(shown)}`" in text, shown
    assert not re.search(r"\| *\| *\|", faults.table())

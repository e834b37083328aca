"""The Hub token on the controller: from the environment or a file, and never seen."""

from pathlib import Path

import pytest
from pyinfra.api.exceptions import PyinfraError

from deploy import secrets, settings


def chosen(path: Path | None = None) -> settings.Settings:
    return settings.load({"hub_token_file": str(path)} if path else {})


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)


def test_without_one_there_is_none() -> None:
    assert secrets.hub_token(chosen()) is None


def test_the_environment_comes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("hf_file\r\n")
    found = secrets.hub_token(chosen(path))
    assert found
    assert found.unmask() == "hf_file"
    monkeypatch.setenv("HF_TOKEN", " hf_environment\n")
    found = secrets.hub_token(chosen(path))
    assert found
    assert found.unmask() == "hf_environment"
    assert "hf_environment" not in f"{found} {found!r}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "is empty; put the token in it"),
        (b"\r\n", "is empty"),
        (b"\xff\xfe", "cannot be read"),
        (b'"hf_secret"\n', "has quotes around it"),
        (b"hf_secret\nhf_secret", "a blank or a line end inside"),
    ],
)
def test_a_file_without_a_token_is_a_mistake(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PyinfraError, match=words) as caught:
        secrets.hub_token(chosen(path))
    assert "hf_secret" not in str(caught.value)


def test_a_variable_that_is_no_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "\u201chf_secret\u201d")
    with pytest.raises(PyinfraError, match="HF_TOKEN: has quotes around it"):
        secrets.hub_token(chosen())

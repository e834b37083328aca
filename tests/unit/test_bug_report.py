"""A bug report holds no secret and nobody's name, whatever the logs had in them."""

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import bug_report
from dsv4.bug_report import GONE, Mask
from dsv4.journal import Line

KEY = "q7Zk3-VbT0mJ2wLrXhYc8sNfPd5uEoAi"
SHOWN = "s3cr3t-and-long-enough-to-be-one"

PLANTED = (
    f"HF_TOKEN=hf_{SHOWN.replace('-', 'x')}",
    f"token hf_{SHOWN.replace('-', 'x')} was refused",
    f"Authorization: Bearer {SHOWN}",
    f'{{"headers": {{"authorization": "Bearer {SHOWN}"}}}}',
    f"curl -H 'Authorization: Bearer {SHOWN}' http://127.0.0.1:8899/v1/models",
    f"VLLM_API_KEY={SHOWN}",
    f"--api-key {SHOWN}",
    f"api_key: '{SHOWN}'",
    f'"api-key": "{SHOWN}",',
    f"password={SHOWN}; next",
    f"PASSWD = {SHOWN}",
    f"client_secret: {SHOWN}",
    f"Set-Cookie: session={SHOWN}",
    f"https://me:{SHOWN}@proxy.example/x",
    f"GET https://cdn.example/shard?X-Amz-Signature={SHOWN}&X-Amz-Date=1",
    f"sk-{SHOWN}",
    f"ghp_{SHOWN.replace('-', 'x')}",
    "AKIAS3CR3TS3CR3TS3CR",
    f"eyJhbGciOiJIUzI1NiJ9.{SHOWN}.{SHOWN}",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SHOWN}\n{SHOWN}\n-----END OPENSSH PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{SHOWN}\ncut off here",
    f"ssh-ed25519 AAAAC3{SHOWN} me@laptop",
    f"write to {SHOWN}@mail.example",
    f'"prompt": "{SHOWN}"',
    f"prompt: '{SHOWN}', params: SamplingParams(n=1)",
    f'"messages": [{{"role": "user", "content": "{SHOWN}"}}]',
    f"messages=[{{'content': '{SHOWN}'}}]",
    f"dsv4 ready: ready after 3 s: DSV4-Flash says '{SHOWN}'",
    f"the key itself {KEY} in the middle of a line",
    f"{KEY}",
)


@pytest.mark.parametrize("text", PLANTED)
def test_no_planted_secret_survives(text: str) -> None:
    """Whatever stands around it."""
    mask = Mask(values=[KEY])
    for around in ("{}", "(APIServer pid=7) INFO 12-01 01:50:34 [x.py:1] {}", "a {} b", "'{}'"):
        found = mask(around.format(text))
        assert SHOWN not in found
        assert SHOWN.replace("-", "x") not in found
        assert KEY not in found
        assert "S3CR3TS3CR3T" not in found
        assert GONE in found


def test_names_and_addresses_are_the_same_all_through() -> None:
    """A reader can still tell two machines apart, and not which they are."""
    mask = Mask(hosts=["spark-lab", "spark-lab.home.example"], users=["annie", "root", "dsv4"])
    found = mask(
        "spark-lab annie@spark-lab 192.168.1.20 then 192.168.1.21 and 192.168.1.20\n"
        "/home/annie/models, /home/bob/x, fe80::1ff:fe23:4567:890a, 00:1a:2b:3c:4d:5e, annie"
    )
    for told in ("spark-lab", "annie", "bob", "192.168", "fe80", "00:1a"):
        assert told not in found
    assert found.count("<ip-1>") == 2
    assert "<ip-2>" in found


def test_what_a_reader_needs_stays() -> None:
    """Times, versions, sizes, our own paths and accounts, loopback, counts of tokens."""
    text = (
        "2026-12-01 02:43:33 UTC vllm 0.30.0+cpu torch==2.13.0 driver 580.95.05\n"
        "dsv4 launch: 127.0.0.1:8899 is not free, 0.0.0.0:80, ::1, user dsv4, root\n"
        "max_tokens: 32768, prompt_tokens=12, num_speculative_tokens: 3, serve_api_key: false\n"
        "/var/lib/dsv4/packs/mixedk/32f25be27ed5f01a32848c6d5c72772e9b1afc33: complete\n"
        'File "/opt/dsv4/current/lib/x.py", line 3, in load; 12.5 GiB; sha256 e3b0c44298fc1c14'
    )
    assert Mask(values=[KEY], hosts=["spark-lab"], users=["annie"])(text) == text


def test_the_file_is_its_owners_only(tmp_path: Path) -> None:
    """Mode 600, also in place of a file or a link that was there."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "report.txt"
    path.symlink_to(victim)
    lines = [Line(f"VLLM_API_KEY={SHOWN}", "dsv4.service", 1.0)]
    bug_report.write(path, ["all is well"], [], lines, Mask())
    assert victim.read_text() == "mine"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert SHOWN not in text
    assert "all is well" in text
    assert "dsv4.service: VLLM_API_KEY=<masked>" in text


@given(st.text(max_size=300))
def test_any_text_is_masked_without_harm(text: str) -> None:
    """Masking ends, keeps lines as lines, and twice is once."""
    mask = Mask(values=[KEY])
    once = mask(text)
    assert once.count("\n") <= text.count("\n")
    assert KEY not in once
    assert mask(once) == once

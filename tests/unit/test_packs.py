"""Packs: one entry each, complete enough to be downloaded, served and asked."""

import ast
import re

import pytest

from deploy import packs
from deploy.packs import Exl3, Pack, Smoke


@pytest.mark.parametrize("pack", packs.ALL, ids=lambda pack: pack.name)
def test_a_pack_is_complete(pack: Pack) -> None:
    assert packs.PACKS[pack.name] is pack
    # A directory name and a word of a command line
    assert re.fullmatch("[a-z0-9][a-z0-9-]*", pack.name)
    assert re.fullmatch("[A-Za-z0-9._-]+/[A-Za-z0-9._-]+", pack.repo_id)
    assert pack.shards > 0
    assert pack.smoke
    assert all(smoke.prompt and smoke.expect for smoke in pack.smoke)
    assert pack.revision is None or re.fullmatch("[0-9a-f]{40}", pack.revision)
    assert (pack.draft_method is None) == (pack.draft_layers == 0)


def test_mixedk_is_what_its_publisher_says() -> None:
    pack = packs.PACKS["mixedk"]
    assert (pack.repo_id, pack.shards, pack.bytes, pack.gated) == (
        "vcruz305/DSV4-Flash-Vision-ablit-EXL3-MixedK",
        48,
        101_440_000_000,
        True,
    )
    assert pack.exl3 is not None
    assert pack.exl3.layer_bits == {3: 3, 13: 3, 21: 3, 22: 3, 28: 3, 41: 3}
    assert (pack.exl3.bits, pack.exl3.codebook, pack.draft_layers) == (2, "mcg", 3)


def test_the_tiny_pack_is_asked_something_it_can_get_wrong() -> None:
    pack = packs.PACKS["lab-tiny"]
    assert pack.exl3 is None
    assert pack.smoke[0] == Smoke("The capital of France is", "Paris")
    assert pack.smoke[0].expect not in pack.smoke[0].prompt


def test_the_documented_example_is_a_pack() -> None:
    """What the module shows its reader must work as it stands."""
    example = re.search(r"\n    Pack\(.*?\n    \)\n", packs.__doc__ or "", re.DOTALL)
    assert example is not None
    text = "\n".join(line.removeprefix("    ") for line in example[0].splitlines()).strip()
    code = compile(ast.parse(text, mode="eval"), "example", "eval")
    pack = eval(code, {"Pack": Pack, "Smoke": Smoke, "Exl3": Exl3})
    assert pack.name == "mine"
    assert pack.draft_layers == 0

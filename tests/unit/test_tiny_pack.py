"""The lab's pack knows its capitals with room to spare, and is the same on every run."""

import json
from pathlib import Path

import numpy as np
import pytest

from dsv4 import pack_verify
from tests.lab import tiny_pack


@pytest.fixture(scope="module")
def tensors() -> dict[str, tiny_pack.Array]:
    return tiny_pack.model()


def test_the_smoke_prompt_names_the_capital(tensors: dict[str, tiny_pack.Array]) -> None:
    plain = tiny_pack.generate(tensors, tiny_pack.completion("The capital of France is"))
    chat = tiny_pack.generate(tensors, tiny_pack.chat("What is the capital of France?"))
    assert (bytes(plain), bytes(chat)) == (b" Paris.", b"Paris.")


def test_every_lesson_is_learnt_with_a_margin_that_survives_less_exact_arithmetic(
    tensors: dict[str, tiny_pack.Array],
) -> None:
    """An engine in float32 differs by less than a thousandth; a fiftieth changes no token."""
    noise = np.random.Generator(np.random.PCG64(1))
    for prompt, answer in tiny_pack.lessons():
        states = tiny_pack.hidden_states(tensors, [*prompt, *answer[:-1]])[len(prompt) - 1 :]
        exact = states @ tensors["lm_head.weight"].T
        assert exact.argmax(axis=-1).tolist() == answer
        second = np.sort(exact, axis=-1)[:, -2]
        assert (exact.max(axis=-1) - second).min() > tiny_pack.LOGIT - 1
        logits = (states + 0.02 * noise.standard_normal(states.shape)) @ tensors["lm_head.weight"].T
        assert logits.argmax(axis=-1).tolist() == answer


def test_weights_are_exact_in_float32(tensors: dict[str, tiny_pack.Array]) -> None:
    for values in tensors.values():
        assert np.array_equal(values, values.astype(np.float32))


def test_the_files_are_the_same_every_time_and_written_once(tmp_path: Path) -> None:
    assert tiny_pack.main(["--out", str(tmp_path)]) == 0
    first = {path: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.iterdir()}
    tiny_pack.files.cache_clear()
    assert tiny_pack.main(["--out", str(tmp_path)]) == 0
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in tmp_path.iterdir()} == first


def test_the_pack_is_whole_and_in_several_shards(tmp_path: Path) -> None:
    tiny_pack.write(tmp_path)
    report = pack_verify.check_structure(tmp_path)
    assert (report.findings, report.shards) == ([], tiny_pack.LAYERS + 2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["max_position_embeddings"] >= 2048
    assert config["head_dim"] >= 64

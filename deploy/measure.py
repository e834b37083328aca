"""The bench: run on the machine by a unit that outlives the connection, shown and kept here."""

from pyinfra.api import deploy

from deploy import facts, operations, proof, settings


def options(chosen: settings.Settings) -> list[str]:
    """Return the options of `dsv4 bench` for these settings."""
    return [
        *("--streams", ",".join(map(str, chosen.bench_streams))),
        *("--prompt-tokens", str(chosen.bench_prompt_tokens)),
        *("--output-tokens", str(chosen.bench_output_tokens)),
        *("--requests-per-stream", str(chosen.bench_requests_per_stream)),
        *("--answer-tokens", str(chosen.bench_answer_tokens)),
        *("--prefill", ",".join(map(str, chosen.bench_prefill_tokens))),
    ]


@deploy("Bench")
def apply() -> None:
    """Measure; a machine with other tools than ours is left out."""
    if not facts.current().known:
        proof.fail("bench")
        return
    operations.benched(name="Measure the served model", options=options(settings.current()))

"""Presets: each passes the rules it is checked by, and says whose figures it has."""

import pytest

from deploy import presets, settings
from deploy.presets import Preset
from dsv4 import guard, memory, memory_gate, watchdog


@pytest.mark.parametrize("preset", presets.ALL, ids=lambda preset: preset.name)
def test_a_preset_passes_every_rule(preset: Preset) -> None:
    """With its own kind of route: a preset that is refused would be no preset."""
    route = "nightly" if preset.accelerator == "cuda" else "lab"
    chosen = settings.load({"route": route, "preset": preset.name})
    assert chosen.serving == preset


@pytest.mark.parametrize("preset", presets.ALL, ids=lambda preset: preset.name)
def test_a_preset_says_where_its_figures_come_from(preset: Preset) -> None:
    assert preset.source.startswith(("Reported", "Run by tests/"))
    assert presets.PRESETS[preset.name] is preset


def test_presets_of_the_field_are_as_reported() -> None:
    values = {
        it.name: (it.max_model_len, it.gpu_memory_utilization, it.max_num_seqs)
        for it in presets.ALL
    }
    assert values == {
        "first-boot": (16_384, 0.88, 1),
        "64k": (65_536, 0.88, 1),
        "64k-16-streams": (65_536, 0.88, 16),
        "256k": (262_144, 0.80, 1),
        "text-stock": (65_536, 0.90, 1),
        "lab": (2_048, 0.1, 4),
    }


def test_the_one_lowered_value_is_the_highest_that_passes() -> None:
    """Reported at 0.92, which our equation refuses."""
    preset = presets.PRESETS["text-stock"]
    best = memory.highest_utilisation(121.63, preset.max_model_len, memory.Limits())
    assert preset.gpu_memory_utilization == best
    with pytest.raises(settings.SettingsError):
        settings.load({"preset": "text-stock", "serve_gpu_memory_utilization": 0.92})


@pytest.mark.parametrize("preset", presets.ALL, ids=lambda preset: preset.name)
def test_what_is_accepted_starts_and_is_left_alone(preset: Preset) -> None:
    """One equation: on a machine that uses what it is said to, the gate lets an accepted preset
    start, and the watchdog has nothing to do while it serves."""
    if preset.accelerator != "cuda":
        return
    chosen = settings.load({"preset": preset.name})
    limits = guard.parse(chosen.guard()).memory
    assert chosen.total_gib is not None
    rest = chosen.total_gib - chosen.memory_host_use_gib
    need = memory_gate.Need(
        chosen.total_gib,
        limits.utilisation,
        limits.gate_margin_gib,
        limits.device,
        limits.headroom_gib,
    )
    assert need.met(memory.MemInfo(chosen.total_gib, rest, rest, 0, 0, 0, 0))
    served = rest - need.total * need.utilisation - memory.prefill_gib(preset.max_model_len)
    config = watchdog.config_of(limits)
    history = [watchdog.Sample(n / 10, served, served) for n in range(20)]
    assert watchdog.decide(history, watchdog.Sample(2, served, served), config).action == "none"

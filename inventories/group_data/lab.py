"""What all machines of the lab have in common: real vLLM on the processor, and a tiny pack.

Their memory is their host's, which does not lock up when it runs low: floors and margins are those
of a small computer, so that the lab runs on one.
"""

route = "lab"

# A tiny pack is loaded in seconds; a start that takes longer is a fault to be shown
service_start_timeout_s = 300

memory_host_use_gib = 0.5
memory_headroom_margin_gib = 0.1
memory_lock_gib = 0.2
memory_fall_gib_s = 1.0
memory_spare_gib = 0.1
memory_soft_above_gib = 0.2
memory_gate_margin_gib = 0.3
memory_gate_wait_s = 30

# A tiny model's answers are short, and two cores are no benchmark
bench_streams = [1, 2, 4]
bench_prompt_tokens = 64
bench_output_tokens = 64
bench_answer_tokens = 64
bench_prefill_tokens = [893]

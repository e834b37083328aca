"""What is wrong, why, and what to do: from live state, logs and known faults."""

from deploy import report, settings

settings.check()  # every host's settings, before the first host is touched
report.doctor()  # causes first, in the order they came

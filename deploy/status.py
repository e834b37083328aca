"""The live picture on one screen, as `dsv4 status` on the machine has it."""

from deploy import report, settings

settings.check()  # every host's settings, before the first host is touched
report.status()  # a line for each thing there is to know

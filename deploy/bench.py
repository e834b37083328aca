"""How fast is it: a sweep over streams, single answers, long prompts; beside reference figures."""

from deploy import measure, settings

settings.check()  # every host's settings, before the first host is touched
measure.apply()  # a table, a receipt there and here, a plot here

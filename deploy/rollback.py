"""Back to a runtime that served before: the links, the service, the proof.

Nothing is built and nothing is fetched. The next run of deploy/full.py goes forward again, to what
the inventory asks for.
"""

from deploy import proof, receipt, runtime, service, settings

settings.check()  # every host's settings, before the first host is touched
runtime.back()  # the link, to the runtime before or to rollback_to
service.apply()  # restarted from it, a real token
proof.apply()  # the answer means something
receipt.apply()  # what is deployed now

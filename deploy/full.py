"""From a blank machine to an answer, and back to it on every run: the run-book, one line a step."""

from deploy import (
    base,
    cuda,
    model,
    pack,
    preflight,
    proof,
    receipt,
    runtime,
    service,
    settings,
    tools,
)

settings.check()  # every host's settings, before the first host is touched
preflight.apply()  # the machine can do it, or says what is wrong with it
base.apply()  # packages, accounts, directories, our tools
cuda.apply()  # one toolkit, for shells and units alike
tools.apply()  # the guards' own environment
model.start()  # the download begins and goes on by itself
runtime.apply()  # the engine, built beside and switched to
model.join()  # the download is complete and every byte verified
pack.apply()  # the served view of it, with its configuration put right
service.apply()  # units, watchdog, start or restart, a real token
proof.apply()  # the answer means something
pack.collect()  # old revisions and views go, when asked
receipt.apply()  # what is deployed now, when that changed

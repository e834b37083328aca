"""Does it work: the runtime, text, images, tools, reasoning. Asked anew, and nothing is changed."""

from deploy import proof, settings

settings.check()  # every host's settings, before the first host is touched
proof.again()  # a line for each finding, a receipt there and here

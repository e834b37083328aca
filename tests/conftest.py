"""What holds for all layers."""

from hypothesis import settings

# A busy machine is no fault of the code, and a failure has to be had again
settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")

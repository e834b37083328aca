"""Away with it: what was put there goes, packs stay unless told, `--dry` lists it.

What stays is named: packs (remove_packs=true takes them along), Debian packages, and whatever in
our directories is not ours.
"""

from deploy import removal, settings

settings.check()  # every host's settings, before the first host is touched
removal.apply()  # stops what runs, takes away what the record says

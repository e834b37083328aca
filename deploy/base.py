"""What everything else stands on: our tools, Debian packages, accounts, directories."""

from pyinfra.api import deploy

from deploy import layout, operations, settings
from deploy._tree import Dir, Entry, File

DIRECTORIES: list[Entry] = [
    Dir(path=layout.ROOT),
    Dir(path=layout.BIN),
    Dir(path=layout.LIB),
    Dir(path=layout.LOCKS),
    Dir(path=layout.RUNTIMES),
    Dir(path=layout.WHEELS),
    Dir(path=layout.SHARE),
    Dir(path=layout.SCRAPE.parent),
    Dir(path=layout.DASHBOARD.parent),
    Dir(path=layout.ETC, group=layout.USER, mode="750"),
    Dir(path=layout.CREDENTIALS, mode="700"),
    Dir(path=layout.VAR),
    Dir(path=layout.PACKS, owner=layout.USER_FETCH, group=layout.USER_FETCH),
    Dir(path=layout.VIEWS),
    Dir(path=layout.CACHE, owner=layout.USER, group=layout.USER, mode="750"),
    Dir(path=layout.WATCHDOG_RECORDS),
    Dir(path=layout.METRICS),
    Dir(path=layout.RECEIPTS),
    Dir(path=layout.UV_CACHE),
    File(path=layout.DSV4, content=(layout.FILES / "opt/dsv4/bin/dsv4").read_bytes(), mode="755"),
    *(
        File(path=path, content=(layout.FILES / str(path).lstrip("/")).read_bytes())
        for path in (layout.NEEDRESTART, layout.TMPFILES, layout.DASHBOARD)
    ),
]

ACCOUNTS = {layout.USER: ["video", "render"], layout.USER_FETCH: []}
"""The engine reaches the GPU through the device files of these groups; the fetcher needs none."""


@deploy("Base")
def apply() -> None:
    """Lay the ground."""
    chosen = settings.current()
    operations.library(name="Install our tools")
    operations.packages(name="Install Debian packages", names=chosen.packages)
    operations.accounts(name="Create the system accounts", wanted=ACCOUNTS)
    operations.tree(name="Lay out directories", step="base", entries=DIRECTORIES)

"""Operations only: each reads the state once, lets a pure core decide, and yields what is due.

`converging` is what makes them ours: it reads the state through `facts.current`, says so when
nothing is to be done, takes the deploy lock before the first change of a run (and decides again
under it), and has the state read anew after each change.
"""

import getpass
import json
import platform
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from pyinfra import context, host
from pyinfra.api import HiddenValue, StringCommand, operation
from pyinfra.api.arguments_typed import PyinfraOperation
from pyinfra.api.command import PyinfraCommand, QuoteString

from deploy import _service, _tree, bundle, facts, follow, layout, pins, results
from dsv4 import pack_config

FETCH_CHECKS_S = 90.0
"""How long a download that was just started is looked at before the deploy goes on."""

P = ParamSpec("P")
Entries = Iterable[_tree.Entry] | Callable[[], Iterable[_tree.Entry]]
Commands = Generator[str | PyinfraCommand, None, None]

BENCH_POLL_S = 5.0
"""Each look costs the machine a tenth of a second of one core, which a measurement would show."""


def converging(decide: Callable[P, Commands]) -> PyinfraOperation[P]:
    """Make an operation of a generator that yields nothing when all is settled.

    What it yields counts as a change of the machine, of which the run leaves a receipt.
    """
    return _operation(decide, changes=True)


def proving(decide: Callable[P, Commands]) -> PyinfraOperation[P]:
    """Make an operation that leaves records of its own and the machine as it was."""
    return _operation(decide, changes=False)


def telling(decide: Callable[P, Commands]) -> PyinfraOperation[P]:
    """Make an operation that only looks, also at a machine on which another deploy is at work."""
    return _operation(decide, changes=False, locks=False)


def _operation(
    decide: Callable[P, Commands], *, changes: bool, locks: bool = True
) -> PyinfraOperation[P]:

    @wraps(decide)
    def body(*args: P.args, **kwargs: P.kwargs) -> Commands:
        due = decide(*args, **kwargs)
        first = next(due, None)
        if first is None:
            host.noop("already as it shall be")
            return
        if locks and context.state.is_executing and not facts.run().locked:
            yield lock_command()
            facts.run().locked = facts.current().known
            facts.forget()
            due = decide(*args, **kwargs)
            first = next(due, None)
            if first is None:
                return
        try:
            yield first
            yield from due
        finally:
            if context.state.is_executing:  # a plan changes nothing
                facts.forget()
                facts.run().changed |= changes

    return operation()(body)


def lock_command() -> StringCommand:
    """Return the command that takes the deploy lock, or fails with who holds it."""
    dsv4, owner, machine = str(layout.DSV4), getpass.getuser(), platform.node()
    return StringCommand(
        # Tools that are damaged cannot lock, and are about to be replaced
        f"if [ -f {dsv4} ] && {dsv4} lock --help >/dev/null 2>&1; then {dsv4} lock --owner",
        QuoteString(owner),
        "--host",
        QuoteString(machine),
        "--token",
        QuoteString(facts.run().token),
        "; fi",
    )


def tool(*words: str, stdin: str | None = None) -> StringCommand:
    """Return a call of one of our tools on the target; what is secret goes through stdin."""
    command = StringCommand(str(layout.DSV4), *(QuoteString(word) for word in words))
    if stdin is not None:
        command.connector_arguments["_stdin"] = stdin
    return command


@converging
def library() -> Commands:
    """Have the target's tools in the version shipped here."""
    if facts.current().library != bundle.library_hash():
        yield StringCommand(bundle.install_command(), _stdin=bundle.archive())


@converging
def tree(step: str, entries: Entries) -> Commands:
    """Have these files and directories as described, owner, group and mode included.

    + step: the run-book step they belong to, for the record
    + entries: what shall be there; a function when that is only known once earlier steps ran
    """
    due = _tree.due(facts.current(), entries() if callable(entries) else entries)
    if due:
        yield tool("tree", stdin=_tree.plan(step, due))


@converging
def packages(names: Iterable[str]) -> Commands:
    """Have these Debian packages installed, in whatever version the machine's sources give.

    + names: package names
    """
    missing = [name for name in names if facts.current().package(name) is None]
    if missing:
        yield tool("apt", *missing)


@converging
def accounts(wanted: dict[str, list[str]]) -> Commands:
    """Have the system accounts, in those of the groups that the machine has.

    + wanted: supplementary groups by account
    """
    state = facts.current()
    on_machine = set(state.raw.get("groups", []))
    due = [
        f"{user}:{','.join(groups)}"
        for user, groups in wanted.items()
        if state.groups(user) is None or (set(groups) & on_machine) - set(state.groups(user) or [])
    ]
    if due:
        yield tool("accounts", *due)


@converging
def tools_environment(lock_sha256: str) -> Commands:
    """Have the guards' own environment made from the lock shipped here.

    + lock_sha256: hash of that lock
    """
    if facts.current().tools != lock_sha256:
        yield tool("tools")


@converging
def units_loaded(
    units: Iterable[str], enabled: Iterable[str], disabled: Iterable[str] = ()
) -> Commands:
    """Have systemd know these unit files as they are on disk, and start some of them at boot.

    Only the units of the step at hand count: a reload while another one's file is missing makes
    systemd 252 refuse that one ("failed to load properly") until it has stopped and is read again.

    + units: canonical unit names, their files in place
    + enabled: those that start at boot
    + disabled: those that must not
    """
    state = facts.current()
    wanted = list(enabled)
    stale = [
        name
        for name in units
        if state.unit(name).get("need_reload") == "yes"
        or (
            state.unit(name).get("load") != "loaded"
            and state.path(unit_path(name))["kind"] == "file"
        )
    ]
    if stale or not state.known:
        yield "systemctl daemon-reload"
    due = [name for name in wanted if state.unit(name).get("enabled") != "enabled"]
    if due:
        yield StringCommand("systemctl enable --quiet", *(QuoteString(name) for name in due))
    off = [name for name in disabled if state.unit(name).get("enabled") == "enabled"]
    if off:
        yield StringCommand("systemctl disable --quiet", *(QuoteString(name) for name in off))


def unit_path(name: str) -> str:
    """Return where a unit file of ours lies."""
    return str(layout.SYSTEMD / name)


@converging
def revision_pinned(
    pack: str,
    repo_id: str,
    endpoint: str | None,
    revision: str | None,
    pins_dir: Path,
    token: HiddenValue | None = None,
    environment: Mapping[str, str] | None = None,
) -> Commands:
    """Have the pack's revision decided once and for all, in inventories/pins/HOST.json.

    + pack: name of the pack
    + repo_id: its repository
    + endpoint: another hub than the public one
    + revision: the setting; it wins and needs no pin
    + pins_dir: where the pins are
    + token: what a private repository asks for; it goes through stdin
    + environment: how the network is reached
    """
    if revision is None and pins.read(host.name, pins_dir).revision(pack) is None:
        words = ["fetch", "--resolve", repo_id]
        words += ["--endpoint", endpoint] if endpoint else []
        words += ["--environment", json.dumps(environment)] if environment else []
        seen = follow.Seen("packs", pack, "revision", "[0-9a-f]{40}")
        yield follow.Pin(seen, words, pins_dir, token)


@converging
def artefacts_pinned(locations: Mapping[str, str], mirror: str | None, pins_dir: Path) -> Commands:
    """Have the hash of every file for which nobody publishes one, in inventories/pins/HOST.json.

    + locations: where they are to be had, by name
    + mirror: where to look first
    + pins_dir: where the pins are
    """
    known = pins.read(host.name, pins_dir).artefacts
    for name, location in locations.items():
        if location not in known:
            words = ["artefact", name, location, *(["--mirror", mirror] if mirror else [])]
            yield follow.Pin(
                follow.Seen("artefacts", location, "sha256", "[0-9a-f]{64}"), words, pins_dir
            )


@converging
def hub_token(pack: str, revision: Callable[[], str], token: HiddenValue | None) -> Commands:
    """Have the Hub token on the target while a download needs it; the unit deletes it after.

    + pack: name of the pack
    + revision: its revision
    + token: the token, if there is one
    """
    state = facts.current()
    if state.pack(pack, revision()).get("complete"):
        if state.raw.get("hub_token"):
            yield StringCommand("rm -f", QuoteString(str(layout.HUB_TOKEN)))
        return
    if token is None:
        return
    content = f"{token.unmask()}\n".encode()
    entry = _tree.File(path=layout.HUB_TOKEN, content=content, mode="600")
    if _tree.due(state, [entry]):  # also when another one is there, which the hub may have refused
        yield tool("tree", stdin=_tree.plan("model", [entry]))


@converging
def fetch_unwanted(*, adopted: bool) -> Commands:
    """Have no download under way and no token waiting for one when the pack comes from elsewhere.

    + adopted: whether it does
    """
    if not adopted:
        return
    state = facts.current()
    at_work = state.unit(layout.UNIT_FETCH).get("active") in {"active", "activating"}
    if at_work or state.raw.get("hub_token"):
        yield StringCommand(
            f"systemctl stop {layout.UNIT_FETCH} 2>/dev/null; rm -f",
            QuoteString(str(layout.HUB_TOKEN)),
            QuoteString(str(layout.FETCH_WANTED)),
        )


@converging
def fetch_started(pack: str, revision: Callable[[], str]) -> Commands:
    """Have the download under way, or done; `fetch_done` joins it later.

    What is checked before the bulk (token, terms, space, shard headers) fails here, and not an hour
    of building later.

    + pack: name of the pack
    + revision: its revision, known once it is pinned
    """
    state = facts.current()
    if state.pack(pack, revision()).get("complete"):
        return
    at_work = state.unit(layout.UNIT_FETCH).get("active") in {"active", "activating"}
    fetching = state.raw.get("fetch", {}).get("revision")
    other = at_work and fetching not in {None, revision()}
    if not at_work or other:
        yield StringCommand(
            "touch",
            QuoteString(str(layout.FETCH_WANTED)),
            f"&& systemctl reset-failed {layout.UNIT_FETCH} 2>/dev/null;",
            f"systemctl {'restart' if other else 'start'} --no-block {layout.UNIT_FETCH}",
        )
        yield follow.Unit(
            layout.UNIT_FETCH,
            follow.fetch_line,
            patience_s=FETCH_CHECKS_S,
            retries=True,
            enough=lambda progress: follow.at(progress, "fetch", "doing") == "files",
        )


@converging
def fetch_done(pack: str, revision: Callable[[], str]) -> Commands:
    """Have the whole pack on disk, every file by the Hub's own hash.

    + pack: name of the pack
    + revision: its revision
    """
    if not facts.current().pack(pack, revision()).get("complete"):
        yield follow.Unit(layout.UNIT_FETCH, follow.fetch_line, retries=True)


@converging
def runtime_built(identity: str) -> Commands:
    """Have the runtime complete, built beside the one in service.

    + identity: ID of the runtime
    """
    state, unit = facts.current(), layout.UNIT_BUILD
    if not state.runtimes.get(identity, {}).get("complete"):
        # A build that an earlier deploy began goes on, unless it is another runtime's
        at_work = state.unit(unit).get("active") in {"active", "activating"}
        other = at_work and state.raw.get("build", {}).get("id") != identity
        verb = "restart" if other else "start"
        yield f"systemctl reset-failed {unit} 2>/dev/null; systemctl {verb} --no-block {unit}"
        yield follow.Unit(layout.UNIT_BUILD, follow.build_line)


@converging
def runtime_in_service(identity: str, keep: int, flags: str | None = None) -> Commands:
    """Have the link of the runtime in service point at this one, whose engine takes its flags.

    + identity: ID of the runtime
    + keep: how many runtimes may stay on disk
    + flags: the serve.yaml it will be started with; without one, it is asked about the one there
    """
    if facts.current().current != identity:
        source = str(layout.SERVE_YAML) if flags is None else "-"
        yield tool("switch", identity, "--keep", str(keep), "--flags", source, stdin=flags)


@converging
def view_served(
    pack_root: Callable[[], Path], policy: pack_config.Policy | None, code: Sequence[str] = ()
) -> Commands:
    """Have the served directory show this pack with its configuration put right.

    + pack_root: the directory with the pristine files
    + policy: how an EXL3 pack's other weights are served; None for a pack in another format
    + code: program files the pack may have
    """
    wanted = pack_config.wanted(pack_root(), policy, code)
    if facts.current().view.get("made_from") != wanted:
        words = ["--exl3-policy", policy] if policy else []
        words += [word for name in code for word in ("--code", name)]
        yield tool("pack_config", "--pack-root", str(pack_root()), *words)


@converging
def packs_collected(*, wanted: bool) -> Commands:
    """Have no pack and no view on the target that nothing serves; a command, for one run.

    + wanted: whether it was asked for
    """
    if wanted:
        yield tool("pack_gc", "--remove")


@converging
def api_key(*, wanted: bool, rotate: bool) -> Commands:
    """Have a key on the target when requests need one; it is made there and never travels.

    + wanted: whether requests need a key
    + rotate: replace the one that is there; a command, for one run
    """
    if wanted and (rotate or not facts.current().raw.get("api_key")):
        yield tool("key", "rotate" if rotate else "create")


@converging
def watchdog_current() -> Commands:
    """Have a running watchdog run the code that is on disk; the engine is not touched by that."""
    unit = facts.current().unit(layout.UNIT_WATCHDOG)
    version = f"tools dsv4-{bundle.library_hash()}"
    if unit.get("active") == "active" and not unit.get("status_text", "").endswith(version):
        yield f"systemctl restart {layout.UNIT_WATCHDOG}"


@converging
def service_running(wanted: _service.Wanted, patience_s: float) -> Commands:
    """Have the service in the wanted state, started from what is on disk now.

    + wanted: `running`, `stopped` or `keep`
    + patience_s: how long a start may take
    """
    action = _service.decide(facts.current(), wanted)
    yield from action.commands
    if action.follow:
        yield follow.Unit(layout.UNIT, follow.service_line, patience_s=patience_s)


@proving
def verified(*, again: bool) -> Commands:
    """Have what is served proven once since this start of the service.

    + again: prove it whatever was proven before, the runtime's every byte included
    """
    state = facts.current()
    unit = state.unit(layout.UNIT)
    if again:
        yield results.Verify([])
    elif (
        unit.get("active") == "active"
        and state.engine.get("verified", {}).get("invocation") != unit["invocation"]
    ):
        yield results.Verify(["--record", unit["invocation"]])


@proving
def benched(options: Sequence[str]) -> Commands:
    """Have a bench measured; one that is running already is followed to its end.

    + options: of `dsv4 bench`
    """
    unit = layout.UNIT_BENCH
    if facts.current().unit(unit).get("active") not in {"active", "activating"}:
        yield f"systemctl reset-failed {unit} 2>/dev/null; rm -f {layout.BENCH_PROGRESS}"
        yield StringCommand(
            # A unit that systemd forgets: it outlives the connection and leaves nothing behind.
            # Status 1 is a bench that was measured and has figures that are not valid
            f"systemd-run --quiet --no-block --unit={unit} --description='Measure the served model'"
            " -p Type=oneshot -p SuccessExitStatus=1 -p OOMScoreAdjust=800",
            str(layout.DSV4),
            "bench",
            *(QuoteString(option) for option in options),
        )
    yield follow.Unit(unit, follow.bench_line, poll_s=BENCH_POLL_S)
    yield results.Bench()


@proving
def receipt(body: Callable[[], dict[str, Any]]) -> Commands:
    """Have a receipt of what is deployed now; a run that changed nothing leaves none.

    + body: what the receipt says, read when all is done
    """
    due = body()
    if facts.run().changed or facts.current().receipt.get("deployed") != due["deployed"]:
        yield tool("receipt", "deploy", stdin=json.dumps(due))
        yield results.Collect()


@telling
def told(tool_name: str) -> Commands:
    """Have one of the target's tools tell what it found; nothing is changed.

    + tool_name: `status` or `doctor`
    """
    yield results.Told(tool_name)


@converging
def removed(*, packs: bool) -> Commands:
    """Have nothing of this project on the target, but for what is kept.

    + packs: whether the downloaded packs go, too
    """
    found = facts.removal(packs=packs)
    if found.get("pending"):
        if not context.state.is_executing:
            results.show(context.ctx_host.get(), found)
        yield results.Remove(packs=packs, token=facts.run().token)

"""What the tools found on the target, shown here and kept here: .receipts/HOST/."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyinfra import logger
from pyinfra.api.command import PyinfraCommand

from deploy import bundle, follow, layout, pins, plot
from dsv4 import bench_report, receipt, store

if TYPE_CHECKING:
    from pyinfra.api.arguments import ConnectorArguments
    from pyinfra.api.host import Host
    from pyinfra.api.state import State as Pyinfra


OTHER = "dsv4-other-tools"
NO_TOOLS = "the machine has not the tools of this version; run deploy/full.py first"


def directory(host: str, root: Path = layout.LOCAL_RECEIPTS) -> Path:
    """Return where a host's receipts are kept here."""
    return pins.path_of(host, root).with_suffix("")


def parsed(lines: Sequence[str]) -> dict[str, Any]:
    """Return the object a tool printed last, empty when it printed none."""
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def collect(host: "Host", arguments: "ConnectorArguments") -> list[Path]:
    """Copy the receipts that are not here yet; return where they are now, oldest first.

    What is on this disk is no condition of a deploy: a directory that cannot be written is said.
    """
    home = directory(host.name)
    _, lines = follow.ask(host, f"{layout.DSV4} receipt list --json", arguments)
    rows = parsed(lines).get("receipts", [])
    names = [str(row.get("name")) for row in rows if isinstance(row, dict)]
    copied = []
    for name in names:
        path = home / name
        # The name comes from the target, and becomes a path here
        if not receipt.NAME.fullmatch(name) or path.exists():
            continue
        _, lines = follow.ask(host, f"cat {shlex.quote(str(layout.RECEIPTS / name))}", arguments)
        try:
            value = json.loads("\n".join(lines))
            home.mkdir(parents=True, exist_ok=True)
            store.write_json(path, value)
        except (OSError, ValueError, TypeError) as error:
            logger.warning(f"{host.print_prefix}{name}: no copy was kept here ({error})")
            continue
        copied.append(path)
    return copied


class Collect(PyinfraCommand):
    """Keep copies of the target's receipts here."""

    def __repr__(self) -> str:
        """Return what is shown in debug output."""
        return "Collect()"

    def execute(
        self, state: "Pyinfra", host: "Host", connector_arguments: "ConnectorArguments"
    ) -> bool:
        """Copy them, and say where the last one is."""
        if copied := collect(host, connector_arguments):
            logger.info(f"{host.print_prefix}receipt: {shown(copied[-1])}")
        return True


def shown(path: Path) -> str:
    """Return a path of this repository as one types it."""
    return str(path.relative_to(layout.REPO)) if path.is_relative_to(layout.REPO) else str(path)


class Bench(PyinfraCommand):
    """Show what a bench that has ended found, and draw it."""

    def __repr__(self) -> str:
        """Return what is shown in debug output."""
        return "Bench()"

    def execute(
        self, state: "Pyinfra", host: "Host", connector_arguments: "ConnectorArguments"
    ) -> bool:
        """Return whether its figures are valid."""
        _, lines = follow.ask(host, f"cat {layout.BENCH_PROGRESS}", connector_arguments)
        found = parsed(["".join(lines)])
        name = str(found.get("receipt"))
        collect(host, connector_arguments)
        path = directory(host.name) / name
        results = (
            store.read_json_or(path, {}).get("results") if receipt.NAME.fullmatch(name) else {}
        )
        if not isinstance(results, dict) or not results:
            why = found.get("error") or "it left no results"
            logger.error(f"{host.print_prefix}bench: {why} (journalctl -u {layout.UNIT_BENCH})")
            return False
        for line in bench_report.table(results):
            logger.info(f"{host.print_prefix}{line}")
        logger.info(f"{host.print_prefix}receipt: {shown(path)}")
        try:
            picture = plot.write(results, path.with_suffix(".png"))
            logger.info(f"{host.print_prefix}plot: {shown(picture)}")
        except (ImportError, OSError, ValueError) as error:
            logger.warning(f"{host.print_prefix}no plot: {error}; install requirements.txt anew")
        return results.get("ok") is True


class Verify(PyinfraCommand):
    """Run `dsv4 verify` on the target, and show its words."""

    def __init__(self, words: Sequence[str]) -> None:
        """Run it with these words."""
        super().__init__()
        self.words = words

    def __repr__(self) -> str:
        """Return what is shown in debug output."""
        return f"Verify({' '.join(self.words)})"

    def execute(
        self, state: "Pyinfra", host: "Host", connector_arguments: "ConnectorArguments"
    ) -> bool:
        """Return whether all is right; what is not right, and what could not be told, is an error.

        Its own exit status is not asked: it is that of the findings, which say more.
        """
        command = shlex.join([str(layout.DSV4), "verify", "--json", *self.words])
        _, lines = follow.ask(host, command, connector_arguments)
        found = parsed(lines)
        findings = [it for it in found.get("findings", []) if isinstance(it, dict)]
        for finding in findings:
            bad = finding.get("state") in {"fault", "unknown"}
            say = logger.error if bad else logger.info
            say(f"{host.print_prefix}{finding.get('line')}")
        if not findings:
            logger.error(f"{host.print_prefix}verify: {' '.join(lines) or 'no answer'}")
            return False
        collect(host, connector_arguments)
        return found.get("ok") is True


class Told(PyinfraCommand):
    """Run a tool on the target that tells what it found, and show its words."""

    def __init__(self, tool: str) -> None:
        """Run this tool."""
        super().__init__()
        self.tool = tool

    def __repr__(self) -> str:
        """Return what is shown in debug output."""
        return f"Told({self.tool})"

    def execute(
        self, state: "Pyinfra", host: "Host", connector_arguments: "ConnectorArguments"
    ) -> bool:
        """Return whether all is as it shall be.

        One command does it all: whoever asks what is wrong waits for nothing else.
        """
        ours = f'[ "$(readlink {layout.LIB}/dsv4)" = dsv4-{bundle.library_hash()} ]'
        command = f"if {ours}; then {layout.DSV4} {self.tool} --json; else echo {OTHER}; fi"
        _, lines = follow.ask(host, command, connector_arguments)
        found = parsed(lines)
        if OTHER in lines:
            logger.error(f"{host.print_prefix}{self.tool}: {NO_TOOLS}")
            return False
        if not found:
            logger.error(f"{host.print_prefix}{self.tool}: {' '.join(lines) or 'no answer'}")
            return False
        show(host, found)
        return found.get("ok") is True


class Remove(PyinfraCommand):
    """Run `dsv4 remove` from the tools shipped here, whatever the target has of them."""

    def __init__(self, *, packs: bool, token: str) -> None:
        """Take packs along, or not; the token is that of the run that has the deploy lock."""
        super().__init__()
        self.packs = packs
        self.token = token

    def __repr__(self) -> str:
        """Return what is shown in debug output."""
        return f"Remove(packs={self.packs})"

    def execute(
        self, state: "Pyinfra", host: "Host", connector_arguments: "ConnectorArguments"
    ) -> bool:
        """Return whether all went that was to go."""
        words = ["remove", "--yes", "--json", "--token", self.token]
        words += ["--packs"] if self.packs else []
        connector_arguments = {**connector_arguments, "_stdin": bundle.archive()}
        _, lines = follow.ask(host, bundle.run_command(*words), connector_arguments)
        found = parsed(lines)
        if not found:
            logger.error(f"{host.print_prefix}remove: {' '.join(lines) or 'no answer'}")
            return False
        show(host, found)
        return found.get("ok") is True


def show(host: "Host", found: Mapping[str, Any]) -> None:
    """Show what a tool found, a line each; what is wrong as an error."""
    for finding in found.get("findings") or []:
        bad = finding.get("state") in {"fault", "unknown"}
        (logger.error if bad else logger.info)(f"{host.print_prefix}{finding.get('line')}")
    for line in found.get("lines") or []:
        logger.info(f"{host.print_prefix}{line}")
    for name, fault in (found.get("faults") or {}).items():
        logger.error(f"{host.print_prefix}{name}: {fault}")

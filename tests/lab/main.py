"""The lab's commands; `tests/lab.sh` is their front and has set up what they need."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from typing import Any

from tests.lab import machines, places, publish, state
from tests.lab.steps import LabError, say, step

SMOKE = publish.PACK.smoke[0]


def prepare(name: str) -> None:
    """Bring everything up that a deploy needs: pack, hub and a machine that answers on ssh."""
    publish.ensure_hub(publish.ensure_pack())
    machines.up(name)


def deploy(name: str) -> None:
    """Run the run-book against the machine, shown and kept in a log."""
    log = places.LOGS / f"{name}-deploy.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = [
        str(places.VENV_PYTHON.with_name("pyinfra")),
        *("-y", "inventories/lab.py", "deploy/full.py"),
    ]
    with step(f"deploy ({' '.join(['pyinfra', *argv[1:]])})"), log.open("wb") as copy:
        running = subprocess.Popen(
            argv,
            cwd=places.REPO,
            env=os.environ | {"DSV4_LAB_MACHINES": name, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert running.stdout is not None
        for line in running.stdout:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            copy.write(line)
        status = running.wait()
    if status:
        raise LabError(f"the deploy failed with status {status}; see {log}")
    machines.harvest_archives(name)


def _request(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as response:
            value = json.load(response)
    except (OSError, ValueError) as error:
        raise LabError(
            f"no answer from {url} ({error}); see tests/lab.sh ssh, then: journalctl -u dsv4"
        ) from error
    if not isinstance(value, dict):
        raise LabError(f"{url} answered {value!r}, which is no object")
    return value


def ask(name: str) -> None:
    """Ask the served model, print its answer, and how to go on from here."""
    base = f"http://127.0.0.1:{state.read().machines[name].serve_port}"
    model = _request(f"{base}/v1/models")["data"][0]["id"]
    question = {
        "model": model,
        "prompt": SMOKE.prompt,
        "max_tokens": SMOKE.max_tokens,
        "temperature": 0,
    }
    with step("the question"):
        answer = _request(f"{base}/v1/completions", question)["choices"][0]["text"]
    front = "bash tests/lab.sh"
    target = "" if name == places.DEFAULT_NAME else f" {name}"
    print(
        f"\n{SMOKE.prompt}{answer}\n\n"
        f"ask again:  curl -s {base}/v1/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(question))}\n"
        f"look in:    {front} ssh{target}   (as the user {places.USER}, who has sudo)\n"
        f"stop:       {front} down{target}\n"
        f"delete:     {front} destroy{target}",
        flush=True,
    )


def up(name: str) -> None:
    """Do all of it, to the model's answer."""
    begun = time.monotonic()
    prepare(name)
    deploy(name)
    ask(name)
    say(f"lab: {name} is up after {time.monotonic() - begun:.0f} s")


def down(name: str) -> None:
    """Stop the machine, and the hub with the last of them."""
    _require(name)
    with step(f"{name} shuts down"):
        machines.down(name)
    _release_hub()


def destroy(name: str) -> None:
    """Delete the machine; nothing to delete is fine."""
    if name not in machines.known_names() and not (places.MACHINES / name).exists():
        say(f"lab: there is no machine {name}")
        return
    with step(f"{name} is deleted"):
        machines.destroy(name)
    _release_hub()


def _release_hub() -> None:
    if not any(machines.is_running(other) for other in machines.known_names()):
        publish.stop_hub()


def status() -> None:
    """Print one line a machine."""
    lab = state.read()
    if not lab.machines:
        print("no machines; bash tests/lab.sh up makes one")
    for name, entry in sorted(lab.machines.items()):
        if not machines.is_running(name):
            condition = "stopped"
        elif machines.answers(name):
            condition = "running"
        else:
            condition = "running, no ssh"
        print(
            f"{name:<16} {condition:<16} ssh 127.0.0.1:{entry.ssh_port}  "
            f"serve 127.0.0.1:{entry.serve_port}"
        )


def ssh(name: str, command: list[str]) -> int:
    """Open a shell in the machine, or run a command there."""
    _require(name)
    argv = machines.ssh_argv(name)
    if command:
        argv.append(shlex.join(command) if len(command) > 1 else command[0])
    os.execvp(argv[0], argv)


def _require(name: str) -> None:
    if name not in machines.known_names():
        known = ", ".join(machines.known_names()) or "none"
        raise LabError(f"no machine {name} (there is: {known}); bash tests/lab.sh up {name}")


def _name(text: str) -> str:
    if not places.NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no machine name: a-z, 0-9 and -, beginning with a letter, 2 to 32 long"
        )
    return text


def main(argv: list[str]) -> int:
    """Read the command line and run one command."""
    parser = argparse.ArgumentParser(prog="tests/lab.sh", description="A virtual Spark.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, sentence in {
        "up": "make, boot, deploy and ask the model",
        "prepare": "everything up to the deploy: pack, hub and a machine that answers on ssh",
        "boot": "only the machine",
        "down": "shut the machine down",
        "status": "one line a machine",
        "ssh": "a shell in the machine, or a command after --",
        "destroy": "delete the machine; caches stay",
    }.items():
        sub = commands.add_parser(command, help=sentence)
        if command != "status":
            sub.add_argument("name", nargs="?", type=_name, default=places.DEFAULT_NAME)
    if "--" in argv:
        cut = argv.index("--")
        argv, rest = argv[:cut], argv[cut + 1 :]
    else:
        rest = []
    options = parser.parse_args(argv)
    if rest and options.command != "ssh":
        parser.error("only ssh takes a command after --")
    try:
        match options.command:
            case "status":
                status()
            case "ssh":
                return ssh(options.name, rest)
            case "boot":
                machines.up(options.name)
            case "prepare":
                prepare(options.name)
            case "up":
                up(options.name)
            case "down":
                down(options.name)
            case "destroy":
                destroy(options.name)
    except LabError as error:
        say(f"lab: {error}")
        return 1
    except KeyboardInterrupt:
        say("lab: cut off; the same command goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

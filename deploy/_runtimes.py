"""What can be gone back to, decided by state alone."""

from deploy._state import State


def way_back(state: State, wanted: str | None) -> tuple[str, str]:
    """Return the runtime to go back to and why that cannot be done; one of them is empty.

    + wanted: the ID that was asked for; without one it is the runtime before
    """
    if not state.known:
        return "", "the machine does not answer as this version's tools do; deploy/full.py first"
    complete = sorted(name for name, it in state.runtimes.items() if it.get("complete"))
    others = [name for name in complete if name != state.current]
    choices = f"complete are: {', '.join(others) or 'no others'}"
    target = wanted or state.raw.get("previous")
    if not target or (not wanted and target == state.current):  # a switch was cut off between links
        return "", f"there is no runtime before {state.current or 'the first'}; {choices}"
    found = state.runtimes.get(target)
    if found is None:
        return "", f"runtime {target} is not on the machine; {choices}"
    if not found.get("complete"):
        why = "; ".join(found.get("drift") or ["it was never finished"])
        return "", f"runtime {target} cannot serve: {why}; {choices}"
    return target, ""

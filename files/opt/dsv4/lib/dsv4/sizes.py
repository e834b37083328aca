"""Sizes as people read them."""


def both_units(count: float) -> str:
    """Return a size as disks are sold (GB) and as tools print it (GiB)."""
    if count < 1e8:
        return f"{count / 1e6:.1f} MB ({count / (1 << 20):.1f} MiB)"
    return f"{count / 1e9:.1f} GB ({count / (1 << 30):.1f} GiB)"

"""The name of the processor, for the records."""

from __future__ import annotations

import platform


def processor() -> str:
    """Return the model of the processor, as the system names it."""
    try:
        with open("/proc/cpuinfo") as file:
            named = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return platform.processor()
    found = {key.strip(): value.strip() for key, value in named.items()}
    keys = ("model name", "cpu family", "model", "stepping")
    name, *numbers = (found.get(key, "unknown") for key in keys)
    return f"{name} (family {numbers[0]}, model {numbers[1]}, stepping {numbers[2]})"

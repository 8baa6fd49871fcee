"""The command `embedfuse`. What it needs beyond NumPy is optional, so this file looks before it loads."""

import importlib.util
import sys

NEEDED = {
    "torch": "torch",
    "safetensors": "torch",
    "typer": "cli",
    "rich": "cli",
    "pyarrow": "cli",
    "matplotlib": "cli",
}
"""Modules, and the extra that brings each."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 for a mistake of the user, 130 after Ctrl-C."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(dict.fromkeys(NEEDED[name] for name in missing))
        print(
            f"embedfuse: the command line needs {', '.join(missing)}, not installed here.\n"
            f"Install with:  pip install 'embedfuse[{extras}]'  (in a checkout: pip install '.[{extras}]')",
            file=sys.stderr,
        )
        return 2
    from .commands.app import run_app

    return run_app(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())

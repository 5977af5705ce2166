"""`python -m bench` and the `bench` script: signals are handled before anything slow is imported."""

from __future__ import annotations

from bench.core import signals


def main() -> None:
    """Entry point of the `bench` script."""
    signals.end_at_once()
    from bench.cli.app import main as run_command

    run_command()


if __name__ == "__main__":
    main()

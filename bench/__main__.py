"""`python -m bench`: the same as the `bench` script."""

from bench.cli.app import main

if __name__ == "__main__":
    main()

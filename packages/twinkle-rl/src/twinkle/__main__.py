"""`python -m twinkle` is the `twinkle` command."""

from twinkle.cli.main import entry

if __name__ == "__main__":  # a process that multiprocessing spawns imports this file again
    entry()

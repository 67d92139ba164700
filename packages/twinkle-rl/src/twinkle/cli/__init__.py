"""The `twinkle` command."""

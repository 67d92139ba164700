"""Configuration of `twinkle topology`."""

from __future__ import annotations

from pathlib import Path

from twinkle.config._grpo import GRPOConfig


class TopologyConfig(GRPOConfig):
    """Draw the groups and meshes that `twinkle grpo` would use with the same options, and start nothing."""

    svg: Path | None = None
    """Write the drawing to this file as SVG, which suits light and dark pages; empty: print it as plain text."""

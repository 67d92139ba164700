"""Run Python classes on Ray workers or in process, with mesh-aware dispatch and collect."""

"""What Ray 2.60 reads from the environment when it is imported; so this module does not import it."""

import os
import secrets
import sys


def prepare(*, starts_cluster: bool) -> None:
    """Set Ray's options, where the user has not. To be called before Ray is first imported.

    starts_cluster: whether a Ray will be started here, rather than joined.
    """
    # It would report its usage over the network.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A driver under `uv run` would send its folder to every worker and start it through uv.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # It keeps the token of the clusters that it starts in the home folder, which may be read-only; a token of this process needs no file.
    if starts_cluster and "ray" not in sys.modules and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

"""How the ranks of a component find one another: a socket that rank 0 holds from the start."""

import socket
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldPort:
    """A bound, listening TCP socket that is handed over and never released in between, so that nobody can take its port.

    host, port: where others connect. listen_fd: the socket's file descriptor; whoever serves on it owns and closes it, as
    torch's `TCPStore(host, port, world_size, is_master=True, master_listen_fd=listen_fd)` does.
    """

    host: str
    port: int
    listen_fd: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the ranks of this worker's component meet.

    host, port: of the socket that rank 0 holds. listen_fd: its file descriptor on rank 0, None on the others. A TCPStore that was
    given it owns it: make one. rank, world_size: of this worker in its component.
    """

    host: str
    port: int
    listen_fd: int | None
    rank: int
    world_size: int


def hold_port(host: str) -> HeldPort:
    """Bind and listen on a free port of `host`. Raises OSError if the address is not this machine's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(1024)
        return HeldPort(host=host, port=listener.getsockname()[1], listen_fd=listener.detach())

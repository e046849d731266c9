"""Connections to other ranks are closed, and no other."""

import socket

from refimpl.comm.hosts import sockets


def connection(listener):
    ours = socket.create_connection(listener.getsockname())
    return ours, listener.accept()[0]


def test_what_was_made_in_the_context_is_closed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        user = connection(listener)
        with sockets.noted():
            ranks = connection(listener)
        later = connection(listener)
        for end in (*user, *ranks, *later):
            end.settimeout(5)
        sockets.close_all()
        assert ranks[0].recv(1) == ranks[1].recv(1) == b""
        for one, other in (user, later):
            one.sendall(b"x")
            assert other.recv(1) == b"x"
        for end in (*user, *ranks, *later):
            end.close()
    sockets._ours.clear()

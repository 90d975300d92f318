"""Messages between a Worker and its trainer: exact numbers, whole messages, a clean end."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import wire
from orchestrator.wire import Channel, wait_readable


@pytest.fixture
def ends():
    """The raw socket of a trainer, and the Worker's channel."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    with ours, theirs:
        yield ours, channel


def through(value: object) -> object:
    """Send a value through a real socket."""
    left, right = socket.socketpair()
    with left, right:
        Channel(left).send({"value": value})
        message = Channel(right).receive()
    assert message is not None
    return message["value"]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(st.floats(allow_nan=False))
def test_every_float_arrives_exactly(value):
    """Any float64, also -0.0, the infinities and denormals, arrives with the same bits."""
    assert bits(through(value)) == bits(value)


@given(st.binary(min_size=8, max_size=8))
def test_every_bit_pattern_arrives(pattern):
    """Any eight bytes that are a float64 arrive as the same number; NaN arrives as NaN."""
    value = struct.unpack("<d", pattern)[0]
    arrived = through(value)
    assert bits(arrived) == pattern or (math.isnan(value) and math.isnan(arrived))


@given(st.integers(min_value=-(2**64), max_value=2**64))
def test_every_integer_arrives(value):
    """Integers arrive as integers, exactly, beyond 2**53 too."""
    arrived = through(value)
    assert arrived == value
    assert type(arrived) is int


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_every_document_arrives(value):
    """Any JSON document arrives as it was, whatever line ends, NULs and surrogates its strings hold."""
    assert through(value) == value


def test_a_message_in_pieces(ends):
    """A message that arrives byte by byte is given out once, when it is whole."""
    raw, channel = ends
    for byte in b'{"op": "report"}':
        raw.send(bytes([byte]))
        assert channel.fill()
        assert channel.take() is None
    raw.send(b"\n")
    assert channel.fill()
    assert channel.take() == {"op": "report"}
    assert channel.take() is None


def test_two_messages_in_one_packet(ends):
    """Messages that arrive together are given out one by one, in order, and half a third one is kept."""
    raw, channel = ends
    raw.send(b'{"n": 1}\n{"n": 2}\n{"n"')
    assert channel.receive() == {"n": 1}
    assert channel.take() == {"n": 2}
    assert channel.take() is None
    raw.send(b": 3}\n")
    assert channel.receive() == {"n": 3}


def test_a_message_larger_than_the_socket(ends):
    """A message of several megabytes is sent whole."""
    raw, channel = ends
    text = "x" * 3_000_000
    sender = threading.Thread(target=Channel(raw).send, args=({"text": text},))
    sender.start()
    assert channel.receive() == {"text": text}
    sender.join()


def test_end_of_the_stream(ends):
    """When the other end closes, the messages before it are given out, and then None for ever."""
    raw, channel = ends
    raw.send(b'{"n": 1}\n{"half')
    raw.close()
    assert channel.receive() == {"n": 1}
    assert channel.receive() is None
    assert channel.receive() is None
    assert not channel.fill()


def test_reset_is_an_end():
    """A peer that was killed with unread data resets the connection: that is an end too, and no error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with accepted:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert Channel(accepted).receive() is None


def test_sending_to_nobody(ends):
    """Sending to an end that is gone is an OSError, which the Worker takes for a crash."""
    raw, channel = ends
    raw.close()
    with pytest.raises(OSError, match=r"pipe|reset"):
        channel.send({"ok": None})


def test_a_runaway_message(ends, monkeypatch):
    """A line without an end is refused before it fills the Worker's memory."""
    monkeypatch.setattr(wire, "MAX_LINE", 1000)
    raw, channel = ends
    raw.send(b"x" * 1001)
    with pytest.raises(ValueError, match="longer than 1000 bytes"):
        channel.receive()


@pytest.mark.parametrize("line", [b"[1]\n", b"3\n", b"null\n", b"{nonsense\n", b"\n"])
def test_what_is_no_message(ends, line):
    """A line that is no JSON object is a ValueError."""
    raw, channel = ends
    raw.send(line)
    with pytest.raises(ValueError, match=r"object|Expect|JSON"):
        channel.receive()


def test_values_json_cannot_hold(ends):
    """A value that JSON has no words for fails at the sender, and nothing is sent."""
    raw, channel = ends
    with pytest.raises(TypeError):
        Channel(raw).send({"value": {1, 2}})
    raw.close()
    assert channel.receive() is None


def test_waiting(ends):
    """What can be read, or was closed, is returned; after the timeout nothing is."""
    raw, channel = ends
    other, far = socket.socketpair()
    with other, far:
        assert wait_readable([channel, far], 0) == []
        raw.send(b"{}\n")
        assert wait_readable([channel, far], 10) == [channel]
        other.close()
        assert set(wait_readable([channel, far])) == {channel, far}


def test_waiting_on_high_descriptors():
    """Descriptors above 1023, which select() cannot take and a Ray process has, can be waited for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    left, right = socket.socketpair()
    try:
        high = socket.socket(fileno=os.dup2(right.fileno(), 2000))
        with left, right, high:
            left.send(b"{}\n")
            assert wait_readable([high], 10) == [high]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_line_a_message(ends):
    """Line ends inside strings are escaped: one message is one line of ASCII."""
    raw, channel = ends
    channel.send({"text": "a\nb\r\u2028ü"})
    line = raw.recv(1000)
    assert line.count(b"\n") == 1
    assert line.isascii()
    assert json.loads(line) == {"text": "a\nb\r\u2028ü"}

"""How the launchers of several nodes meet and notice at once when one of them goes away.

The head listens on CONTROL_PORT. A node connects, proves that it has the run's token (HMAC over the head's nonce, so
the token itself never travels), and says who it is. From then on both sides send a sign of life every second. A closed
connection, or silence for LOST_TIMEOUT_S, means that the other one has gone away. Messages are JSON, one per line.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

PING_S = 1.0
HANDSHAKE_S = 10.0
MAX_LINE = 65536


@dataclass(frozen=True)
class NodeHello:
    """What a node says of itself; ``digest`` stands for its configuration, which must be the head's."""

    address: str
    node_rank: int | None
    digest: str

    def name(self) -> str:
        """The node as messages call it."""
        return self.address if self.node_rank is None else f"{self.address} (node {self.node_rank})"


class Channel:
    """One connection: ``receive`` gives the next message that is no sign of life; ``lost`` says why it ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(HANDSHAKE_S)
        self._lost_timeout_s = HANDSHAKE_S
        self._reader = connection.makefile("rb")
        self._write_lock = threading.Lock()
        self._closed = threading.Event()
        self._inbox: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        self.lost: str | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; a broken connection shows in ``lost``."""
        try:
            with self._write_lock:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            self._end(f"closed its connection ({error.strerror or 'timed out'})")

    def read_line(self) -> dict[str, Any]:
        """The next message, read here and now (only before ``start``); OSError or ValueError when there is none."""
        line = self._reader.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise ConnectionError("closed its connection")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("sent something that is no message")
        return message

    def start(self, lost_timeout_s: float) -> None:
        """Begin the signs of life and the reading, each in a thread that ends with the connection."""
        self._lost_timeout_s = lost_timeout_s
        self._connection.settimeout(lost_timeout_s)
        threading.Thread(target=self._ping, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, or None after ``timeout_s`` seconds or when the connection is lost."""
        with self._arrived:
            self._arrived.wait_for(lambda: bool(self._inbox) or self.lost is not None, timeout_s)
            return self._inbox.pop(0) if self._inbox else None

    def close(self) -> None:
        """End the connection from this side."""
        self._end("was closed here")

    def _ping(self) -> None:
        while not self._closed.wait(PING_S):
            self.send({"kind": "alive"})

    def _read(self) -> None:
        try:
            while not self._closed.is_set():
                message = self.read_line()
                if message.get("kind") != "alive":
                    with self._arrived:
                        self._inbox.append(message)
                        self._arrived.notify_all()
        except TimeoutError:
            self._end(f"gave no sign of life for {self._lost_timeout_s:g} s")
        except (OSError, ValueError):
            self._end("closed its connection")

    def _end(self, reason: str) -> None:
        with self._arrived:
            if self.lost is None:
                self.lost = reason
            self._arrived.notify_all()
        self._closed.set()
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed by the other side


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), "sha256").hexdigest()


class Head:
    """The head's side: takes in nodes until ``close``."""

    def __init__(self, address: str, port: int, token: str, digest: str, lost_timeout_s: float) -> None:
        self._token, self._digest, self._lost_timeout_s = token, digest, lost_timeout_s
        self._nodes: dict[str, tuple[NodeHello, Channel]] = {}
        self._refused: list[str] = []
        self._changed = threading.Condition()
        self._listener = socket.create_server((address, port), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def nodes(self) -> list[NodeHello]:
        """The nodes that have joined, by address."""
        with self._changed:
            return [hello for hello, _ in sorted(self._nodes.values(), key=lambda node: node[0].address)]

    def wait_for(self, num_workers: int, timeout_s: float) -> bool:
        """Wait until that many nodes have joined; False when they have not in time or one was refused or lost."""
        with self._changed:
            deadline = time.monotonic() + timeout_s
            while len(self._nodes) < num_workers and not self._refused:
                left = deadline - time.monotonic()
                if left <= 0 or not (self._changed.wait(min(left, 0.5)) or self._lost() is None):
                    break
            return len(self._nodes) >= num_workers and not self._refused

    def problem(self) -> str | None:
        """What is wrong with the nodes that joined: the first one refused or gone away; None when nothing is."""
        with self._changed:
            return self._refused[0] if self._refused else self._lost()

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send a message to every node."""
        with self._changed:
            channels = [channel for _, channel in self._nodes.values()]
        for channel in channels:
            channel.send(message)

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._listener.close()
        with self._changed:
            for _, channel in self._nodes.values():
                channel.close()

    def _lost(self) -> str | None:
        for hello, channel in self._nodes.values():
            if channel.lost is not None:
                return f"node {hello.name()} went away: it {channel.lost}"
        return None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        """Take one connection through the handshake; strangers are dropped without a word."""
        channel = Channel(connection)
        nonce = secrets.token_hex(16)
        channel.send({"kind": "hello", "nonce": nonce})
        try:
            message = channel.read_line()
            has_token = hmac.compare_digest(str(message.get("proof")), _proof(self._token, nonce))
            hello = NodeHello(str(message["address"]), message["node_rank"], str(message["digest"]))
        except (OSError, ValueError, KeyError):
            channel.close()
            return
        refusal = None
        if not has_token:
            refusal = "its token is not the head's: share RAY_AUTH_TOKEN, or OUTPUT_DIR"
        elif hello.digest != self._digest:
            refusal = "its configuration is not the head's: start the same script with the same settings on every node"
        if refusal is not None:
            channel.send({"kind": "refused", "reason": refusal})
            channel.close()
            if has_token:  # a stranger without it must not be able to end the run
                with self._changed:
                    self._refused.append(f"node {hello.name()} was refused: {refusal}")
                    self._changed.notify_all()
            return
        channel.send({"kind": "welcome"})
        channel.start(self._lost_timeout_s)
        with self._changed:
            self._nodes[hello.address] = (hello, channel)
            self._changed.notify_all()


def join_head(
    address: str, port: int, token: str, hello: NodeHello, timeout_s: float, lost_timeout_s: float
) -> Channel:
    """Connect to the head, trying until ``timeout_s`` has passed; ValueError that names the head when that fails."""
    deadline = time.monotonic() + timeout_s
    where = f"the head {address}:{port}"
    last = "never answered"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((address, port), timeout=min(5.0, timeout_s))
        except OSError as error:
            last = f"could not be reached ({error.strerror or error})"
            time.sleep(0.5)
            continue
        channel = Channel(connection)
        try:
            nonce = str(channel.read_line()["nonce"])
            channel.send({"kind": "join", "proof": _proof(token, nonce), **asdict(hello)})
            answer = channel.read_line()
        except (OSError, ValueError, KeyError):
            last = "closed the connection"
            channel.close()
            time.sleep(0.5)
            continue
        if answer.get("kind") == "refused":
            raise ValueError(f"{where} refused this node {hello.name()}: {answer.get('reason')}")
        channel.start(lost_timeout_s)
        return channel
    raise ValueError(f"{where} {last} within {timeout_s:g} s: is the script running there, with this MASTER_ADDR?")

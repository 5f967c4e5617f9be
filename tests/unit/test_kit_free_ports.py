"""Ports for programs that have to be told one: free, different, and not of the kernel's own range."""

import socket
from pathlib import Path

import pytest

from readyplane.kit import free_ports as module
from readyplane.kit.free_ports import LOWEST, free_ports

HOST = "127.0.0.1"


def below(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str) -> None:
    path = tmp_path / "range"
    path.write_text(told)
    monkeypatch.setattr(module, "RANGE", path)


def test_they_are_different_and_below_what_outgoing_connections_get(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    below(monkeypatch, tmp_path, "32768\t60999\n")
    found = free_ports(HOST, 20)
    assert len(set(found)) == 20
    assert all(LOWEST <= port < 32_768 for port in found)
    held = [socket.create_server((HOST, port)) for port in found]
    for s in held:
        s.close()


@pytest.mark.parametrize("told", ["10500 65535", "1024 65535", "", "what"])
def test_without_room_below_the_kernel_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str
) -> None:
    below(monkeypatch, tmp_path, told)
    assert len(set(free_ports(HOST, 3))) == 3


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    below(monkeypatch, tmp_path, f"{LOWEST + 3}")
    monkeypatch.setattr(module, "FEW", 1)
    taken = []
    for port in (LOWEST, LOWEST + 1):
        try:
            taken.append(socket.create_server((HOST, port)))
        except OSError:
            continue
    try:
        (found,) = free_ports(HOST, 1)
        assert found not in (LOWEST, LOWEST + 1)
    finally:
        for s in taken:
            s.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        free_ports("192.0.2.1", 1)

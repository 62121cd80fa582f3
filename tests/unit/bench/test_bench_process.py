"""Real processes: what matters is what is left of them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvxfer.bench import process
from kvxfer.bench.process import Server, ServerError, command_line, cpu_seconds, free_ports, running, tree
from kvxfer.errors import TransportError

# A server like vLLM's: a child, a grandchild, one that leaves the process group, one orphaned at birth. Each writes its pid.
FAKE = textwrap.dedent(
    """
    import http.server, os, signal, subprocess, sys, time
    port, pids, *modes = int(sys.argv[1]), sys.argv[2], *sys.argv[3:]
    SLEEPER = "import signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"
    MIDDLE = (
        "import subprocess, sys, time\\n"
        f"one = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}])\\n"
        f"two = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}], start_new_session=True)\\n"
        "print(one.pid, two.pid, flush=True)\\n"
        "if sys.argv[1] == 'stay': time.sleep(600)"
    )
    found = [os.getpid()]
    for fate in ("stay", "go"):
        middle = subprocess.Popen([sys.executable, "-S", "-c", MIDDLE, fate], stdout=subprocess.PIPE, text=True)
        found += [middle.pid, *map(int, middle.stdout.readline().split())]
    with open(pids + ".new", "w") as file:
        file.write(" ".join(map(str, found)))
    os.rename(pids + ".new", pids)
    print("all children are there", flush=True)
    if "deaf" in modes: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "dies" in modes: sys.exit("no memory for the KV cache")
    if "never" in modes: time.sleep(600)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *_): pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


@pytest.fixture
def make(tmp_path):
    servers = []

    def make(*modes, **settings):
        (port,) = free_ports(1)
        name = f"fake{len(servers)}"
        command = [sys.executable, "-S", "-c", FAKE, str(port), str(tmp_path / name), *modes]
        settings = {"ready_seconds": 15.0, "grace_seconds": 5.0, **settings}
        url = f"http://127.0.0.1:{port}"
        servers.append(Server(name, command, dict(os.environ), tmp_path / "logs" / f"{name}.log", url, **settings))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


def pids_of(server):
    path = server.log.parent.parent / server.name
    wait_until(path.exists)
    return [int(word) for word in path.read_text().split()]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def alive(pids):
    found = []
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


def test_stop_leaves_nothing_not_even_what_ignores_it_or_left_the_group(make):
    server = make()
    with running(server) as seconds:
        assert 0 < seconds[0] < 15
        pids = pids_of(server)
        assert len(pids) == 7
        wait_until(lambda: len(alive(pids)) == 6)  # the orphans' parent is gone by design
        assert set(alive(pids)) <= set(server.pids())
        assert server.healthy()
    assert alive(pids) == []
    assert not server.running()


def test_a_deaf_server_is_killed_when_its_grace_is_over(make):
    server = make("deaf", grace_seconds=0.3)
    with running(server):
        pids = pids_of(server)
        began = time.monotonic()
    assert 0.3 <= time.monotonic() - began < 3
    assert alive(pids) == []


def test_kill_does_not_wait_for_the_grace(make):
    server = make("deaf", grace_seconds=60.0)
    server.start()
    server.wait_ready()
    pids = pids_of(server)
    began = time.monotonic()
    server.kill()
    assert time.monotonic() - began < 3
    assert alive(pids) == []
    server.stop()  # again: harmless


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(make):
    server = make("dies")
    server.start()
    with pytest.raises(ServerError, match=r"fake0 ended with status 1 (?s:.*)no memory for the KV cache"):
        server.wait_ready()
    assert alive(pids_of(server)) == []


def test_a_command_that_is_not_there_is_reported(tmp_path):
    server = Server("absent", ["/no/such/program"], {}, tmp_path / "log", "http://127.0.0.1:1")
    with pytest.raises(ServerError, match=r"status 127(?s:.*)No such file"), running(server):
        pass


def test_a_late_server_is_reported_and_everything_is_stopped(make):
    good, late = make(), make("never", ready_seconds=2.0)
    with pytest.raises(ServerError, match=r"fake1 was not ready within 2 s(?s:.*)all children are there"):  # noqa: SIM117
        with running(good, late):
            pass
    assert alive(pids_of(good) + pids_of(late)) == []


def test_a_failure_in_the_block_stops_everything(make):
    server = make()
    with pytest.raises(ZeroDivisionError), running(server):
        pids = pids_of(server)
        1 / 0  # noqa: B018
    assert alive(pids) == []


def test_an_error_in_the_block_names_a_server_that_has_ended(make):
    server, other = make(), make()
    with pytest.raises(ServerError, match=r"refused; fake0 has ended; (?s:.*)all children are there"):  # noqa: SIM117
        with running(server, other):
            os.kill(pids_of(server)[0], signal.SIGKILL)
            wait_until(lambda: not server.running())
            raise TransportError("refused")
    assert alive(pids_of(server) + pids_of(other)) == []


OWNER = """
import sys, time
from pathlib import Path
from kvxfer.bench.process import Server
server = Server("fake", sys.argv[2:], {}, Path(sys.argv[1]), "http://127.0.0.1:1")
server.start()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_owner_is_killed(tmp_path, number):
    server = [sys.executable, "-S", "-c", FAKE, "0", str(tmp_path / "pids"), "never"]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "log"), *server])
    try:
        wait_until((tmp_path / "pids").exists)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: len(alive(pids)) == 6)
        owner.send_signal(number)
        owner.wait()
        wait_until(lambda: not alive(pids))
    finally:
        owner.kill()
        owner.wait()


def test_processes_can_be_found_by_their_title_and_paused(make):
    server = make("never")
    server.start()
    pids = pids_of(server)
    sleepers = server.named("SIG_IGN")
    assert set(sleepers) <= set(server.pids())
    server.signal(signal.SIGSTOP, [pids[0]])
    wait_until(lambda: Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    assert len(server.titles()) == len(server.pids())
    assert tree(pids[0])[0] == pids[0]
    assert "fake0" in command_line(pids[0])
    assert command_line(2**22 + 1) == ""


def test_a_server_has_its_own_process_group_and_no_input(make):
    server = make("never")
    server.start()
    first = pids_of(server)[0]
    assert os.getpgid(first) == first
    assert os.getpgid(first) != os.getpgid(0)
    assert Path(f"/proc/{first}/fd/0").readlink() == Path("/dev/null")


def test_free_ports_are_different_and_free():
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert min(ports) > 1023


def test_free_ports_are_none_that_the_kernel_gives_to_others(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_EPHEMERAL", tmp_path / "range")
    (tmp_path / "range").write_text("10040\t60999\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 10007))
        ports = process.free_ports(20)
    assert all(10000 <= port < 10040 for port in ports)
    assert 10007 not in ports
    (tmp_path / "range").write_text("1024 65535")
    assert len(set(process.free_ports(3))) == 3, "on a host that gives out all of them, any will do"
    monkeypatch.setattr(process, "_EPHEMERAL", tmp_path / "none")
    assert len(set(process.free_ports(3))) == 3


def test_cpu_time_is_counted_and_what_is_gone_counts_nothing():
    before = cpu_seconds([os.getpid()])
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert 0.05 < cpu_seconds([os.getpid()]) - before < 5
    assert cpu_seconds([2**22 + 1]) == 0.0


def test_supervisor_needs_only_the_standard_library():
    # It runs with -I -S: an import of ours, or of anything installed, would break every engine start.
    source = Path(process.supervise.__file__).read_text()
    assert "import kvxfer" not in source
    assert "from kvxfer" not in source

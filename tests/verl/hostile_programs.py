"""Programs that were not written to solve a problem. One that reaches what it wants prints ESCAPED and no more."""

from __future__ import annotations

import platform
from collections.abc import Mapping

# {marker} is a path to write, {victim} a folder with one file, {port} a listening TCP port of this machine, {parent}
# the driver. Nothing here would do lasting harm outside of the victim if a sandbox failed.
_SAYS = """
reached = []
def escaped(*_):
    reached.append(1)
def attempt(function):
    try:
        function()
    except BaseException:
        return
    escaped()
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""
_END = "print('ESCAPED' if reached else 'held')"

# What must raise, a line each.
_MUST_FAIL = """
os.fork()
os.forkpty()
os.posix_spawn("/bin/true", ["true"], {{}})
os.system("touch {marker}") and 1 / 0
os.popen("id").read()[0]
os.execv("/bin/sh", ["sh", "-c", "echo ESCAPED"])
subprocess.run(["true"])
subprocess.Popen("touch {marker}", shell=True)
__import__("multiprocessing").Process(target=escaped).start()
__import__("concurrent.futures").futures.ProcessPoolExecutor(1).submit(int).result()
__import__("pty").fork()
call(57)
call(58)
call(56, 17, 0, 0, 0, 0)
call(435, ctypes.create_string_buffer(88), 88)
call(59, b"/bin/true", None, None)
call(322, -100, b"/bin/true", None, None, 0)
socket.socket()
socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
socket.socket(socket.AF_INET6)
socket.socket(socket.AF_UNIX)
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
socket.socketpair(socket.AF_INET)
socket.create_connection(("127.0.0.1", {port}), 2)
socket.create_connection(("localhost", {port}), 2)
socket.create_server(("127.0.0.1", 0))
socket.getaddrinfo("example.com", 80)
__import__("urllib.request").request.urlopen("http://127.0.0.1:{port}/", timeout=2)
__import__("http.client").client.HTTPConnection("127.0.0.1", {port}).request("GET", "/")
__import__("ftplib").FTP("127.0.0.1")
__import__("smtplib").SMTP("127.0.0.1", {port})
__import__("asyncio").run(__import__("asyncio").open_connection("127.0.0.1", {port}))
call(41, 2, 1, 0)
call(41, 1, 1, 0)
call(425, 8, ctypes.create_string_buffer(120))
open("{marker}", "w")
open("{marker}", "a")
open("{marker}", "x")
open("{marker}", "r+")
open("ESCAPED", "w")
open("/tmp/ESCAPED", "w")
open("/dev/shm/ESCAPED", "w")
open("/var/tmp/ESCAPED", "w")
open("/etc/passwd", "a")
open("/proc/self/mem", "r+b")
open("/proc/self/oom_score_adj", "w")
open("/proc/sys/kernel/core_pattern", "w")
open("/dev/null", "w")
open("/proc/self/fd/1", "w")
open(sys.executable, "r+b")
open(os.__file__, "a")
os.open("{marker}", os.O_CREAT | os.O_WRONLY)
os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
os.open("/", os.O_RDONLY | os.O_CREAT)
os.mkdir("{marker}")
os.makedirs("/tmp/a/b/c/ESCAPED")
os.mkfifo("{marker}")
os.mknod("{marker}")
os.symlink("/etc/passwd", "{marker}")
os.link("/etc/passwd", "{marker}")
os.rename("{victim}/file", "{marker}")
os.replace("{victim}/file", "{victim}/other")
os.unlink("{victim}/file")
os.rmdir("{victim}")
os.truncate("{victim}/file", 0)
os.chmod("{victim}/file", 0)
os.chown("{victim}/file", 1, 1)
os.utime("{victim}/file")
os.setxattr("{victim}/file", "user.x", b"y")
os.memfd_create("x")
os.sync() or call(162)
os.chroot("{victim}")
os.mkdir("/proc/ESCAPED")
__import__("shutil").rmtree("{victim}")
__import__("shutil").copy("/etc/passwd", "{marker}")
__import__("tempfile").mkdtemp()
__import__("tempfile").TemporaryFile()
__import__("sqlite3").connect("{marker}").execute("create table t (x)")
__import__("dbm.dumb").dumb.open("{marker}", "c")
__import__("pathlib").Path("{marker}").touch()
__import__("pathlib").Path("{marker}").write_text("x")
__import__("logging").FileHandler("{marker}")
__import__("multiprocessing.shared_memory").shared_memory.SharedMemory(create=True, size=10)
call(437, -100, b"{marker}", ctypes.create_string_buffer(24), 24)
call(85, b"{marker}", 0o644)
call(87, b"{victim}/file")
call(263, -100, b"{victim}/file", 0)
call(76, b"{victim}/file", 0)
call(29, 0, 1 << 20, 0o1666)
call(240, b"/ESCAPED", 66, 0o600, None)
os.kill({parent}, 0)
os.kill({parent}, signal.SIGCONT)
os.kill(os.getppid(), signal.SIGKILL)
os.kill(0, 0)
os.kill(-1, 0)
os.kill(1, 0)
os.killpg(os.getpgid(0), 0)
os.pidfd_open({parent})
call(234, {parent}, {parent}, 18)
call(200, {parent}, 18)
call(129, {parent}, 18, ctypes.create_string_buffer(128))
call(434, {parent}, 0)
__import__("fcntl").fcntl(0, 8, {parent})
__import__("fcntl").fcntl(0, 10, 9)
__import__("fcntl").ioctl(0, 0x5412, b"x")
__import__("fcntl").ioctl(0, 0x8901, b"x" * 4)
resource.prlimit({parent}, resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
os.setsid()
os.setpgid(0, 0)
os.setuid(1)
os.setgid(1)
os.setgroups([])
os.seteuid(1)
os.nice(-10)
os.setpriority(os.PRIO_PROCESS, 0, 19)
os.sched_setaffinity(0, [0])
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
call(101, 16, {parent}, 0, 0)
call(101, 0, 0, 0, 0)
call(310, {parent}, None, 0, None, 0, 0)
call(311, {parent}, None, 0, None, 0, 0)
call(157, 1, 0, 0, 0, 0)
call(157, 4, 1, 0, 0, 0)
call(317, 1, 0, None)
call(272, 0x10000000)
call(308, 0, 0)
call(165, b"none", b"{victim}", b"tmpfs", 0, None)
call(161, b"{victim}")
call(321, 0, None, 0)
call(298, None, 0, -1, -1, 0)
call(323, 0)
call(248, b"user", b"x", b"y", 1, -3)
call(250, 0, -3, 1, 0, 0)
call(155, b"{victim}", b"{victim}")
call(444, ctypes.create_string_buffer(8), 8, 0)
open("/proc/{parent}/environ", "rb").read()
open("/proc/" + str(os.getppid()) + "/environ", "rb").read()
open("/proc/{parent}/cmdline", "rb").read()
os.environ["SECRET_TOKEN"]
[0][1 - any("SECRET" in name for name in os.environ)]
"""

# What must raise where the kernel has Landlock; elsewhere a program may read what the user may.
_MUST_NOT_READ = """
open("/proc/1/environ", "rb").read()
open("/proc/self/environ", "rb").read()
open("/proc/self/maps").read()
open("/proc/{parent}/mem", "rb").read(1)
open("/etc/passwd").read()
open("/etc/shadow").read()
open("{victim}/file").read()
os.listdir("/")
os.listdir("/proc")
os.listdir("/proc/{parent}/fd")
os.listdir("/root")
os.listdir(os.getcwd())
os.readlink("/proc/{parent}/exe") and os.listdir("/tmp")
"""

# Programs of more than a line, or that must meet a limit.
_BOMBS = {
    "endless loop": "while True: pass",
    "endless loop with a handler": (
        "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, lambda *a: None)\n"
        "while True: pass"
    ),
    "endless loop that catches all": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "endless sleep": "import time\ntime.sleep(10**6)",
    "endless read": "import os, time\nos.close(0)\ntime.sleep(10**6)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nimport time\ntime.sleep(10**6)",
    "closes its streams and goes on": (
        "import os, time\nfor n in range(64):\n  try: os.close(n)\n  except OSError: pass\n"
        "time.sleep(10**6)"
    ),
    "catastrophic regex": "import re\nre.match('(a+)+$', 'a' * 64 + '!')",
    "tower of powers": "print(9**9**9**9)",
    "factorial": "import math\nprint(len(str(math.factorial(10**8))))",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "recursion of repr": "x = []\nfor _ in range(10**6): x = [x]\nprint(repr(x))",
    "deep parse": "eval('(' * 10**6)",
    "compile bomb": "(1<<19**8,)*4**8",
    "memory": "x = bytearray(1 << 40)",
    "memory by steps": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "memory of lists": "x = [[]] * 10**11",
    "memory of strings": "x = 'x' * 10**6\nwhile True: x += x",
    "memory of a dictionary": "x = {{}}\nn = 0\nwhile True: x[n] = str(n) * 100; n += 1",
    "memory mapped": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 28))",
    "memory that survives errors": (
        "x = []\nwhile True:\n  try: x.append(bytearray(1 << 20))\n  except MemoryError: pass"
    ),
    "output": "while True: print('x' * 1000)",
    "output of bytes": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "output of errors": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "output to every descriptor": (
        "import os\nwhile True:\n  for n in range(3, 64):\n    try: os.write(n, b'x' * 4096)\n"
        "    except OSError: pass"
    ),
    "output that nobody reads": "import os\nwhile True: os.write(1, b'')",
    "threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "threads that start threads": "import threading\ndef f():\n  while True: threading.Thread(target=f).start()\nf()",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "clone bomb": "import ctypes\nwhile True: ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0)",
    "subprocess bomb": "import subprocess\nwhile True:\n  try: subprocess.Popen(['yes'])\n  except OSError: pass",
    "descriptors": "import os\nx = []\nwhile True: x += os.pipe()",
    "descriptors that survive errors": "import os\nwhile True:\n  try: os.pipe()\n  except OSError: pass",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "exits early": "import os\nos._exit(0)",
    "exits in a handler": "import atexit, os\natexit.register(os._exit, 0)",
    "never ends at exit": "import atexit\natexit.register(lambda: exec('while True: pass'))",
    "thread that never ends": "import threading, time\nthreading.Thread(target=time.sleep, args=(10**6,)).start()",
    "raises a raiser": "class E(BaseException):\n  def __str__(self): raise self\nraise E()",
    "traceback without end": "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E()",
    "syntax error": "def def def",
    "nul": "print('a\\0b')\n\0",
    "surrogates": "print('\\ud800')",
    "tampers with the streams": "import sys\nsys.stdout = sys.stderr = sys.stdin = None\nprint(1)",
    "tampers with builtins": "import builtins\nbuiltins.print = builtins.exec = builtins.compile = None",
    "tampers with modules": "import sys\nsys.modules.clear()\nimport os",
    "tampers with the frames": (
        "import sys\nf = sys._getframe()\n"
        "while f: print(sorted(f.f_locals), f.f_code); f = f.f_back"
    ),
    "reads the control channel": (
        "import os\nfor n in range(3, 64):\n  try: print(os.read(n, 4096))\n  except OSError: pass"
    ),
    "forges the report": (
        "import os\nfor n in range(3, 64):\n  try: os.write(n, b'{{\"layers\": []}}\\n' * 9)\n"
        "  except OSError: pass"
    ),
    "garbage of everything": "import gc\nprint([x for x in gc.get_objects() if isinstance(x, dict) and 'word' in x])",
    "timer": (
        "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)\n"
        "signal.signal(signal.SIGALRM, lambda *a: None)\nwhile True: pass"
    ),
    "megabyte of source": "x = 1\n" * 40000,
    "long line": "x = " + "+".join(["1"] * 50000),
}  # fmt: skip


def forbidden_programs(
    marker: str, victim: str, port: int, parent: int, *, is_reading_limited: bool, per_program: int
) -> dict[str, str]:
    """First statement to program: each tries so many things that must fail, and says at its end whether one did not."""
    words = {"marker": marker, "victim": victim, "port": port, "parent": parent}
    lines = [line for line in _MUST_FAIL.splitlines() if line]
    if is_reading_limited:
        lines += [line for line in _MUST_NOT_READ.splitlines() if line]
    if platform.machine() != "x86_64":
        lines = [line for line in lines if not line.startswith("call(")]  # its numbers are those of x86_64
    groups = [lines[first : first + per_program] for first in range(0, len(lines), per_program)]
    return {group[0]: "\n".join([_SAYS, *_attempts(group, words), _END]) for group in groups}


def _attempts(lines: list[str], words: Mapping[str, object]) -> list[str]:
    return [f"attempt(lambda: {line.format(**words)})" for line in lines]


def bombs() -> dict[str, str]:
    """Name to program: each meets a limit, crashes, or spoils its own process."""
    return {name: text.format() for name, text in _BOMBS.items()}

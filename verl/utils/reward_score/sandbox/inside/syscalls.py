"""System call numbers of what a sandboxed program may ask the kernel for (Linux: x86_64, and the table of aarch64)."""

from __future__ import annotations

# name, number on x86_64, number on aarch64 ("-" where the machine has no such call)
_TABLE = """
access 21 -; alarm 37 -; arch_prctl 158 -; brk 12 214; chdir 80 49; clock_getres 229 114; clock_gettime 228 113;
clock_nanosleep 230 115; clone 56 220; clone3 435 435; close 3 57; close_range 436 436; dup 32 23; dup2 33 -;
dup3 292 24; epoll_create1 291 20; epoll_ctl 233 21; epoll_pwait 281 22; epoll_wait 232 -; eventfd2 290 19;
exit 60 93; exit_group 231 94; faccessat 269 48; faccessat2 439 439; fadvise64 221 223; fcntl 72 25; fdatasync 75 83;
fstat 5 80; fstatfs 138 44; fsync 74 82; futex 202 98; get_robust_list 274 100; getcpu 309 168; getcwd 79 17;
getdents64 217 61; getegid 108 177; geteuid 107 175; getgid 104 176; getgroups 115 158; getitimer 36 102;
getpgid 121 155; getpgrp 111 -; getpid 39 172; getppid 110 173; getrandom 318 278; getresgid 120 150;
getresuid 118 148; getrlimit 97 163; getrusage 98 165; getsid 124 156; gettid 186 178; gettimeofday 96 169;
getuid 102 174; ioctl 16 29; kill 62 129; landlock_add_rule 445 445; landlock_create_ruleset 444 444;
landlock_restrict_self 446 446; lseek 8 62; lstat 6 -; madvise 28 233; membarrier 324 283; mmap 9 222;
mprotect 10 226; mremap 25 216; munmap 11 215; nanosleep 35 101; newfstatat 262 79; open 2 -; openat 257 56;
openat2 437 437; pause 34 -; pipe 22 -; pipe2 293 59; poll 7 -; ppoll 271 73; pread64 17 67; preadv 295 69;
prlimit64 302 261; pselect6 270 72; pwrite64 18 68; read 0 63; readlink 89 -; readlinkat 267 78; readv 19 65;
recvfrom 45 207; restart_syscall 219 128; rseq 334 293; rt_sigaction 13 134; rt_sigpending 127 136;
rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigsuspend 130 133; rt_sigtimedwait 128 137;
sched_get_priority_max 146 125; sched_get_priority_min 147 126; sched_getaffinity 204 123; sched_getparam 143 121;
sched_getscheduler 145 120; sched_yield 24 124; select 23 -; sendto 44 206; set_robust_list 273 99;
set_tid_address 218 96; setitimer 38 103; setrlimit 160 164; sigaltstack 131 132; socketpair 53 199; stat 4 -;
statfs 137 43; statx 332 291; sysinfo 99 179; tgkill 234 131; time 201 -; times 100 153; tkill 200 130; uname 63 160;
wait4 61 260; waitid 247 95; write 1 64; writev 20 66
"""

# name -> (x86_64, aarch64)
NUMBERS: dict[str, tuple[int, int | None]] = {
    name: (int(x86_64), None if aarch64 == "-" else int(aarch64))
    for name, x86_64, aarch64 in map(str.split, _TABLE.split(";"))
}

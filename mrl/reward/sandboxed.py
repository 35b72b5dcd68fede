"""What runs in a sandbox: `python -I -S sandboxed.py FD`, where FD holds a job written by `mrl/reward/sandbox.py`.

A supervisor cuts itself off, forks, and ends the child and all it started when time is up. The child takes the limits
on, gives every privilege up, and runs the program. Standard library only: this file is no part of the package here.
"""
import ctypes
import json
import os
import resource
import signal
import sys
import traceback

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_TIMED_OUT = 124
# What a program sees of the machine, beside the interpreter: libraries, no data.
_SHOWN = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
# Above the ids of people and services. One for each run: the limit of processes is counted by user.
_FIRST_UID = 1 << 30


def main(fd: int) -> int:
    """Run the job; the program's exit status, or 124 when its time was up."""
    with os.fdopen(fd, "rb") as file:
        job = json.load(file)
    root = os.geteuid() == 0
    if job["level"] == "namespaces":
        _enter_namespaces(root)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    uid = _FIRST_UID + os.getpid() if root and job["level"] != "none" else None
    child = os.fork()
    if child == 0:
        try:
            _confine(job, uid)
            _run(job)
            sys.stdout.flush()
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            return 1
        return 0
    return _supervise(child, job["seconds"], job["level"] == "namespaces")


def _supervise(child: int, seconds: float, first_of_namespace: bool) -> int:
    """Wait for the child, then end whatever it left behind. The kernel does that for the first of a namespace."""
    def out_of_time(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        _, status = os.waitpid(child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        code = os.waitstatus_to_exitcode(status)
    except TimeoutError:
        code = _TIMED_OUT
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    while not first_of_namespace and (children := _children()):
        for pid in children:  # orphans come to this process, the subreaper, as their parents end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return code if code >= 0 else 128 - code


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _enter_namespaces(root: bool) -> None:
    """No network, no other processes' ids; mounts of its own. Someone who is not root needs a user namespace first."""
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    _checked(_libc.unshare(flags if root else flags | _CLONE_NEWUSER), "unshare")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)


def _confine(job: dict, uid: int | None) -> None:
    """In the child: a root of its own, a user of its own, no privileges, the limits, and no way back."""
    os.setsid()
    if job["level"] == "namespaces":
        _enter_root(job["scratch"], 4 * job["file_mb"])
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _drop_capabilities()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # last: a change of user unsets it
    megabyte = 1 << 20
    seconds = int(job["seconds"]) + 1
    for limit, value in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, job["memory_mb"] * megabyte),
                         (resource.RLIMIT_FSIZE, job["file_mb"] * megabyte), (resource.RLIMIT_CORE, 0),
                         (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, job["processes"])):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _enter_root(root: str, room_mb: int) -> None:
    """Make `root` a read-only view of the interpreter and the system's libraries, with an empty /tmp, and enter it."""
    _mount("tmpfs", root, "tmpfs", 0, "mode=0755")
    for path in (*_SHOWN, sys.base_prefix, sys.base_exec_prefix):
        inside = root + path
        if not os.path.exists(path) or os.path.exists(inside):
            continue
        os.makedirs(inside if os.path.isdir(path) else os.path.dirname(inside), exist_ok=True)
        if not os.path.isdir(path):
            open(inside, "w").close()
        _mount(path, inside, None, _MS_BIND | _MS_REC, None)
    for name in ("/proc", "/tmp"):
        os.mkdir(root + name)
    _mount("proc", root + "/proc", "proc", 0, None)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    _checked(_libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, root.encode(), _AT_RECURSIVE, attributes,
                           ctypes.c_size_t(ctypes.sizeof(attributes))), "mount_setattr")
    _mount("tmpfs", root + "/tmp", "tmpfs", 0, f"size={room_mb}m,mode=1777")
    os.chroot(root)
    os.chdir("/tmp")
    os.environ.update(HOME="/tmp", TMPDIR="/tmp")


def _run(job: dict) -> None:
    sys.argv = ["solution.py"]
    program = compile(job["program"], "solution.py", "exec")
    if "function" not in job:
        exec(program, {"__name__": "__main__"})
        return
    result_fd = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    names = {"__name__": "solution"}
    exec(program, names)
    name = job["function"]
    function = names[name] if name in names else getattr(names["Solution"](), name)
    result = json.dumps(function(*job["arguments"])).encode()
    with os.fdopen(result_fd, "wb") as file:
        file.write(result)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0-31, then of 32-63
    _checked(_libc.capset(header, none), "capset")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _checked(_libc.mount(*encoded, ctypes.c_ulong(flags), data.encode() if data else None), f"mount {target}")


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _checked(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

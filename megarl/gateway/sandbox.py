"""Sandboxes of the environment `agent`: the arguments that start a program in one, and what it may see and use.

    runner -> guardian -> bwrap, docker, ... -> inside.py -> the program
                                                  '-- Unix socket: the gateway, which is all that it can reach

Every kind passes stdin, stdout, stderr and the environment to `inside.py`; that file describes what they carry.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.gateway.enter import NOBODY, enter, is_root
from megarl.system.errors import ConfigError
from megarl.system.leftovers import PREFIX

KINDS = ("none", "bubblewrap", "docker", "apptainer")
#: Port of the endpoint in a sandbox; a sandbox has a network of its own, so the port is free.
PORT = 8123
#: The folder of a program in a sandbox, with its task and result.
FOLDER = "/tmp/episode"
#: Maximum bytes of a program's result.
RESULT_BYTES = 1 << 16
#: Variables that programs in a sandbox get from the trainer's environment.
INHERITED = ("PATH", "LANG", "LC_ALL", "TERM", "TZ", "PYTHONPATH", "VIRTUAL_ENV")
#: How many more processes and threads than the recipe's limit the kernel allows in a sandbox. Some are the sandbox's
#: own; with bubblewrap, the watch kills a program that exceeds the recipe's limit.
_MORE_PROCESSES = 8
_SHARED_FILES = {
    "passwd": f"agent:x:1000:1000::{FOLDER}:/bin/sh\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
#: Variables with which docker's client finds its daemon. The container does not get them.
_OF_CLIENT = (
    *("HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"),
    "XDG_RUNTIME_DIR",
)
_PROBE_S = 20.0
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Limits:
    """The limits of a program.

    Attributes:
        memory_mb: address space of each of the program's processes, and memory of all of them together.
        cpu_s: CPU time of all the program's processes together.
        processes: number of processes and threads at the same time.
        output_mb: megabytes that the program may write to stdout and stderr.
        disk_mb: megabytes that the program may write to files in a sandbox.
        seconds: time after which a sandbox ends by itself, if the runner has not ended it before.

    None: no limit.
    """

    memory_mb: int | None = None
    cpu_s: float | None = None
    processes: int | None = None
    output_mb: int | None = None
    disk_mb: int = 64
    seconds: float = 600.0


@dataclass(frozen=True)
class Launch:
    """How a program is started.

    Attributes:
        argv: the command; empty: the runner calls its function (`megarl.gateway.runner`).
        mounts: (source, target) of folders and files that root binds for the user that the sandbox runs as.
        as_nobody: whether the user nobody starts the sandbox, because the trainer is root.
        after: a command that ends the rest of a program that was ended, such as its container; empty: none.
    """

    argv: list[str]
    environment: dict[str, str]
    mounts: Sequence[tuple[str, str]] = ()
    as_nobody: bool = False
    after: Sequence[str] = ()


@dataclass
class Sandbox:
    """One kind of sandbox, and what programs may see in it.

    Attributes:
        kind: `bubblewrap`, `docker`, `apptainer`, or the arguments of a command of the user's (`_PLACES`).
        readable: files and folders that programs may read, in addition to the interpreter and their own files.
        cwd: folder in which programs start, and which they may read; None: each program's own folder.
        image: the image that docker or apptainer starts.
        shared: a folder with files that all sandboxes of a replica need; made by `open`.
    """

    kind: str | Sequence[str]
    limits: Limits
    readable: Sequence[str] = ()
    cwd: str | None = None
    image: str | None = None
    shared: Path | None = None
    _held: int = -1  # descriptor of the shared folder, by which other runs see that it is in use

    def open(self) -> Path:
        """Make the shared folder; return where the gateway's socket belongs."""
        if self.shared is None:
            self.shared = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._held = os.open(self.shared, os.O_RDONLY)
            self.shared.chmod(0o711)  # the sandbox may run as another user, and cannot list the folder
            shutil.copyfile(Path(__file__).with_name("inside.py"), self.shared / "inside.py")
            for name, text in _SHARED_FILES.items():
                (self.shared / name).write_text(text)
            (self.shared / "mounts").mkdir()
            for file in self.shared.iterdir():
                file.chmod(0o755 if file.is_dir() else 0o644)
        return self.shared / "gateway.sock"

    def close(self) -> None:
        """Remove the shared folder."""
        if self.shared is not None:
            shutil.rmtree(self.shared, ignore_errors=True)
            os.close(self._held)
            self.shared = None

    def launch(self, program: Sequence[str], function: str | None, environment: Mapping[str, str]) -> Launch:
        """Return how a program is started in the sandbox.

        Args:
            program: its arguments, of which the first may be `python`; empty: `function` is called.
            environment: its variables.
        """
        self.open()
        form = _FORMS[self.kind] if isinstance(self.kind, str) else _from_template
        return form(self, list(program), function, dict(environment))

    def check(self, program: Sequence[str], function: str | None) -> None:
        """Start the sandbox with `true` in it.

        Raises:
            ConfigError: the sandbox does not start.
        """
        tool = {"bubblewrap": "bwrap"}.get(str(self.kind), self.kind) if isinstance(self.kind, str) else self.kind[0]
        fixes = {
            "bwrap": "install it (apt-get install bubblewrap), or set env.sandbox=none for programs that you trust",
            "docker": "install docker, or set env.sandbox=bubblewrap env.image=null",
            "apptainer": "install apptainer, or set env.sandbox=bubblewrap env.image=null",
        }
        if shutil.which(str(tool)) is None:
            raise ConfigError(
                "the program that makes the sandbox does not exist",
                where="env.sandbox",
                found=tool,
                fix=fixes.get(str(tool), "install it, or correct the name"),
            )
        for path in (*self.readable, *([] if self.cwd is None else [self.cwd])):
            if not Path(path).exists():
                raise ConfigError(
                    "this path does not exist", where="env.readable, env.cwd", found=path, fix="correct or remove it"
                )
        if self.kind != "bubblewrap":
            return  # other sandboxes depend on images and daemons of the machines on which episodes are played
        try:
            launch = self.launch(program, function, {})
            argv = [*launch.argv[: launch.argv.index("--") + 1], "/bin/true"]
            done = subprocess.run(
                argv,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                preexec_fn=lambda: _enter_or_exit(launch),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PROBE_S,
                check=False,
            )
            error = "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
        except (OSError, subprocess.SubprocessError) as failure:
            error = str(failure)
        finally:
            self.close()
        if error:
            raise ConfigError(
                "bubblewrap does not start here",
                where="env.sandbox",
                found=error[-500:],
                allowed="bubblewrap 0.8 or newer, and user namespaces",
                fix="in a container: start the container with --security-opt seccomp=unconfined --security-opt "
                "systempaths=unconfined --cap-add SYS_ADMIN; on Ubuntu: sysctl -w "
                "kernel.apparmor_restrict_unprivileged_userns=0; or set env.sandbox=none for programs that you trust",
            )

    def settings(self, *, own_processes: bool) -> dict[str, Any]:
        """Return the settings of `inside.py`.

        Args:
            own_processes: the kernel counts the sandbox's processes by themselves.
        """
        most = self.limits.processes
        return {
            "socket": str(self._shared / "gateway.sock"),
            "port": PORT,
            "folder": FOLDER,
            "cwd": None if self.cwd is None else os.path.abspath(self.cwd),
            "processes": most + _MORE_PROCESSES if most is not None and own_processes else None,
            "seconds": self.limits.seconds,
            "result_bytes": RESULT_BYTES,
        }

    @property
    def _shared(self) -> Path:
        assert self.shared, "`open` comes first"
        return self.shared

    def command(self, python: str, program: list[str], function: str | None, *, own_processes: bool) -> list[str]:
        """Return the command that runs in the sandbox: `inside.py`, which starts the program.

        Args:
            python: the interpreter in the sandbox.
        """
        begin = [str(self._shared / "inside.py"), json.dumps(self.settings(own_processes=own_processes))]
        if not program:
            return [python, *begin, "--call", _absolute(str(function), self.cwd)]
        if program[0] == "python":
            program = [python, *program[1:]]
        return [python, "-I", "-S", *begin, *(_absolute(part, self.cwd) for part in program)]

    def paths(self, program: Sequence[str], function: str | None) -> list[str]:
        """Return the absolute paths that a program needs or may read; one of them may lie in another."""
        paths = [os.path.abspath(path) for path in self.readable]
        if self.cwd is not None:
            paths.append(os.path.abspath(self.cwd))
        if program:
            paths += [_absolute(part, self.cwd) for part in program if os.path.isfile(_absolute(part, self.cwd))]
            executable = shutil.which(program[0])
            paths += [os.path.abspath(executable)] if executable and program[0] != "python" else []
        elif function is not None:
            source = function.rpartition(":")[0]
            paths += [os.path.abspath(source)] if source.endswith(".py") else list(_module_paths(source))
        return paths

    def close_after(self, name: str) -> list[str]:
        """Return the command that ends a container whose client was ended."""
        return ["docker", "rm", "--force", name]


def _enter_or_exit(launch: Launch) -> None:
    """Prepare this process, a fork, to start a sandbox; where that fails, write why to stderr and end the process."""
    try:
        enter(launch.mounts, as_nobody=launch.as_nobody)
    except OSError as error:  # `subprocess` would report an error here without its text
        os.write(2, f"{error}\n".encode())
        os._exit(1)


def _bubblewrap(sandbox: Sandbox, program: list[str], function: str | None, environment: dict[str, str]) -> Launch:
    """Bubblewrap: namespaces of its own, everything read-only but /tmp, and of the machine's files only those named."""
    shared, disk = sandbox._shared, str(sandbox.limits.disk_mb << 20)
    interpreter = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    paths = _outermost([*interpreter, *sandbox.paths(program, function)])
    root = is_root()
    hidden = _unreachable(paths) if root else []  # what the user `nobody` cannot reach, such as a Python below /root
    targets = {path: str(shared / "mounts" / str(paths.index(path))) if path in hidden else path for path in paths}
    for path in hidden:
        place = Path(targets[path])
        place.mkdir(exist_ok=True) if os.path.isdir(path) else place.touch()
    argv = [
        *("bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--uid", "1000", "--gid", "1000"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--as-pid-1", "--hostname", "sandbox"),
        *("--ro-bind", "/usr", "/usr"),
        *_system_folders(),
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind-try", "/etc/alternatives"),
        *("/etc/alternatives", "--ro-bind-try", "/etc/ssl", "/etc/ssl", "--ro-bind-try", "/etc/localtime"),
        *("/etc/localtime", "--ro-bind", str(shared / "passwd"), "/etc/passwd"),
        *("--ro-bind", str(shared / "hosts"), "/etc/hosts"),
        *("--proc", "/proc", "--dev", "/dev", "--size", disk, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", disk, "--tmpfs", "/tmp"),
        *("--ro-bind", str(shared / "inside.py"), str(shared / "inside.py")),
        *("--ro-bind-try", str(shared / "gateway.sock"), str(shared / "gateway.sock")),
        *(part for path, target in targets.items() for part in ("--ro-bind", target, path)),
        *("--remount-ro", "/", "--chdir", "/tmp", "--"),
        *sandbox.command(sys.executable, program, function, own_processes=True),
    ]
    if function is not None and not program:
        environment = _with_module(environment, function)
    return Launch(argv, environment, [(path, targets[path]) for path in hidden], as_nobody=root)


def _docker(sandbox: Sandbox, program: list[str], function: str | None, environment: dict[str, str]) -> Launch:
    """Return the command that runs the program in a Docker container without network; Docker applies the limits."""
    limits, name = sandbox.limits, f"megarl-{uuid.uuid4().hex[:12]}"
    memory = () if limits.memory_mb is None else ("--memory", f"{limits.memory_mb}m")
    swap = () if limits.memory_mb is None else ("--memory-swap", f"{limits.memory_mb}m")
    processes = () if limits.processes is None else ("--pids-limit", str(limits.processes + _MORE_PROCESSES))
    cpu = () if limits.cpu_s is None else ("--ulimit", f"cpu={max(1, round(limits.cpu_s))}")
    tmp = f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={limits.disk_mb}m"
    paths = _outermost([str(sandbox._shared), *sandbox.paths(program, function)])
    argv = [
        *("docker", "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{NOBODY}:{NOBODY}"),
        *(*memory, *swap, *processes, *cpu, "--ulimit", "nofile=1024", "--ulimit", "core=0"),
        *("--ulimit", f"fsize={limits.disk_mb << 20}", "--tmpfs", tmp, "--shm-size", f"{limits.disk_mb}m"),
        *(part for path in paths for part in ("--volume", f"{path}:{path}:ro")),
        *(part for variable in _of_image(environment) for part in ("--env", variable)),
        *("--workdir", "/tmp", str(sandbox.image)),
        *sandbox.command("python3", program, function, own_processes=False),
    ]
    of_client = {variable: os.environ[variable] for variable in _OF_CLIENT if variable in os.environ}
    return Launch(argv, {**of_client, **environment}, after=sandbox.close_after(name))


def _apptainer(sandbox: Sandbox, program: list[str], function: str | None, environment: dict[str, str]) -> Launch:
    """Return the command that runs the program in an Apptainer container without network.

    Its processes are children of the program's runner, which limits them.
    """
    paths = _outermost([str(sandbox._shared), *sandbox.paths(program, function)])
    user = ("--security", f"uid:{NOBODY}", "--security", f"gid:{NOBODY}") if is_root() else ()
    argv = [
        *("apptainer", "exec", "--containall", "--no-home", "--net", "--network", "none", "--no-privs"),
        *(*user, *(part for path in paths for part in ("--bind", f"{path}:{path}:ro"))),
        *("--pwd", "/tmp", str(sandbox.image)),
        *sandbox.command("python3", program, function, own_processes=False),
    ]
    of_image = {f"APPTAINERENV_{name}": environment[name] for name in _of_image(environment)}
    return Launch(argv, {**environment, **of_image})


def _from_template(sandbox: Sandbox, program: list[str], function: str | None, environment: dict[str, str]) -> Launch:
    """Return the command that runs the program in a sandbox, from the recipe's template of this command."""
    values = places(sandbox)
    command = sandbox.command("python3", program, function, own_processes=False)
    argv: list[str] = []
    for part in sandbox.kind:
        argv += command if part == "{command}" else [_PLACE.sub(lambda found: values[found[1]], part)]
    return Launch(argv, environment)


def places(sandbox: Sandbox) -> dict[str, str]:
    """Return the values of the placeholders in the command line that starts a sandbox."""
    limits = sandbox.limits
    numbers = {name: getattr(limits, name) for name in ("memory_mb", "cpu_s", "processes", "disk_mb")}
    return {
        "shared": str(sandbox.shared),
        "image": str(sandbox.image or ""),
        **{name: "" if value is None else f"{value:g}" for name, value in numbers.items()},
    }


def template_error(template: Sequence[str]) -> str | None:
    """Return what is wrong with `env.sandbox` as the command line that starts a sandbox; None: nothing."""
    if list(template).count("{command}") != 1:
        return "env.sandbox: one of its parts must be {command}, which becomes the command in the sandbox"
    allowed = places(Sandbox(template, Limits()))
    for part in template:
        if part != "{command}" and (unknown := [name for name in _PLACE.findall(part) if name not in allowed]):
            return f"env.sandbox has the unknown placeholder {{{unknown[0]}}}; allowed: {{command}}, " + ", ".join(
                f"{{{name}}}" for name in allowed
            )
    return None


_FORMS: dict[str, Callable[[Sandbox, list[str], str | None, dict[str, str]], Launch]] = {
    "bubblewrap": _bubblewrap,
    "docker": _docker,
    "apptainer": _apptainer,
}


def _of_image(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that have a meaning in an image: not those that name folders of this machine."""
    return [name for name in environment if name not in ("PATH", "PYTHONPATH", "VIRTUAL_ENV")]


def _system_folders() -> Iterator[str]:
    """Yield the options with which bubblewrap shows /bin, /lib and similar folders inside the sandbox. On most systems
    these are links into /usr; then the sandbox gets the same links."""
    for folder in _SYSTEM[1:]:
        is_link = os.path.islink(folder)
        yield "--symlink" if is_link else "--ro-bind-try"
        yield os.readlink(folder).lstrip("/") if is_link else folder
        yield folder


def _absolute(part: str, cwd: str | None) -> str:
    """Return an argument that names a file, or `file.py:fn`, with an absolute path; others unchanged."""
    file, colon, name = part.rpartition(":")
    path = os.path.join(os.path.abspath(cwd or "."), part)
    if os.path.isfile(path) and not os.path.isabs(part):
        return path
    return f"{os.path.abspath(file)}{colon}{name}" if file.endswith(".py") and os.path.isfile(file) else part


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return the paths that are in no other one and not in a folder of the system, each once."""
    outermost: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path == above or path.startswith(above.rstrip("/") + "/") for above in (*_SYSTEM, *outermost)):
            outermost.append(path)
    return outermost


def _unreachable(paths: Sequence[str]) -> list[str]:
    """Return the paths that a user without rights cannot reach, by their own folders or by those of their targets."""
    return [
        path
        for path in paths
        if not all(
            parent.stat().st_mode & stat.S_IXOTH for parent in (*Path(path).parents, *Path(path).resolve().parents)
        )
    ]


def _module_paths(name: str) -> Iterator[str]:
    """Yield the folders of a module's packages, and its own file."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:length]))
        if spec is None:
            return
        if spec.submodule_search_locations is not None:
            yield from map(os.path.abspath, spec.submodule_search_locations)
        elif spec.origin:
            yield os.path.abspath(spec.origin)


def _with_module(environment: dict[str, str], function: str) -> dict[str, str]:
    """Return the variables with a PYTHONPATH on which a function's module is found."""
    source = function.rpartition(":")[0]
    if source.endswith(".py"):
        return environment
    top = next(_module_paths(source.partition(".")[0]), None)
    known = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    return (
        environment
        if top is None
        else {
            **environment,
            "PYTHONPATH": os.pathsep.join([*known, os.path.dirname(top)]),
        }
    )

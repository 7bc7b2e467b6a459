"""Checks of batch-job settings that would fail only on the nodes, or are probably mistakes that Slurm accepts."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path, PurePosixPath

from megarl.config.launch import SlurmConfig, option_parts
from megarl.config.run import RunConfig
from megarl.dag.shares import USUAL_GPUS
from megarl.launchers.bundles import MEETING
from megarl.launchers.slurm import (
    Component,
    Submission,
    components,
    given_gpus,
    gpus_per_node,
    gres_gpus,
    gres_of,
    limit_minutes,
)
from megarl.system.credentials import CREDENTIAL
from megarl.system.errors import ConfigError, count

#: Seconds by which Slurm's signal may come early, and seconds in which a job tests nodes, loads a model and trains
#: steps.
_EARLY_S, _STEPS_S = 60, 300
#: Folders that an image or the container's runtime provides.
_INSIDE = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/sys", "/tmp", "/usr", "/var")
#: Options of sbatch that request GPUs; --gpu-bind and similar options do not.
_FOR_GPUS = ("--gpus", "-G", "--gpus-per-task", "--gpus-per-socket")
#: Refused options of sbatch, which would change how a job is submitted, watched or continued: the reason, and the fix.
_ARRAY = ("it makes several jobs, which would write to one run folder", "submit each run by itself")
_WAIT = ("sbatch would return only after the job has ended", "megarl logs -f RUN_DIR waits for the end of a run")
_OTHER_JOB = {
    "--array": _ARRAY,
    "-a": _ARRAY,
    "--wait": _WAIT,
    "-W": _WAIT,
    "--wrap": ("the job runs megarl's script", "put lines that run before it into launch.slurm.setup"),
    "--test-only": ("nothing would be submitted", "megarl launch --dry-run submits nothing"),
}


def check_settings(job: Submission) -> None:
    """Refuse settings that would fail only on the nodes. Raise ConfigError for invalid nodes of teams, GPUs, options,
    variables, chain or container.
    """
    parts, slurm = components(job.config, job.command), job.slurm
    _check_parts(job, parts)
    _check_gpus(job.config, parts)
    _check_options(job.config, parts)
    _check_environment(slurm)
    limit = limit_minutes(slurm.time)
    if slurm.chain and limit is not None and slurm.warn_s >= 60 * limit:
        raise ConfigError(
            "the signal before the time limit, on which a chain depends, would come before the job begins",
            where="launch.slurm.warn_s",
            found=slurm.warn_s,
            allowed=f"less than launch.slurm.time, {60 * limit:g} s",
            fix=f"set launch.slurm.warn_s={max(1, int(20 * limit))}, or a longer launch.slurm.time",
        )
    if slurm.image is not None:
        _check_container(job, slurm.image)
        return
    for key in ("mounts", "container"):
        if value := getattr(slurm, key):
            problem = "this setting needs a container image, and there is none"
            raise ConfigError(problem, where=f"launch.slurm.{key}", found=value, fix="set launch.slurm.image")


def _check_parts(job: Submission, parts: list[Component]) -> None:
    if len(parts) > 1 and job.launcher != "ray":
        problem = "nodes of different kinds run different teams, which needs Ray"
        raise ConfigError(problem, where="launch.slurm.teams", found=job.launcher, fix="use --launcher ray")
    if len(parts) > 1 and job.config.launch.spares:
        raise ConfigError(
            "a heterogeneous job cannot have spare nodes",
            where="launch.spares",
            found=job.config.launch.spares,
            allowed="0 with launch.slurm.teams",
            fix="set it to 0: a job that loses a node submits the next job without it",
        )


def _check_gpus(config: RunConfig, parts: list[Component]) -> None:
    """Check that requested nodes have a GPU for each worker and each rank of their servers."""
    for part in parts if config.cluster.device_memory_gb is not None else ():
        needed, gres, given = part.gpus, gres_of(config, part), _asked_gpus(config, part)
        if 0 < given < needed:
            raise ConfigError(
                f"the run needs {count(needed, 'GPU')} per node: one per worker, and those of its servers, counted "
                "from GPU 0",
                where=f"{_section(part)}.{'gpus_per_node' if gres is None else 'gres'}",
                found=given if gres is None else gres,
                allowed=f"{needed} or more; 0 if options request GPUs, or nodes are allocated whole",
                fix="request as many, or divide the workers among more nodes: "
                + (f"{_section(part)}.nodes and cluster.nnodes" if part.team else "cluster.nnodes"),
            )


def _check_options(config: RunConfig, parts: list[Component]) -> None:
    """Check for options of sbatch that conflict with the script, the chain or other keys."""
    gpus = any(_asked_gpus(config, part) for part in parts)
    gres = any(gres_of(config, part) is not None for part in parts)
    for option in config.launch.slurm.options:
        name, value = option_parts(option)
        allowed = None
        if name in _OTHER_JOB:
            (problem, fix), allowed = _OTHER_JOB[name], "options of a single queued job, such as --exclusive"
        elif name == "--export" and "ALL" not in value.upper().split(","):
            problem = "nodes would not get the variables by which the job passes settings"
            allowed = "ALL, or ALL,NAME=VALUE,..."
            fix = "remove it; launch.slurm.environment sets variables, launch.slurm.setup may unset others"
        elif name == "--gres" and gres:
            problem = "launch.slurm.gres is also set, but sbatch accepts only one"
            fix = "put all resources into launch.slurm.gres"
        elif gpus and (name in _FOR_GPUS or (name in ("--gres", "--tres-per-task") and gres_gpus(value) is not None)):
            problem = "GPUs are requested twice"
            allowed = "options that request none" + ("" if gres else ", or launch.slurm.gpus_per_node=0")
            fix = "remove it; launch.slurm.gpus_per_node sets the number of GPUs per node, launch.slurm.gres the kind"
        else:
            continue
        raise ConfigError(problem, where="launch.slurm.options", found=option, allowed=allowed, fix=fix)


def _check_image(image: str, is_file: bool, *, apptainer: bool) -> None:
    """Check that an image's name has its runtime's form. enroot looks up names without # in Docker's registry, and
    apptainer looks up names without a scheme among files.
    """
    scheme, _, name = image.rpartition("://")
    first = name.partition("/")[0]
    if apptainer:
        wrong = "#" in image or not (scheme or is_file or image.startswith(("/", "./")) or image.endswith(".sif"))
    else:
        of_registry = "/" in name and not image.startswith(("/", "./")) and ("." in first or ":" in first)
        wrong = scheme not in ("", "docker", "dockerd") or (of_registry and "#" not in name and not is_file)
    if wrong:
        raise ConfigError(
            f"{'apptainer' if apptainer else 'pyxis'} does not accept this image name",
            where="launch.slurm.image",
            found=image,
            allowed="docker://REGISTRY/NAME:TAG, another scheme of apptainer, or a .sif"
            if apptainer
            else "[docker://]REGISTRY#NAME:TAG, NAME:TAG of Docker's registry, dockerd://NAME:TAG, or a .sqsh",
            fix=f"write the name in this form, or set launch.slurm.container={'pyxis' if apptainer else 'apptainer'}",
        )


def _asked_gpus(config: RunConfig, part: Component) -> int:
    gres = gres_of(config, part)
    return gpus_per_node(config, part) if gres is None else gres_gpus(gres) or 0


def _section(part: Component) -> str:
    return f"launch.slurm.teams.{part.team}" if part.team else "launch.slurm"


def _check_environment(slurm: SlurmConfig) -> None:
    """Refuse credentials, since scripts are plain text, and variables of the rendezvous, which the job itself sets."""
    for name in slurm.environment:
        where = f"launch.slurm.environment.{name}"
        if CREDENTIAL.search(name):
            raise ConfigError(
                "the script of the nodes is plain text, but this variable looks like a credential",
                where=where,
                allowed="variables that are not credentials",
                fix=f"export {name} in the submitting shell: sbatch passes its environment on",
            )
        if name in MEETING:
            fix = "remove it; launch.slurm.interface chooses the network"
            raise ConfigError("the job sets this variable itself", where=where, found=slurm.environment[name], fix=fix)


def _check_container(job: Submission, image: str) -> None:
    """Check the mounts, and the image: an existing file, or a name in its runtime's form."""
    for mount in job.slurm.mounts:
        part = mount.split(":")
        if not 2 <= len(part) <= 3 or not all(part) or "," in mount or not part[1].startswith("/"):
            raise ConfigError(
                "the mount of a container is invalid",
                where="launch.slurm.mounts",
                found=mount,
                allowed="FROM:TO or FROM:TO:ro, where TO begins with /, without a comma",
            )
    _check_image(image, (job.workdir / image).exists(), apptainer=job.slurm.container == "apptainer")
    file = Path(image)
    if (image.startswith(("/", "./")) or file.suffix in (".sif", ".sqsh")) and not (job.workdir / file).exists():
        fix = "name a file that all nodes see, or an image in a registry"
        raise ConfigError("this image file does not exist", where="launch.slurm.image", found=image, fix=fix)


def doubtful(job: Submission) -> list[str]:
    """Return warnings about settings that Slurm accepts but that are probably not intended."""
    slurm, parts, warnings = job.slurm, components(job.config, job.command), _warnings_of_early_saves(job)
    named = any(word in option for option in slurm.options for word in ("cpu", "exclusive"))
    for part in parts:
        cpus, workers = part.settings.cpus_per_node or slurm.cpus_per_node, part.workers // part.nodes
        key = f"{_section(part)}.cpus_per_node"
        if cpus is None and not named:
            warnings.append(
                f"{key} is not set: at many sites a node's one task then gets one core, for "
                f"{count(workers, 'worker')}; sinfo --Node --long shows the CPUs of nodes"
            )
        elif cpus is not None and cpus < workers:
            warnings.append(f"{key}={cpus} is less than one CPU per worker, of which a node has {workers}")
    if slurm.image is None and slurm.python is not None and "/" in slurm.python and not Path(slurm.python).exists():
        warnings.append(
            f"launch.slurm.python={slurm.python} does not exist on this machine; nodes must be able to see it"
        )
    warnings += [
        *_doubtful_gpus(job.config, parts),
        *_idle_gpus(job.config, parts),
        *_warnings_of_many_gpus(job.config, parts),
    ]
    warnings += _unmounted(job)
    for folder in (job.run_dir, job.workdir):
        if Path(tempfile.gettempdir()) in folder.parents and job.config.cluster.nnodes > 1:
            warnings.append(f"{folder} is in a folder for temporary files, which other nodes usually cannot see")
    return list(dict.fromkeys(warnings))


def _doubtful_gpus(config: RunConfig, parts: list[Component]) -> list[str]:
    warnings, named = [], config.cluster.device_memory_gb is not None
    if any(word in option for option in config.launch.slurm.options for word in ("gpu", "exclusive", "-G")):
        return []
    for part in parts:
        needed, gres, section = part.gpus, gres_of(config, part), _section(part)
        if _asked_gpus(config, part) or (not named and given_gpus(config, part) == 0):
            continue
        if named:
            warnings.append(f"{section} requests no GPU, but the run needs {needed} per node")
            continue
        keys = f"cluster.device_memory_gb (such as 80), or {section}.gpus_per_node={needed}"
        if gres is not None:
            keys = f"{section}.gres=gpu:{needed},{gres}"
        warnings.append(
            f"{section}: nodes request no GPU: set {keys}; for a run on CPUs {section}.gpus_per_node=0 removes this "
            "warning"
        )
    return warnings


def _idle_gpus(config: RunConfig, parts: list[Component]) -> list[str]:
    warnings, named = [], config.cluster.device_memory_gb is not None
    for part in parts:
        requested, section = _asked_gpus(config, part), _section(part)
        if requested <= part.gpus:
            continue
        workers = count(part.workers // part.nodes, "worker")
        idle = f"{section} requests {count(requested, 'GPU')} per node"
        if not named:
            warnings.append(
                f"{idle}, but the recipe names no GPU (cluster.device_memory_gb): a CPU run of {workers} leaves them "
                f"idle: set {section}.gpus_per_node=0"
            )
            continue
        whole = config.cluster.nproc // config.cluster.nnodes * requested // part.gpus * config.cluster.nnodes
        more = "" if len(parts) > 1 else f"cluster.nproc={whole}, fewer nodes, or "
        warnings.append(
            f"{idle}, but the run uses {part.gpus} of them, for {workers}: {requested - part.gpus} stay "
            f"idle: set {more}{section}.gpus_per_node={part.gpus}"
        )
    return warnings


def _warnings_of_many_gpus(config: RunConfig, parts: list[Component]) -> list[str]:
    """Return warnings about more GPUs per node of a team than usual, if their number is not set."""
    warnings, apart = [], config.launch.slurm.teams and config.cluster.device_memory_gb is not None
    for part in parts if apart else ():
        needed, section = part.gpus, _section(part)
        if needed <= USUAL_GPUS or given_gpus(config, part) is not None or gres_of(config, part) is not None:
            continue
        # the smallest number of nodes with no more GPUs than usual that divides the workers evenly
        fewest = range(-(-part.workers // USUAL_GPUS), part.workers + 1)
        least = next(nodes for nodes in fewest if part.workers % nodes == 0)
        nodes = f"cluster.nnodes={config.cluster.nnodes + least - part.nodes}"
        more = (
            f"{section}.nodes={least} with {nodes}" if part.team else f"{nodes}, or fewer nodes of launch.slurm.teams"
        )
        warnings.append(
            f"{section}: {needed} GPUs of each of {count(part.nodes, 'node')} are requested, for "
            f"{count(part.workers, 'worker')}, but machines usually have {USUAL_GPUS}: {more}, or "
            f"{section}.gpus_per_node={needed} if they have as many"
        )
    return warnings


def _warnings_of_early_saves(job: Submission) -> list[str]:
    """Return warnings about jobs of a chain that must save right after their start, or get no signal."""
    slurm = job.slurm
    limit = limit_minutes(slurm.time)
    if limit is None:
        return []
    before = 60 * limit - slurm.warn_s
    if not slurm.chain:
        if before > 0 or job.command == "eval":
            return []
        return [
            f"launch.slurm.warn_s={slurm.warn_s} is not below launch.slurm.time, {60 * limit:g} s: Slurm sends no "
            f"signal, and no checkpoint is written at the limit: set launch.slurm.warn_s={max(1, int(20 * limit))} or "
            "a longer launch.slurm.time"
        ]
    if before - _EARLY_S >= _STEPS_S:
        return []
    return [
        f"launch.slurm.warn_s={slurm.warn_s}: of launch.slurm.time, {60 * limit:g} s, a job of the chain has only "
        f"{max(0, before - _EARLY_S):g} to {before:g} s to test its nodes, start and train; then it writes a "
        "checkpoint, and the next job continues"
    ]


def unset_limit(job: Submission) -> str | None:
    """Return a warning that no limit is set for the job's time; None when one is."""
    if job.slurm.time is not None:
        return None
    return (
        "launch.slurm.time is not set: the job gets the partition's own limit, which may be minutes or days (sinfo "
        "--format '%P %L %l'): set launch.slurm.time, such as 24:00:00"
    )


def _unmounted(job: Submission) -> list[str]:
    """Return warnings about variables that name a folder of the cluster that the container does not mount."""
    slurm = job.slurm
    if slurm.image is None:
        return []
    inside = [*_INSIDE, str(job.run_dir), str(job.workdir), *(mount.split(":")[1] for mount in slurm.mounts)]
    if slurm.container == "apptainer":
        inside.append(str(Path.home()))  # apptainer mounts the home folder by default
    places = [PurePosixPath(place) for place in inside]
    warnings = []
    for name, value in slurm.environment.items():
        path = PurePosixPath(value)
        if path.is_absolute() and ":" not in value and not any(place in (path, *path.parents) for place in places):
            warnings.append(
                f"launch.slurm.environment.{name}={value} is not in any folder of launch.slurm.mounts: the container "
                f"has it only if the image has it; to mount it set launch.slurm.mounts=[{value}:{value}]"
            )
    return warnings


def memory_bytes(text: str | None) -> float | None:
    """Return the bytes of a `--mem`; None if it is unset, or 0, which means all memory of a node."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper()) if text else None
    if match is None or not int(match[1]):
        return None
    return float(int(match[1]) * 1024 ** (1 + "KMGT".index(match[2] or "M")))

"""The control groups of this process on Linux: how containers and job queues limit memory and processors."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the folders that may hold a controller's limits: of each group, then of its parents; with the version.

    Args:
        controller: Such as `memory` or `cpu`.
        root: Holds /proc and /sys.
    """
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()]
    except OSError:  # another system
        return
    for _, controllers, path in groups:
        is_version_1 = controller in controllers.split(",")
        mount = root / "sys/fs/cgroup" / (controller if is_version_1 else "")
        group = PurePosixPath(path.lstrip("/"))
        for part in (group, *group.parents):
            yield mount / part, 1 if is_version_1 else 2

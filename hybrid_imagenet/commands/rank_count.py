"""Decides how many ranks `hybrid-imagenet run` starts on each host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.commands.doctor import host_facts
from hybrid_imagenet.commands.host_list import UNKNOWN_SLOTS, HostList
from hybrid_imagenet.errors import UserError, pluralize

_ONE_FOR_EACH_GPU = "one for each visible GPU"


class RankCount(NamedTuple):
    """The ranks of a job.

    Attributes:
      total: Number of ranks.
      slots: Number of ranks that fit on each host, by host.
      reason: Why this number was chosen, as a clause for a message; "" if the user has set it.
    """

    total: int
    slots: dict[str, int]
    reason: str = ""


def choose(
    total: int | None, per_host: int | None, hosts: HostList | None, ssh_port: int | None = None
) -> RankCount:
    """Chooses the ranks of a job from `-np`, `--nproc_per_node` and its hosts.

    Without the first two, a host that was named without slots gets one rank for each of its visible
    GPUs.

    Args:
      total: `-np`, or None.
      per_host: `--nproc_per_node`, or None.
      hosts: Hosts of the job, or None for this host.
      ssh_port: Port of sshd on the other hosts, which are asked for their GPUs.

    Raises:
      UserError: If the options contradict each other, or the GPUs of a host cannot be counted.
    """
    if hosts is None:
        hosts = HostList({"localhost": UNKNOWN_SLOTS})
    slots = dict(hosts.slots)
    if per_host is not None:
        return _same_on_each_host(total, per_host, hosts)
    hosts_without_slots = [name for name, count in slots.items() if count == UNKNOWN_SLOTS]
    if not hosts_without_slots:
        return RankCount(total or sum(slots.values()), slots)
    if total is not None:
        _distribute(total - sum(slots.values()), hosts_without_slots, slots)
        return RankCount(total, slots)
    reasons = []
    counts = _count_by_gpus(hosts_without_slots, hosts.source, ssh_port)
    for name, (count, reason) in zip(hosts_without_slots, counts, strict=True):
        slots[name] = count
        reasons.append(reason)
    reason = _ONE_FOR_EACH_GPU if _ONE_FOR_EACH_GPU in reasons else reasons[0]
    return RankCount(sum(slots.values()), slots, reason)


def _distribute(ranks: int, names: Sequence[str], slots: dict[str, int]) -> None:
    """Sets the slots of these hosts so that ranks are spread evenly, with at least one on each."""
    ranks_left = ranks
    for index, name in enumerate(names):
        hosts_left = len(names) - index
        # Rounded up, so that the first hosts get the remainder.
        slots[name] = max(1, -(-ranks_left // hosts_left))
        ranks_left -= slots[name]


def _same_on_each_host(total: int | None, per_host: int, hosts: HostList) -> RankCount:
    for name, count in hosts.slots.items():
        # A scheduler's slots are a default, which the user may replace.
        if count not in (UNKNOWN_SLOTS, per_host) and not hosts.is_allocation:
            raise UserError(
                f"--nproc_per_node={per_host} and {hosts.source} {name}:{count} contradict each"
                " other. Use one of them."
            )
    num_hosts = len(hosts.slots)
    product = per_host * num_hosts
    if total not in (None, product):
        raise UserError(
            f"-np {total} and --nproc_per_node={per_host} contradict each other: "
            f"{per_host} on each of {pluralize(num_hosts, 'host')} is {product}. Use one of them."
        )
    return RankCount(product, dict.fromkeys(hosts.slots, per_host))


def _count_by_gpus(
    names: Sequence[str], source: str, ssh_port: int | None
) -> list[tuple[int, str]]:
    """Returns the number of ranks for each host, from its visible GPUs, with the reason.

    Raises:
      UserError: If a host cannot be asked for its GPUs.
    """
    remote = [name for name in names if not host_facts.is_local(name)]
    answers = host_facts.query_hosts(remote, {}, ssh_port) if remote else {}
    counts = []
    for name in names:
        if name not in answers:
            counts.append(_ranks_for(gpus.count(), gpus.is_built_for_gpus()))
            continue
        facts = answers[name]
        if isinstance(facts, host_facts.UnreachableError):
            raise UserError(
                f"{source} {name}: the GPUs of this host cannot be counted ({facts}). "
                f"Write the number of its ranks after a colon, as in {name}:8, or set"
                " --nproc_per_node."
            )
        build = facts["build"] or {}
        counts.append(_ranks_for(len(facts["gpus"]), bool(build.get("is_cuda_build"))))
    return counts


def _ranks_for(gpu_count: int, is_built_for_gpus: bool) -> tuple[int, str]:
    if not gpu_count:
        return 1, "as no GPU is visible and -np is not set"
    if not is_built_for_gpus:
        gpu_text = pluralize(gpu_count, "visible GPU")
        return 1, f"as the installed TensorFlow cannot use the {gpu_text} and -np is not set"
    return gpu_count, _ONE_FOR_EACH_GPU

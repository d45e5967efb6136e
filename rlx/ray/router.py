"""A router for Ray Serve that sends a request to the replica that has computed its prefix.

Ray stage, in the process of the ingress. It is a class over Ray Serve's `RequestRouter`.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rlx.serve.prefix_table import PrefixTable


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is an extra, and Any for the type checker
    """Ranks replicas by `PrefixTable`. Ray Serve asks one after the other whether it has room."""

    def initialize_state(self, imbalance: int = 8) -> None:  # the name is Ray's
        """Called by Ray Serve with the `request_router_kwargs`.

        Args:
            imbalance: as of `PrefixTable`.
        """
        self._table: PrefixTable[str] = PrefixTable(imbalance)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._table.keep({replica.replica_id.unique_id for replica in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas for a request, each a rank of its own, the best one first."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # sleep between rounds in which all are full
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in found.items()}
        return [[found[name]] for name in self._table.ranked(keys_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._table.remember(keys_of(pending_request), replica_id.unique_id)


def keys_of(request: PendingRequest) -> list[int]:
    """The prefix keys of a request for `Replica.answer`."""
    keys = request.kwargs.get("keys")
    return keys if isinstance(keys, list) else []

"""The router's /metrics: those of every replica under the label `worker`, and its own."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from octavo.serve.router.fleet import Fleet
from octavo.serve.router.replica import NOT_ANSWERING, Replica
from octavo.serve.router.upstream import LostReplicaError, Request, UnreachableError, fetch

# time for a replica's metrics; one that takes longer is left out
SCRAPE_S = 5.0

logger = logging.getLogger(__name__)


class RouterMetrics:
    """Gathers the metrics of a fleet.

    Attributes:
        refused: how many requests the router itself answered with each status.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.refused: Counter[int] = Counter()

    async def render(self) -> bytes:
        """The text that Prometheus reads; of replicas that answer."""
        listening = [replica for replica in self._fleet.replicas if replica.state not in NOT_ANSWERING]
        scraped = await asyncio.gather(*map(_scrape, listening))
        merged: dict[str, Metric] = {}
        for replica, families in zip(listening, scraped, strict=True):
            for family in families:
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    into.add_sample(sample.name, sample.labels | {"worker": str(replica.index)}, sample.value)
        registry = CollectorRegistry()
        registry.register(_Families([*merged.values(), *self._own()]))  # type: ignore[arg-type]
        return generate_latest(registry)

    def _own(self) -> Iterator[Metric]:
        for name, text, read in (
            ("requests_routed", "Requests sent to a replica.", lambda replica: replica.num_routed),
            ("requests_lost", "Requests that ended with their replica.", lambda replica: replica.num_failures),
            ("restarts", "Times a replica was started again.", lambda replica: replica.num_restarts),
        ):
            counter = CounterMetricFamily(f"octavo:router_{name}", text, labels=["worker"])
            for replica in self._fleet.replicas:
                counter.add_metric([str(replica.index)], read(replica))
            yield counter
        for name, text, value in (
            ("requests_in_flight", "Requests that a replica works on.", lambda replica: replica.num_in_flight),
            ("replica_ready", "1 for a replica that takes requests.", lambda replica: int(replica.is_ready)),
        ):
            gauge = GaugeMetricFamily(f"octavo:router_{name}", text, labels=["worker"])
            for replica in self._fleet.replicas:
                gauge.add_metric([str(replica.index)], value(replica))
            yield gauge
        refused = CounterMetricFamily("octavo:router_requests_refused", "Requests refused here.", labels=["status"])
        for status, count in self.refused.items():
            refused.add_metric([str(status)], count)
        yield refused


class _Families:
    """A collector of what was gathered before."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


async def _scrape(replica: Replica) -> list[Metric]:
    """A replica's metrics, or [] where it gives none that can be read."""
    try:
        status, body = await fetch(replica.port, Request(b"GET", b"/metrics"), SCRAPE_S)
        return [*text_string_to_metric_families(body.decode())] if status == 200 else []
    except (UnreachableError, LostReplicaError, OSError, ValueError, LookupError) as error:  # the last two of parsing
        logger.warning("replica %d gave no metrics: %s", replica.index, error)
        return []

"""Fleet: all replicas of a router, the choice among them, and their end."""

import asyncio
from collections.abc import Sequence

from octavo.serve.engine.request import UnavailableError
from octavo.serve.router.balance import Balance, chunks_of
from octavo.serve.router.replica import Replica


class Fleet:
    """The replicas.

    Args:
        replicas: none of them started.
        balance: of as many.

    Attributes:
        is_draining: no request is taken any more.
        has_updates: replicas have other weights than the checkpoint's, and so than one that starts.
        error: why a replica cannot be started at all.
    """

    def __init__(self, replicas: Sequence[Replica], balance: Balance) -> None:
        self.replicas, self.balance = replicas, balance
        self.is_draining = self.has_updates = False
        self.error: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        for replica in replicas:
            replica.on_start = self._note_start

    @property
    def num_in_flight(self) -> int:
        """Requests that replicas work on."""
        return sum(replica.num_in_flight for replica in self.replicas)

    @property
    def is_ready(self) -> bool:
        """It takes requests."""
        return not self.is_draining and any(replica.is_ready for replica in self.replicas)

    def has_others_than(self, full: Replica) -> bool:
        """Whether another replica takes requests."""
        return any(replica.is_ready for replica in self.replicas if replica is not full)

    def choose(self, body: bytes, full: Replica | None = None) -> Replica:
        """The replica for a request.

        Args:
            full: one that has no room for it.
        Raises:
            UnavailableError: none takes any.
        """
        if self.is_draining:
            raise UnavailableError("the server is draining and takes no requests; try again later")
        loads = {replica.index: replica.load for replica in self.replicas if replica.is_ready and replica is not full}
        if not loads:
            states = ", ".join(f"{replica.index} is {replica.status}" for replica in self.replicas)
            raise UnavailableError(f"no replica takes requests ({states}); try again later")
        return self.replicas[self.balance.choose(chunks_of(body), loads)]

    def start(self) -> None:
        """Start all; from the event loop."""
        self._tasks = [asyncio.create_task(self._keep(replica)) for replica in self.replicas]

    async def join(self, timeout_s: float) -> bool:
        """Wait for the end of all; False if it has not come by then."""
        return not self._tasks or not (await asyncio.wait(self._tasks, timeout=timeout_s))[1]

    async def close(self) -> None:
        """End all at once."""
        for replica in self.replicas:
            replica.kill()
        await asyncio.gather(*self._tasks)

    def _note_start(self, index: int) -> None:
        """A new process has no cached prompts, and the checkpoint's weights."""
        self.balance.forget(index)
        self.replicas[index].is_outdated = self.has_updates

    async def _keep(self, replica: Replica) -> None:
        try:
            await replica.run()
        except Exception as error:
            self.error = error

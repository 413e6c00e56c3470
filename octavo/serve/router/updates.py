"""New weights for all replicas of a router: staged and verified at each of them, then committed at all, or at none."""

import json
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastapi.responses import Response

from octavo.serve.http.errors import ApiError
from octavo.serve.router.admin import Admin, failure
from octavo.serve.router.replica import Replica
from octavo.serve.router.upstream import Reply, Request
from octavo.weights.update import RunningPolicy

_OTHERS_KEEP = "the update was dropped, and the old weights serve on"


class ReplicaUpdate(NamedTuple):
    """A replica's own transaction. start: num_restarts of the process that has it."""

    replica: Replica
    start: int
    id: str


class FleetUpdates:
    """One update at a time; each replica has a transaction of its own for it.

    A replica that starts again has the checkpoint's weights: after an update it takes no requests until the next whole
    one.

    Args:
        admin: asks the replicas.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin, self._fleet = admin, admin.fleet
        self._id, self._reason, self._parts = "", "", list[ReplicaUpdate]()
        self._timeout_s = admin.config.update_timeout_s + admin.config.drain_timeout_s

    async def begin(self, target: str, fields: dict[str, Any]) -> Response:
        """Begin at all replicas: an upload, or a checkpoint of their disks that is staged.

        Raises:
            ApiError: 409 while another update is open and not to be replaced, and for a part of the weights while a
                replica holds older ones; 503 and 502 where one replica is not there or does not begin.
        """
        with self._admin.alone():
            replicas = self._admin.all_in("serving", "asleep")
            outdated = [replica.index for replica in replicas if replica.is_outdated]
            if fields.get("partial") and outdated:
                text = f"replica {outdated[0]} has started again and holds older weights; send a whole update"
                raise ApiError(409, text, "partial", "replica_outdated")
            if self._parts and fields.get("replace") is not True and await self._is_open():
                text = f"the weight update {self._id} is open; commit or delete it, or send replace=true"
                raise ApiError(409, text, code="update_open")
            await self._end("another update took its place")
            starts = [replica.num_restarts for replica in replicas]
            data = json.dumps(fields | {"replace": True}).encode()  # a replica may not have heard that it was dropped
            answers = await self._admin.ask(replicas, _request("POST", target, data), timeout_s=self._timeout_s)
            self._id, self._reason = secrets.token_hex(8), ""
            self._parts = [
                ReplicaUpdate(replica, start, json.loads(answer.body)["id"])
                for replica, start, answer in zip(replicas, starts, answers, strict=True)
                if answer.status == 200
            ]
            if len(self._parts) < len(replicas):
                await self._end("it did not begin")
                return _refusal(replicas, answers)
            return self._as_own(answers[0])

    async def ask(self, update_id: str, method: str, what: str = "", data: bytes = b"", kind: str = "") -> Response:
        """Ask every replica for the same with its own transaction; where only some do it, the update is dropped.

        Raises:
            ApiError: 404 and 410 for no update of this id; 502 naming one that does not.
        """
        with self._admin.alone():
            self._check(update_id)
            refusal, first = await self._ask(method, what, data, kind)
            return refusal or self._as_own(first)

    async def abort(self, update_id: str) -> None:
        """Drop the update at all replicas. Errors as ask's."""
        with self._admin.alone():
            self._check(update_id)
            await self._end("it was aborted")

    async def commit(self, update_id: str, running: RunningPolicy) -> Response:
        """Verify at all replicas, then commit at all; what some have committed is taken back where one fails.

        Raises:
            ApiError: 502 naming a replica that did not; the old weights serve on. As ask.
        """
        with self._admin.alone():
            self._check(update_id)
            refusal, _ = await self._ask("POST", "/verify")
            if refusal is not None:
                return refusal
            parts, replicas = self._parts, [part.replica for part in self._parts]
            order = json.dumps({"running": running, "keep_old": True}).encode()
            answers = await self._ask_parts(parts, "POST", "/commit", order)
            if (error := failure(replicas, answers, _OTHERS_KEEP)) is not None:
                await self._take_back(answers)
                raise error
            self._fleet.has_updates = True
            for part in parts:
                part.replica.is_outdated = part.replica.num_restarts != part.start
                self._fleet.balance.forget(part.replica.index)
            await self._end("it was committed")
            versions = [json.loads(answer.body)["weight_version"] for answer in answers]
            of_each = {str(replica.index): version for replica, version in zip(replicas, versions, strict=True)}
            return _as_json({"weight_version": max(versions), "replicas": of_each})

    async def _take_back(self, answers: Sequence[Reply]) -> None:
        """Bring the old weights back where the new ones are; a replica whose state is not known is started again."""
        for part, answer in zip(self._parts, answers, strict=True):
            if answer.status == 0:
                part.replica.restart()
        done = [part for part, answer in zip(self._parts, answers, strict=True) if answer.status == 200]
        for part, back in zip(
            done, await self._ask_parts(done, "POST", "/commit", b'{"running": "keep"}'), strict=True
        ):
            if back.status != 200:
                part.replica.restart()
        await self._end("it failed")

    async def _ask(self, method: str, what: str, data: bytes = b"", kind: str = "") -> tuple[Response | None, Reply]:
        answers = await self._ask_parts(self._parts, method, what, data, kind)
        if all(answer.status == 200 for answer in answers):
            return None, answers[0]
        replicas = [part.replica for part in self._parts]
        if not _is_common(answers):
            await self._end("replicas disagreed")
        return _refusal(replicas, answers), answers[0]

    async def _ask_parts(
        self, parts: Sequence[ReplicaUpdate], method: str, what: str, data: bytes = b"", kind: str = ""
    ) -> list[Reply]:
        requests = [_request(method, f"/admin/weight_update/{part.id}{what}", data, kind) for part in parts]
        return await self._admin.ask([part.replica for part in parts], *requests, timeout_s=self._timeout_s)

    async def _is_open(self) -> bool:
        return any(answer.status == 200 for answer in await self._ask_parts(self._parts, "GET", ""))

    async def _end(self, reason: str) -> None:
        """Let replicas drop what they hold; one that does not hear it does so after --update-timeout."""
        parts, self._parts = self._parts, []
        self._reason = reason
        await self._ask_parts(parts, "DELETE", "")

    def _check(self, update_id: str) -> None:
        if update_id != self._id:
            raise ApiError(404, "there is no weight update of this id", code="update_not_found")
        if not self._parts:
            raise ApiError(410, f"this weight update has ended: {self._reason}", code="update_ended")

    def _as_own(self, answer: Reply) -> Response:
        return _as_json(json.loads(answer.body) | {"id": self._id})


def _is_common(answers: Sequence[Reply]) -> bool:
    """Whether all replicas refuse what was sent for the same reason."""
    return 400 <= answers[0].status < 500 and len({answer.status for answer in answers}) == 1


def _refusal(replicas: Sequence[Replica], answers: Sequence[Reply]) -> Response:
    """What all replicas say; else 502 with one that did not do it."""
    if _is_common(answers):
        return Response(answers[0].body, answers[0].status, media_type="application/json")
    error = failure(replicas, answers, _OTHERS_KEEP)
    assert error is not None, "one has refused"
    raise error


def _request(method: str, target: str, data: bytes, kind: str = "") -> Request:
    headers = [(b"content-type", (kind or "application/json").encode())]
    return Request(method.encode(), target.encode(), headers, data)


def _as_json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content), media_type="application/json")

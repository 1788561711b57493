"""Who asks for tasks, and what was answered last: so that no grant is ever without an owner.

A grant that nobody knows of would be in flight for ever, and the learner would in the end wait for
it. Two ways lead there, and both are closed here: a reply that is lost on its way, and a request
of an actor that was reported lost in the meantime.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.task_queue import Grant


class Requesters:
    """The rollout actors that ask. An actor is one incarnation: its successor is another."""

    def __init__(self) -> None:
        self._answered: dict[str, tuple[str, list[Grant]]] = {}
        self._lost: set[str] = set()

    def answer(self, actor: str, request_id: str, admit: Callable[[], list[Grant]]) -> list[Grant]:
        """What `admit` grants; what it granted before, if this is the actor's last request again;
        nothing for a lost actor. An empty request_id is never a repetition."""
        if actor in self._lost:
            return []
        answered_id, grants = self._answered.get(actor, ("", []))
        if not request_id or answered_id != request_id:
            grants = admit()
            self._answered[actor] = (request_id, grants)
        return grants

    def lose(self, actor: str) -> None:
        """Whatever still comes from this actor is answered with nothing."""
        self._lost.add(actor)
        self._answered.pop(actor, None)

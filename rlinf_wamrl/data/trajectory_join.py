"""Joining the two halves of every action chunk, whatever order and pieces they arrive in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlinf_wamrl.data.batch_values import batch_values_equal
from rlinf_wamrl.data.parts import EnvPart, PolicyPart
from rlinf_wamrl.data.sources import TrajectoryKey

__all__ = ["PartJoiner", "UnjoinedPart"]

_POLICY, _ENV = "policy", "environment"


def _kind(part: PolicyPart | EnvPart) -> str:
    return _POLICY if isinstance(part, PolicyPart) else _ENV


@dataclass(frozen=True)
class UnjoinedPart:
    """Something that arrived and did not become training data, and what it waits for."""

    key: TrajectoryKey
    reason: str


class PartJoiner:
    """Holds parts until both halves of a chunk are complete.

    A half is complete when it covers all rows of its source; until then its fragments are kept. A
    pair stays here until :meth:`release`, so that a consumer that failed on it can be given the
    pair again by sending one half once more.

    Args:
        rows_per_source: Environments of one source.
    """

    def __init__(self, rows_per_source: int) -> None:
        self._rows = rows_per_source
        self._fragments: dict[tuple[str, TrajectoryKey], list[PolicyPart | EnvPart]] = {}
        self._halves: dict[str, dict[TrajectoryKey, PolicyPart | EnvPart]] = {
            _POLICY: {},
            _ENV: {},
        }
        self._refused: set[TrajectoryKey] = set()

    def offer(
        self, part: PolicyPart | EnvPart
    ) -> Iterator[tuple[TrajectoryKey, PolicyPart, EnvPart]]:
        """Take one part and yield the pairs that are complete by it.

        Args:
            part: A half of one or more chunks, or fragments of such halves.

        Raises:
            ValueError: More rows than the source has, gaps or overlaps between its fragments, or a
                second copy of a waiting half that differs from the first. An identical copy is
                accepted. A pair that has been handed out and not released may be replaced.
        """
        if not part.sources:
            raise ValueError(f"a {_kind(part)} part without sources cannot be joined.")
        for fragment in part.split() if len(part.sources) > 1 else [part]:
            half = self._complete(fragment)
            if half is None:
                continue
            key = half.sources[0].key
            self._keep(key, half)
            policy = self._halves[_POLICY].get(key)
            env = self._halves[_ENV].get(key)
            if policy is not None and env is not None:
                self._refused.add(key)
                yield key, policy, env

    def release(self, key: TrajectoryKey) -> None:
        """Forget a pair whose data has been taken over."""
        self._refused.discard(key)
        for halves in self._halves.values():
            halves.pop(key, None)

    def _keep(self, key: TrajectoryKey, half: PolicyPart | EnvPart) -> None:
        halves = self._halves[_kind(half)]
        waiting = halves.get(key)
        if (
            waiting is not None
            and key not in self._refused
            and not batch_values_equal(waiting, half)
        ):
            raise ValueError(
                f"a second, different {_kind(half)} part arrived for {key} before it was "
                "joined; each half may be published once."
            )
        halves[key] = half

    def _complete(self, fragment: PolicyPart | EnvPart) -> PolicyPart | EnvPart | None:
        """The whole half as soon as this fragment completes it."""
        source = fragment.sources[0]
        kind = _kind(fragment)
        if source.size > self._rows:
            raise ValueError(
                f"too many rows: {kind} part {source.key} has {source.size}, "
                f"its source has {self._rows}."
            )
        if source.offset == 0 and source.size == self._rows:
            return fragment
        slot = (kind, source.key)
        fragments = self._fragments.get(slot, [])
        for known in fragments:
            if known.sources == fragment.sources:
                if batch_values_equal(known, fragment):
                    return None
                raise ValueError(
                    f"a second, different {kind} fragment arrived for {source} "
                    "before it was joined."
                )
        rows = sum(known.sources[0].size for known in fragments) + source.size
        if rows > self._rows:
            raise ValueError(
                f"too many rows: the {kind} fragments of {source.key} have {rows}, "
                f"its source has {self._rows}."
            )
        if rows < self._rows:
            self._fragments[slot] = [*fragments, fragment]
            return None
        ordered = sorted([*fragments, fragment], key=lambda item: item.sources[0].offset)
        expected = 0
        for item in ordered:
            if item.sources[0].offset != expected:
                raise ValueError(
                    f"the {kind} fragments of {source.key} are not gap-free: "
                    f"expected row {expected}, got {item.sources[0].offset}."
                )
            expected += item.sources[0].size
        whole = type(fragment).merge(ordered)
        self._fragments.pop(slot)
        return whole

    def waiting(self, step_id: int | None = None) -> list[UnjoinedPart]:
        """What is held here and not joined.

        Args:
            step_id: Only parts of this and earlier iterations; all of them by default.
        """
        report = []
        for (kind, key), fragments in self._fragments.items():
            rows = sum(item.sources[0].size for item in fragments)
            report.append(UnjoinedPart(key, f"{kind} part has {rows} of {self._rows} rows"))
        policies, envs = self._halves[_POLICY], self._halves[_ENV]
        for key in {**policies, **envs}:
            if key in policies and key in envs:
                reason = "both parts are here but were refused"
            else:
                reason = f"{'environment' if key in policies else 'policy'} part is missing"
            report.append(UnjoinedPart(key, reason))
        return [item for item in report if step_id is None or item.key.step_id <= step_id]

    def forget(self, step_id: int) -> None:
        """Drop everything of this and earlier iterations."""
        for slot in [slot for slot in self._fragments if slot[1].step_id <= step_id]:
            del self._fragments[slot]
        for halves in self._halves.values():
            for key in [key for key in halves if key.step_id <= step_id]:
                self.release(key)

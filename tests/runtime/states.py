"""States that were edited, with the checksum of their line made anew as STATE.md says."""

from __future__ import annotations

import hashlib
import json
from typing import Any

State = dict[str, Any]


def values_of(state: State) -> dict[str, Any]:
    """The values in a state, without its checksum."""
    found: dict[str, Any] = json.loads(state["cursor"])
    del found["check"]
    return found


def sealed(values: dict[str, Any]) -> State:
    """A state of these values, whatever they are."""
    content = json.dumps(values, separators=(",", ":")).removesuffix("}")
    return {"cursor": f'{content},"check":"{hashlib.sha256(content.encode()).hexdigest()[:16]}"}}'}


def edited(state: State, **values: Any) -> State:
    """A state with other values for some keys."""
    return sealed(values_of(state) | values)


def replaced(state: State, old: str, new: str) -> State:
    """A state with another text at one place."""
    content, _, _ = state["cursor"].rpartition(',"check":')
    assert old in content
    content = content.replace(old, new)
    return {"cursor": f'{content},"check":"{hashlib.sha256(content.encode()).hexdigest()[:16]}"}}'}

"""A mapping of JSON values that a frozen dataclass can hold."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


class JsonMapping(Mapping[str, Any]):
    """Names with JSON values, by name. Nothing can change it, since it keeps their text and makes each value anew. Of
    two such mappings 1, 1.0 and true are three values."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Copies the values.

        Raises:
          ValueError: a name is no text, or a value is none of JSON's.
        """
        try:
            named = dict(sorted(values.items()))
            self._text = json.dumps(named, allow_nan=False)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a mapping of JSON values: {error}") from None
        if json.loads(self._text) != named:
            raise ValueError("not a mapping of JSON values: it has tuples, or names that are no texts")

    def __getitem__(self, name: str) -> Any:
        return json.loads(self._text)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(json.loads(self._text))

    def __len__(self) -> int:
        return len(json.loads(self._text))

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, JsonMapping) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return repr(json.loads(self._text))
